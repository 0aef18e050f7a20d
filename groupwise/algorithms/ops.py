"""The tensor maths that algorithms share; it uses only methods of tensors, so it needs no import of torch.

Values outside the mask are replaced before they are exponentiated or multiplied, so they affect neither values nor gradients.
"""

from __future__ import annotations

from groupwise.algorithms.base import SiblingSums, Tensor, TokenBatch

MAX_LOG_RATIO = 20.0
"""Log-ratios (nats) are clamped to ± this before they are exponentiated: exp(89) is infinite in float32, and 0 · ∞ a NaN gradient. Beyond
it, at a ratio of half a billion, there is no gradient."""


def masked_difference(a_BT: Tensor, b_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """a − b where the mask is set, 0 elsewhere, even for NaN or infinite inputs."""
    return (a_BT - b_BT).masked_fill(mask_BT == 0, 0.0)


def bound_log_ratio(log_ratio_BT: Tensor) -> Tensor:
    """Clamp log-ratios so that they can be exponentiated; see `MAX_LOG_RATIO`."""
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_counts(mask_BT: Tensor, like: Tensor, others: SiblingSums | None = None) -> Tensor:
    """Number of trained tokens in each row's rollout, at least 1, as [B, 1] in the dtype of `like`."""
    counts_B1 = (mask_BT != 0).sum(-1, keepdim=True)
    if others is not None:
        counts_B1 = counts_B1 + others.tokens_B.unsqueeze(-1)
    return counts_B1.clamp(min=1).to(like.dtype)


def sequence_log_ratio(
    log_ratio_BT: Tensor, others: SiblingSums | None, mask_BT: Tensor, *, mean: bool
) -> Tensor:
    """Give each token the log-ratio of its whole rollout: the mean or the sum of its tokens' log-ratios.

    The gradient of a token is that of its own log-probability (GSPO-token, equation 14); for the sum it is multiplied by the number of
    tokens. Averaged over the rollout, value and gradient are those of the rollout's ratio. A factor on a token then acts only on that
    token's gradient.
    """
    counts_B1 = token_counts(mask_BT, log_ratio_BT, others)
    share_B1 = 1 / counts_B1 if mean else 1.0
    total_B1 = log_ratio_BT.detach().sum(-1, keepdim=True)
    if others is not None:
        total_B1 = total_B1 + others.log_ratios_B.unsqueeze(-1)
    factor = 1.0 if mean else counts_B1
    carried_BT = (log_ratio_BT - log_ratio_BT.detach()) * factor
    return bound_log_ratio(total_B1 * share_B1 + carried_BT).masked_fill(mask_BT == 0, 0.0)


def clipped_surrogate(
    ratio_BT: Tensor, advantages: Tensor, low: float, high: float, delta: float | None = None
) -> Tensor:
    """PPO's objective for each token, to be maximised: min(ratio · A, clip(ratio, low, high) · A).

    With `delta`, the first ratio is capped at it, which bounds the loss if A < 0 (two-sided clipping, INTELLECT-2:
    https://arxiv.org/abs/2505.07291, section 3.4). `advantages` are `TokenBatch.advantages`.
    """
    free_BT = ratio_BT if delta is None else ratio_BT.clamp(max=delta)
    return (free_BT * advantages).minimum(ratio_BT.clamp(low, high) * advantages)


def scaled_sum(values_BT: Tensor, scales_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Σ over rows of scale · Σ over tokens of mask · value."""
    return (values_BT * scales_B.unsqueeze(-1)).masked_fill(mask_BT == 0, 0.0).sum()


def clip_stats(
    batch: TokenBatch, ratio_BT: Tensor, low: float, high: float, delta: float | None
) -> dict[str, Tensor]:
    """Marks of the tokens whose gradient each bound removed. Outside the mask the ratio must be 1."""
    advantages = batch.advantages
    stats = {
        "clip_low": (ratio_BT < low) & (advantages < 0),
        "clip_high": (ratio_BT > high) & (advantages > 0),
    }
    if delta is not None:
        stats["clip_delta"] = (ratio_BT > delta) & (advantages < 0)
    return stats


def token_stats(batch: TokenBatch) -> dict[str, Tensor]:
    """The entries of `LossResult.stats` that every loss has, per token; 0 outside the mask."""
    in_mask = batch.mask_BT != 0
    stats = {"tokens": in_mask}
    if batch.entropies_BT is not None:
        stats["entropy"] = batch.entropies_BT.detach().masked_fill(~in_mask, 0.0)
    return stats


def sum_stats(stats: dict[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """The sum of each statistic, in the dtype of `like`."""
    return {name: values_BT.sum().to(like.dtype) for name, values_BT in stats.items()}
