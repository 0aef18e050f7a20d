"""REINFORCE++: https://arxiv.org/abs/2501.03262, in both variants.

    A_i  = (r_i − mean(all r)) / (std(all r) + 1e-4)            plain
    A_i  = (r_i − mean(r)) / (std(all r − mean(r)) + 1e-4)      with group_baseline
    loss = 1/(Σ_i |o_i|) · Σ_i Σ_t [ −min(ratio · A_i, clip(ratio) · A_i) + beta · KL ]

r are the rewards of a group's scored members, "all r" those of the whole step. Advantages are normalised over the step: a standard
deviation of few members is noisy, depends on the reward that it divides, and amplifies groups that nearly always succeed.
`group_baseline` first subtracts the group's mean, which is the paper's variant for reasoning with verifiable rewards (with k2 as the KL
term of the loss); without it, a group whose members all succeed is rewarded as well.

Assumes a step of many prompts, since its mean and spread represent those of all prompts.

Differences to other code: OpenRLHF and verl take mean and spread over tokens, so long rollouts count more in them. Here rollouts count the
same, as in the formula for one reward per rollout. In the plain variant the paper puts the KL into the reward; here it is a term of the
loss.

Degenerate cases: equal rewards in the whole step, and a step of one rollout, give advantage exactly 0; with group_baseline so does each
group with equal rewards. Failed members are in no mean, spread or denominator. A masked truncated rollout counts only in mean and spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.algorithms.advantages import (
    Advantages,
    centred,
    deviation,
    scaled,
    scored_rewards,
    to_members,
)
from groupwise.algorithms.clipped import Clipped
from groupwise.core.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePp(Clipped):
    """Advantages normalised over the step, mean over its tokens."""

    name: ClassVar[str] = "reinforce_pp"

    group_baseline: bool = field(
        default=False,
        metadata={
            "description": "Subtract the mean of its group from each reward, then divide by the spread of the step. "
            "false: subtract the mean of the step.",
        },
    )

    @property
    def compares_members(self) -> bool:
        """False in the plain form without dynamic sampling, which compares the rollouts of the whole step."""
        return self.group_baseline or self.dynamic_sampling

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Centred within the group or the step, scaled by the step's standard deviation."""
        rewards = [scored_rewards(group) for group in groups]
        if self.group_baseline:
            differences = [value for values in rewards for value in centred(values)]
        else:
            differences = centred([value for values in rewards for value in values])
        remaining = iter(scaled(differences, deviation(differences)))
        return to_members(groups, [[next(remaining) for _ in values] for values in rewards])
