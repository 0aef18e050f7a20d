"""SAPO, soft adaptive policy optimisation: https://arxiv.org/abs/2511.20347.

    A_i  = (r_i − mean(r)) / (std(r) + 1e-4)
    f(x) = 4/τ · sigmoid(τ · (x − 1)),   τ = temperature_positive if A_i > 0, else temperature_negative
    loss = 1/N · Σ_i 1/|o_i| · Σ_t −f(ratio_t) · A_i

A smooth gate in place of the clip: a token's gradient is weighted by 4 · σ(1 − σ), which is 1 at a ratio of 1 and sinks on both sides,
the faster the larger τ is, but never to exactly 0. Negative advantages have the larger temperature, because their gradient raises many
tokens that were not sampled, which makes training unstable. The loss is that of TRL's `loss_type: sapo` and of verl's `sapo`.

The value of the loss has no meaning by itself: at a ratio of 1 a token's is −2A/τ. Its gradient there is that of `grpo`.

Degenerate cases: those of `grpo`.
"""

from __future__ import annotations

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
class Sapo(ScaledRewards, GroupRelative):
    """A sigmoid gate for each token's ratio, mean over the tokens of each rollout, then over rollouts."""

    name: ClassVar[str] = "sapo"

    temperature_positive: float = field(
        default=1.0,
        metadata={
            "description": "How fast the gate closes as the ratio leaves 1, where the advantage is positive.",
            "gt": 0.0,
        },
    )
    temperature_negative: float = field(
        default=1.05,
        metadata={
            "description": "How fast the gate closes as the ratio leaves 1, where the advantage is negative.",
            "gt": 0.0,
        },
    )
    scale_rewards: ScaleRewards = field(default="group", metadata=SCALE_REWARDS)

    def scale(self, rollout: Rollout) -> float:
        """A mean over the rollout's tokens."""
        return 1 / trained_tokens(rollout)

    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        """The number of scored rollouts; their length does not matter."""
        return per_rollout(groups)

    def surrogate(
        self, batch: TokenBatch, log_ratio_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The gate of each token's ratio times the advantage."""
        rises = batch.advantages > 0
        away_BT = ops.bound_log_ratio(log_ratio_BT).exp() - 1
        gate_BT = _gate(away_BT, self.temperature_positive).masked_fill(~rises, 0.0)
        gate_BT = gate_BT + _gate(away_BT, self.temperature_negative).masked_fill(rises, 0.0)
        ratio_BT = (away_BT.detach() + 1).masked_fill(batch.mask_BT == 0, 0.0)
        return gate_BT * batch.advantages, {"ratio": ratio_BT}


def _gate(away_BT: Tensor, temperature: float) -> Tensor:
    return (away_BT * temperature).sigmoid() * (4 / temperature)
