"""GDPO, group reward-decoupled normalisation: https://arxiv.org/abs/2601.05242.

    a_ij = (v_ij − mean_i(v_j)) / (std_i(v_j) + 1e-4)            for each reward j, within the group
    s_i  = Σ_j w_j · a_ij
    A_i  = (s_i − mean(all s)) / (std(all s) + 1e-4)             over the whole step
    loss = 1/N · Σ_i 1/|o_i| · Σ_t −min(ratio · A_i, clip(ratio) · A_i)

v_ij is what reward j gave rollout i, and w_j its weight. With several rewards, `grpo` standardises their sum: rollouts with the same sum
look the same, whichever rewards they earned, and the reward with the largest spread decides. Here each reward is standardised by
itself first; the weights then say how much it counts, whatever its size. The advantages are those of TRL's
`multi_objective_aggregation: normalize_then_sum`.

Assumes several rewards; with one, the advantages are those of `grpo`, standardised once more over the step.

Degenerate cases: a reward that is the same for the whole group adds exactly 0 to its members, and if all do, so that no rollout has a
signal, advantages are exactly 0. A reward that does not apply to a member (None) is not in its sum. What an algorithm or an environment
adds as several parts of one name counts as one reward, their sum. A failed member is in no mean, spread or denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from groupwise.algorithms.advantages import (
    Advantages,
    centred,
    deviation,
    scaled,
    to_members,
    trained_tokens,
)
from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.group_relative import per_rollout
from groupwise.core.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Gdpo(Clipped):
    """Each reward standardised by itself within the group, their weighted sum over the step; otherwise `grpo`."""

    name: ClassVar[str] = "gdpo"

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Standardised reward by reward within the group, then their sum over the step."""
        sums = [_sums_of_standardised(group.scored) for group in groups]
        differences = centred([value for values in sums for value in values])
        remaining = iter(scaled(differences, deviation(differences)))
        return to_members(groups, [[next(remaining) for _ in values] for values in sums])

    def scale(self, rollout: Rollout) -> float:
        """A mean over the rollout's tokens."""
        return 1 / trained_tokens(rollout)

    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        """The number of scored rollouts; their length does not matter."""
        return per_rollout(groups)


def _sums_of_standardised(rollouts: Sequence[Rollout]) -> list[float]:
    """For each rollout of a group, the weighted sum of its standardised rewards; rollouts without parts have their reward alone."""
    values = [_weighted_values(rollout) for rollout in rollouts]
    sums = [0.0] * len(rollouts)
    for name in sorted({name for of_rollout in values for name in of_rollout}):
        indices = [index for index, of_rollout in enumerate(values) if name in of_rollout]
        differences = centred([values[index][name][0] for index in indices])
        for index, value in zip(indices, scaled(differences, deviation(differences)), strict=True):
            sums[index] += values[index][name][1] * value
    return sums


def _weighted_values(rollout: Rollout) -> dict[str, tuple[float, float]]:
    """The value and the weight of each reward that applies to the rollout and counts."""
    assert rollout.reward is not None, f"draw {rollout.draw}, member {rollout.member} has no reward"
    if not rollout.parts:
        return {"reward": (rollout.reward, 1.0)}
    weights = {part.name: part.weight for part in rollout.parts}
    return {
        name: (value, weights[name])
        for name, value in rollout.part_values.items()
        if value is not None and weights[name] != 0
    }
