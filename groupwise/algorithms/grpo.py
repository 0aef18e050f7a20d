"""GRPO as published: DeepSeekMath, https://arxiv.org/abs/2402.03300, equations 3 and 4.

    A_i  = (r_i − mean(r)) / (std(r) + 1e-4)
    loss = 1/N · Σ_i 1/|o_i| · Σ_t [ −min(ratio · A_i, clip(ratio) · A_i) + beta · k3 ]

r are the rewards of a group's scored members, N is the number of scored rollouts of the whole step and |o_i| the number of trained tokens
of rollout i: each rollout counts the same, independent of its length.

Assumes that the members of a group are independent attempts at one prompt by one policy. Known biases: a token of a long rollout counts
less than one of a short rollout, and groups that nearly always succeed or fail are amplified by their small std; `dr_grpo` removes both.
The paper's penalty has the gradient of its estimator (`kl_gradient: estimator`); the default here is the exact one.

Degenerate cases: equal rewards, and a group of one, give advantage exactly 0. A failed member is in no mean, no spread and no denominator.
A masked truncated member counts in all three and has no gradient; so does one without a trained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms.advantages import trained_tokens
from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.group_relative import ScaledRewards, per_rollout
from groupwise.algorithms.knobs import SCALE_REWARDS, ScaleRewards
from groupwise.core.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo(ScaledRewards, Clipped):
    """Standardised advantages, mean over the tokens of each rollout, then over rollouts."""

    name: ClassVar[str] = "grpo"

    scale_rewards: ScaleRewards = field(default="group", metadata=SCALE_REWARDS)

    def scale(self, rollout: Rollout) -> float:
        """A mean over the rollout's tokens."""
        return 1 / trained_tokens(rollout)

    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        """The number of scored rollouts; their length does not matter."""
        return per_rollout(groups)
