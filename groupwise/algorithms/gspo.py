"""GSPO, group sequence policy optimisation: https://arxiv.org/abs/2507.18071, equations 5 to 7, 14.

    A_i  = (r_i − mean(r)) / (std(r) + 1e-4)
    s_i  = exp( 1/|o_i| · Σ_t log ratio_t )
    loss = 1/N · Σ_i −min(s_i · A_i, clip(s_i, 1 − 3e-4, 1 + 4e-4) · A_i)

Rewards are given to whole rollouts, and so is the ratio: the geometric mean of its tokens' ratios. A rollout is clipped as a whole. The
clip is a thousand times narrower than that of `grpo`, because means of many log-ratios are small.

The loss is computed in the form that the paper calls GSPO-token: each token carries the value s_i and the gradient s_i · ∇ of its own
log-probability, and the loss is their mean over the rollout. Value and gradient equal those of the formula; a weight of a token
(importance sampling) acts on that token's gradient, and so does an advantage of its own (`entropy_advantage`), which is what GSPO-token is
for.

Assumes ratios that start at 1: with the narrow clip the usual differences between sampler and learner would already clip half of the
rollouts. So the ratio is taken against the learner's own log-probabilities at the start of the step (`importance_sampling_correction`, on
by default).

Degenerate cases: those of `grpo`. A rollout of several rows (a template rewrote earlier turns) has one ratio for all of them; each row
carries the gradient of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms import ops
from groupwise.algorithms.advantages import trained_tokens
from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.correction import Correction
from groupwise.algorithms.group_relative import ScaledRewards, per_rollout
from groupwise.algorithms.knobs import SCALE_REWARDS, ScaleRewards, metadata_of
from groupwise.core.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(ScaledRewards, Clipped):
    """One ratio for a rollout, the geometric mean of its tokens' ratios, narrowly clipped."""

    name: ClassVar[str] = "gspo"

    epsilon: float = field(default=3e-4, metadata=metadata_of(Clipped, "epsilon"))
    epsilon_high: float | None = field(default=4e-4, metadata=metadata_of(Clipped, "epsilon_high"))
    importance_sampling_correction: Correction = field(
        default="token_truncate", metadata=metadata_of(Clipped, "importance_sampling_correction")
    )
    scale_rewards: ScaleRewards = field(default="group", metadata=SCALE_REWARDS)

    @property
    def ratio_of_rollout(self) -> bool:
        """True: all rows of a rollout share the mean of its log-ratios."""
        return True

    def scale(self, rollout: Rollout) -> float:
        """A mean over the rollout's tokens, which all carry the same value."""
        return 1 / trained_tokens(rollout)

    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        """The number of scored rollouts."""
        return per_rollout(groups)

    def own_log_ratio(self, batch: TokenBatch, log_ratio_BT: Tensor) -> Tensor:
        """The mean of the rollout's log-ratios."""
        return ops.sequence_log_ratio(log_ratio_BT, batch.others, batch.mask_BT, mean=True)
