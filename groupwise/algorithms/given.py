"""Losses for a caller who provides the credit of every token itself. The sum is not divided by anything.

    log_probability         −Σ c · log-probability
    ratio                   −Σ c · ratio
    clipped_ratio           −Σ min(c · ratio, c · clip(ratio, clip_low, clip_high))
    clipped_weight          −Σ c · sg[ clip(ratio, clip_low, clip_high) ] · log-probability
    quadratic_penalty       −Σ ( c · log-probability − beta/2 · (log-probability − sampling log-probability)² )
    clipped_sequence_ratio  −Σ min(c · s, c · clip(s, clip_low, clip_high))

c is the credit of a token (`Row.credits`): the weight of a teacher's token, or an advantage, which may differ within a rollout. ratio is
exp(policy log-probability − sampling log-probability), and sg stops its gradient. s is the geometric mean of the ratios of the row's
trained tokens; at each token it has the gradient of that token's own log-probability (GSPO-token, `groupwise.algorithms.gspo`).
`Row.advantage` and `Row.scale` are ignored. The client of the training server's verbs calls these cross_entropy, importance_sampling, ppo,
cispo, dro and gspo.

Degenerate cases: a token with mask 0 has neither value nor gradient, even if it has a credit; without a trained token the sum is 0.
log_probability ignores the sampling log-probabilities.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from groupwise.algorithms import ops
from groupwise.algorithms.base import LossDefaults, LossResult, Tensor, TokenBatch
from groupwise.algorithms.knobs import check_knobs
from groupwise.core.types import LossSpec

Surrogate = Literal[
    "log_probability",
    "ratio",
    "clipped_ratio",
    "clipped_weight",
    "quadratic_penalty",
    "clipped_sequence_ratio",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(LossDefaults):
    """A loss with the caller's credits: it maximises the sum over tokens of one of six surrogates."""

    name: ClassVar[str] = "given"

    surrogate: Surrogate = field(
        default="log_probability",
        metadata={"description": "What the credit of a token multiplies; see the module."},
    )
    clip_low: float = field(
        default=0.8,
        metadata={"description": "The ratio is clipped below at this.", "ge": 0.0, "le": 1.0},
    )
    clip_high: float = field(
        default=1.2,
        metadata={"description": "The ratio is clipped above at this.", "ge": 1.0},
    )
    beta: float = field(
        default=0.0,
        metadata={
            "description": "Weight of the squared distance to the sampling log-probabilities, in `quadratic_penalty`.",
            "ge": 0.0,
        },
    )

    def __post_init__(self) -> None:
        check_knobs(self)

    def loss_spec(self) -> LossSpec:
        """Name and every knob."""
        return LossSpec(self.name, asdict(self))

    def loss(self, batch: TokenBatch) -> LossResult:
        """The sum at the top of this module, as the component `policy`. Raises ValueError if the batch has no credits."""
        if batch.credits_BT is None:
            raise ValueError(
                "The loss `given` needs the credit of each token, but the batch has none. Fill `Row.credits`, or take an algorithm."
            )
        credits_BT = batch.credits_BT.masked_fill(batch.mask_BT == 0, 0.0)
        value_BT, stats = self._token_values(batch, credits_BT)
        total = -value_BT.masked_fill(batch.mask_BT == 0, 0.0).sum()
        return LossResult(
            {"policy": total}, ops.sum_stats({**ops.token_stats(batch), **stats}, value_BT)
        )

    def _token_values(
        self, batch: TokenBatch, credits_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The value to maximise, and statistics, both per token."""
        outside_mask = batch.mask_BT == 0
        logprobs_BT = batch.policy_logprobs_BT.masked_fill(outside_mask, 0.0)
        if self.surrogate == "log_probability":
            return credits_BT * logprobs_BT, {}
        sampled_BT = batch.sampling_logprobs_BT.detach()
        log_ratio_BT = ops.masked_difference(batch.policy_logprobs_BT, sampled_BT, batch.mask_BT)
        if self.surrogate == "quadratic_penalty":
            value_BT = credits_BT * logprobs_BT - 0.5 * self.beta * log_ratio_BT**2
            return value_BT, {"logprob_gap": log_ratio_BT.detach().abs()}
        if self.surrogate == "clipped_sequence_ratio":
            ratio_BT = ops.sequence_log_ratio(log_ratio_BT, None, batch.mask_BT, mean=True).exp()
        else:
            ratio_BT = ops.bound_log_ratio(log_ratio_BT).exp()
        seen_BT = ratio_BT.detach()
        stats = {
            "ratio": seen_BT.masked_fill(outside_mask, 0.0),
            "logprob_gap": log_ratio_BT.detach().abs(),
        }
        if self.surrogate == "ratio":
            return credits_BT * ratio_BT, stats
        low_BT, high_BT = seen_BT < self.clip_low, seen_BT > self.clip_high
        if self.surrogate == "clipped_weight":
            weight_stats = {
                "clip_low": low_BT & (credits_BT != 0),
                "clip_high": high_BT & (credits_BT != 0),
            }
            weight_BT = seen_BT.clamp(self.clip_low, self.clip_high)
            return credits_BT * weight_BT * logprobs_BT, stats | weight_stats
        clipped_BT = ratio_BT.clamp(self.clip_low, self.clip_high)
        clip_stats = {
            "clip_low": low_BT & (credits_BT < 0),
            "clip_high": high_BT & (credits_BT > 0),
        }
        return (credits_BT * ratio_BT).minimum(credits_BT * clipped_BT), stats | clip_stats
