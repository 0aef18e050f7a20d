"""Turns rewards into advantages: the maths that algorithms share, on Python floats.

Sums are exact (`math.fsum`) or sorted first, so no result depends on the order of a group's members or of the groups. Equal rewards give
exactly 0 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from groupwise.algorithms.knobs import ScaleRewards
from groupwise.core.types import Group, Rollout

STD_EPSILON = 1e-4
"""Added to the standard deviation before dividing by it, as TRL does."""

TIE_TOLERANCE = 1e-6
"""Rewards count as equal if their whole spread is within this share of their size (or of 1, if they are smaller). It is ten times the
rounding of float32, in which many rewards are computed, and far below any meaningful difference between rewards."""

Advantages: TypeAlias = list[tuple[float | None, ...]]
"""The advantages of each group's rollouts, in the order of the rollouts; None for those that were not scored."""


def all_equal(rewards: Sequence[float]) -> bool:
    """True if the rewards are equal up to rounding, and so do not show which rollout is better."""
    largest = max(map(abs, rewards), default=0.0)
    spread = max(rewards, default=0.0) - min(rewards, default=0.0)
    return spread <= TIE_TOLERANCE * max(1.0, largest)


def centred(rewards: Sequence[float]) -> list[float]:
    """Rewards less their mean. Tied rewards, and so a single one, give exactly 0."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    return [reward - mean for reward in rewards]


def deviation(differences: Sequence[float]) -> float:
    """Standard deviation of a sample (over n − 1), from the differences to its mean; 0 for fewer than two.

    TRL does the same. A standardised advantage then stays below (n − 1) / √n.
    """
    if len(differences) < 2:
        return 0.0
    return math.hypot(*sorted(differences)) / math.sqrt(len(differences) - 1)


def scaled(differences: Sequence[float], std: float) -> list[float]:
    """Differences divided by the standard deviation + 1e-4."""
    return [difference / (std + STD_EPSILON) for difference in differences]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Each reward less the mean of the others, which is n / (n − 1) times the centred one."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    return [value * len(rewards) / (len(rewards) - 1) for value in centred(rewards)]


def group_relative(groups: Sequence[Group], scale: ScaleRewards) -> Advantages:
    """Rewards less their group's mean. `scale` divides them by the standard deviation of the group or the step, or not at all."""
    rewards = [scored_rewards(group) for group in groups]
    differences = [centred(values) for values in rewards]
    if scale == "group":
        differences = [scaled(values, deviation(values)) for values in differences]
    elif scale == "batch":
        std = deviation(centred([reward for values in rewards for reward in values]))
        differences = [scaled(values, std) for values in differences]
    return to_members(groups, differences)


def to_members(groups: Sequence[Group], values: Sequence[Sequence[float]]) -> Advantages:
    """Expand values of the scored members to all members, with None for the others."""
    return [
        _to_members(group, group_values) for group, group_values in zip(groups, values, strict=True)
    ]


def _to_members(group: Group, values: Sequence[float]) -> tuple[float | None, ...]:
    remaining = iter(values)
    return tuple(
        next(remaining) if rollout.outcome == "scored" else None for rollout in group.rollouts
    )


def scored_rewards(group: Group) -> list[float]:
    """The rewards of a group's scored members, in their order."""
    return [_checked_reward(rollout) for rollout in group.scored]


def _checked_reward(rollout: Rollout) -> float:
    label = f"draw {rollout.draw}, member {rollout.member}"
    assert rollout.reward is not None, f"{label} is scored, but has no reward"
    assert math.isfinite(rollout.reward), f"{label} is scored {rollout.reward}"
    return rollout.reward


def trained_tokens(rollout: Rollout) -> int:
    """Number of a rollout's tokens that are trained: those that the policy wrote."""
    return sum(len(segment.token_ids) for segment in rollout.segments if segment.source == "policy")


def scored_members(groups: Iterable[Group]) -> int:
    """Number of scored rollouts in all groups together."""
    return sum(len(group.scored) for group in groups)
