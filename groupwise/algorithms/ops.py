"""The maths that algorithms share, in two halves.

The first half works on rewards, as Python floats: sums are exact (`math.fsum`), so that no result
depends on the order of a group's members. The second half works on tensors through their methods
only. There, whatever stands outside the mask is replaced before it is exponentiated or multiplied:
neither values nor gradients can be reached by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.types import Group, Rollout

STD_EPSILON = 1e-4
"""Added to the standard deviation before dividing by it, as TRL does."""

TIE_TOLERANCE = 1e-6
"""Rewards whose whole spread is within this share of their size (or of 1, if they are smaller) are
the same reward. Ten times the rounding of float32, in which many rewards are computed, and far
below any difference that a reward means."""

MAX_LOG_RATIO = 20.0
"""Log-ratios (nats) are held within ± this before they are exponentiated: exp(89) is infinite in
float32, and 0 · ∞ a NaN gradient. Beyond it, at a ratio of half a billion, there is no gradient."""


def tied(rewards: Sequence[float]) -> bool:
    """Whether the rewards are all the same up to rounding, and so say nothing about who is better."""
    largest = max(map(abs, rewards), default=0.0)
    spread = max(rewards, default=0.0) - min(rewards, default=0.0)
    return spread <= TIE_TOLERANCE * max(1.0, largest)


def advantages(rewards: Sequence[float], *, divide_by_std: bool) -> list[float]:
    """Rewards of one group less their mean, divided on request by standard deviation + 1e-4.

    The standard deviation is that of a sample (over n − 1), as in TRL, which keeps |advantage| below
    (n − 1) / √n. Tied rewards, and so a group of one, give exactly 0.
    """
    if tied(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    centred = [reward - mean for reward in rewards]
    if not divide_by_std:
        return centred
    std = math.hypot(*sorted(centred)) / math.sqrt(len(centred) - 1)
    return [deviation / (std + STD_EPSILON) for deviation in centred]


def group_advantages(group: Group, *, divide_by_std: bool) -> tuple[float | None, ...]:
    """Advantage of each of `group.rollouts`, in their order; None for those that were not scored."""
    rewards = [_reward(rollout) for rollout in group.scored]
    credit = iter(advantages(rewards, divide_by_std=divide_by_std))
    return tuple(
        next(credit) if rollout.outcome == "scored" else None for rollout in group.rollouts
    )


def _reward(rollout: Rollout) -> float:
    where = f"draw {rollout.draw}, member {rollout.member}"
    assert rollout.reward is not None, f"{where} is scored, but has no reward"
    assert math.isfinite(rollout.reward), f"{where} is scored {rollout.reward}"
    return rollout.reward


def trained_tokens(rollout: Rollout) -> int:
    """How many tokens of a rollout teach: those that the policy wrote."""
    return sum(len(segment.token_ids) for segment in rollout.segments if segment.source == "policy")


def scored_members(groups: Iterable[Group]) -> int:
    """How many rollouts of all groups together were scored."""
    return sum(len(group.scored) for group in groups)


def masked_difference(a_BT: Tensor, b_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """a − b where the mask is set, 0 elsewhere, whatever stands there."""
    return (a_BT - b_BT).masked_fill(mask_BT == 0, 0.0)


def bounded(log_ratio_BT: Tensor) -> Tensor:
    """Log-ratios that can be exponentiated; see `MAX_LOG_RATIO`."""
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(ratio_BT: Tensor, advantages_B: Tensor, low: float, high: float) -> Tensor:
    """PPO's objective for each token, to be maximised: min(ratio · A, clip(ratio, low, high) · A)."""
    advantages_B1 = advantages_B.unsqueeze(-1)
    return (ratio_BT * advantages_B1).minimum(ratio_BT.clamp(low, high) * advantages_B1)


def k3(policy_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy ‖ reference) for each token.

    That is exp(d) − d − 1 with d = reference − policy log-probability. It is never negative, and its
    mean over the policy's own samples is the divergence (http://joschu.net/blog/kl-approx.html).
    The gradient of that mean is another matter: 1 − exp(d) times the gradient of the log-probability
    is, over the policy's own samples, the gradient of KL(reference ‖ policy).
    """
    log_ratio = bounded(masked_difference(reference_BT.detach(), policy_BT, mask_BT))
    return log_ratio.expm1() - log_ratio


def scaled_sum(values_BT: Tensor, scales_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Σ over rows of scale · Σ over tokens of mask · value."""
    return (values_BT * scales_B.unsqueeze(-1)).masked_fill(mask_BT == 0, 0.0).sum()


def token_stats(batch: TokenBatch, ratio_BT: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """The sums of `LossResult.stats` that need no reference. Outside the mask the ratio must be 1."""
    trained, ratio = batch.mask_BT != 0, ratio_BT.detach()
    advantages_B1 = batch.advantages_B.unsqueeze(-1)
    gap = masked_difference(batch.policy_logprobs_BT, batch.sampling_logprobs_BT, batch.mask_BT)
    stats = {
        "tokens": trained,
        "ratio": ratio.masked_fill(~trained, 0.0),
        "clip_low": (ratio < low) & (advantages_B1 < 0),
        "clip_high": (ratio > high) & (advantages_B1 > 0),
        "logprob_gap": gap.detach().abs(),
    }
    if batch.entropies_BT is not None:
        stats["entropy"] = batch.entropies_BT.detach().masked_fill(~trained, 0.0)
    return {name: values_BT.sum().to(ratio.dtype) for name, values_BT in stats.items()}
