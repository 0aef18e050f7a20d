"""GRPO as published: DeepSeekMath, https://arxiv.org/abs/2402.03300, equations 3 and 4.

    A_i  = (r_i − mean(r)) / (std(r) + 1e-4)
    loss = 1/N · Σ_i 1/|o_i| · Σ_t [ −min(ratio · A_i, clip(ratio) · A_i) + beta · k3 ]

r are the rewards of a group's scored members, N counts the scored rollouts of the whole step and
|o_i| the trained tokens of rollout i: each rollout weighs the same, however long it is.

Assumes that the members of a group are independent attempts at one prompt by one policy. Known
biases: a token of a long rollout counts less than one of a short rollout, and groups that nearly
always succeed or fail are blown up by their small std; `dr_grpo` removes both.

Degenerate cases: rewards that are the same, and a group of one, give advantage exactly 0. A failed
member is in no mean, no spread and no denominator. A truncated one that is masked counts in all
three and has no gradient; so does one without a single trained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from groupwise.algorithms import ops
from groupwise.algorithms.clipped import ClippedSurrogate
from groupwise.types import Group, Weight


@dataclass(frozen=True, slots=True)
class Grpo(ClippedSurrogate):
    """Standardised advantages, mean over the tokens of each rollout, then over rollouts."""

    name: ClassVar[str] = "grpo"

    scale_rewards: Literal["group", "none"] = field(
        default="group",
        metadata={
            "description": "group: divide centred rewards by their group's standard deviation, as "
            "published. none: centre only, so that the size of rewards matters."
        },
    )

    def weights(self, group: Group) -> tuple[Weight | None, ...]:
        """The scale is 1 / trained tokens of the rollout."""
        credit = ops.group_advantages(group, divide_by_std=self.scale_rewards == "group")
        return tuple(
            Weight(advantage, scale=1 / ops.trained_tokens(rollout))
            if advantage is not None and self.trains(rollout)
            else None
            for rollout, advantage in zip(group.rollouts, credit, strict=True)
        )

    def denominators(self, groups: Sequence[Group], max_completion_length: int) -> dict[str, float]:
        """The number of scored rollouts; the length plays no part."""
        return self.per_component(float(ops.scored_members(groups)))
