"""GMPO, geometric-mean policy optimisation: https://arxiv.org/abs/2507.20673.

    A_i  = (r_i − mean(r)) / (std(r) + 1e-4)
    c_t  = min(log ratio_t, +epsilon_high) if A_i > 0, max(log ratio_t, −epsilon) if A_i < 0
    loss = 1/N · Σ_i −exp( 1/|o_i| · Σ_t c_t ) · A_i

`grpo` averages the ratios of a rollout's tokens, where one extreme ratio dominates. It moves their geometric mean little, so the clip can
be wide: ratios between exp(−0.4) and exp(0.4). In contrast to `gspo`, each token is clipped before the mean is taken, so a
clipped token loses its gradient and the others of its rollout keep theirs. The loss is that of TRL's `GMPOTrainer` and verl's `geo_mean`.

As in `gspo`, each token carries the value of the whole rollout and the gradient of its own log-probability, and the loss is their mean over
the rollout, so a weight of a token (importance sampling) acts on that token's gradient.

Assumes one advantage for the whole rollout.

Degenerate cases: those of `grpo`. A rollout of several rows has one geometric mean for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms import ops
from groupwise.algorithms.advantages import trained_tokens
from groupwise.algorithms.base import Tensor, TokenBatch
from groupwise.algorithms.group_relative import GroupRelative, ScaledRewards, per_rollout
from groupwise.algorithms.knobs import SCALE_REWARDS, ScaleRewards
from groupwise.core.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo(ScaledRewards, GroupRelative):
    """One ratio for a rollout, the geometric mean of its tokens' clipped ratios."""

    name: ClassVar[str] = "gmpo"

    epsilon: float = field(
        default=0.4,
        metadata={
            "description": "A token's ratio is clipped below at exp(-epsilon) where the advantage is negative.",
            "gt": 0.0,
        },
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "description": "A token's ratio is clipped above at exp(epsilon_high) where the advantage is positive; null: the same as "
            "epsilon.",
            "gt": 0.0,
        },
    )
    scale_rewards: ScaleRewards = field(default="group", metadata=SCALE_REWARDS)

    @property
    def ratio_of_rollout(self) -> bool:
        """True: all rows of a rollout share the mean of its log-ratios."""
        return True

    def log_ratio_bounds(self, advantage: float) -> tuple[float, float]:
        """The clip, on the side that the advantage pushes to."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return (-math.inf, high) if advantage > 0 else (-self.epsilon, math.inf)

    def scale(self, rollout: Rollout) -> float:
        """A mean over the rollout's tokens, which all carry the same value."""
        return 1 / trained_tokens(rollout)

    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        """The number of scored rollouts."""
        return per_rollout(groups)

    def surrogate(
        self, batch: TokenBatch, log_ratio_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The rollout's geometric mean times its advantage, at each of its tokens."""
        advantages = batch.advantages
        (_, high), (low, _) = self.log_ratio_bounds(1.0), self.log_ratio_bounds(-1.0)
        rises, falls = advantages > 0, advantages < 0
        clipped_BT = log_ratio_BT.clamp(max=high).masked_fill(~rises, 0.0)
        clipped_BT = clipped_BT + log_ratio_BT.clamp(min=low).masked_fill(rises, 0.0)
        mean_BT = ops.sequence_log_ratio(clipped_BT, batch.others, batch.mask_BT, mean=True)
        ratio_BT = mean_BT.exp()
        stats = {
            "clip_low": (log_ratio_BT.detach() < low) & falls,
            "clip_high": (log_ratio_BT.detach() > high) & rises,
            "ratio": ratio_BT.detach().masked_fill(batch.mask_BT == 0, 0.0),
        }
        return ratio_BT * advantages, stats
