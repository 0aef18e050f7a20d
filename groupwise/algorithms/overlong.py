"""Soft over-long punishment: https://arxiv.org/abs/2503.14476 (DAPO), equation 13.

    R(length) = 0                               length ≤ limit − cache
                (limit − cache − length) / cache   up to the limit

A rollout that ends within the last `cache` tokens before the limit is punished in proportion, up to 1 at the limit. A rollout that ends
just in time is then worth less than a short one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from groupwise.algorithms.advantages import trained_tokens
from groupwise.core.errors import TaskError
from groupwise.core.types import Group, RewardPart, Rollout

PART = "overlong"
"""Name of the reward part."""


def punishment(length: int, limit: int, cache: int) -> float:
    """The punishment for a completion of `length` tokens, between 0 and −1."""
    return max(min((limit - cache - length) / cache, 0.0), -1.0)


def check_names(names: Iterable[str]) -> None:
    """Raise TaskError if a reward has the name of the punishment."""
    if PART in names:
        raise TaskError(
            f"A reward is called {PART!r}, which is the name of the algorithm's own "
            "punishment. Rename that reward, or set algorithm.soft_punish_cache to 0."
        )


def with_overlong_punishment(group: Group, limit: int, cache: int, factor: float) -> Group:
    """Add the punishment as a part of each scored rollout's reward, with `factor` as its weight.

    Raises TaskError if a reward has the part's name; the rewards of an environment are not known earlier.
    """
    return replace(
        group,
        rollouts=tuple(
            _with_punishment(rollout, limit, cache, factor)
            if rollout.outcome == "scored"
            else rollout
            for rollout in group.rollouts
        ),
    )


def _with_punishment(rollout: Rollout, limit: int, cache: int, factor: float) -> Rollout:
    check_names(part.name for part in rollout.parts)
    assert rollout.reward is not None, f"draw {rollout.draw}, member {rollout.member} has no reward"
    value = punishment(trained_tokens(rollout), limit, cache)
    return replace(
        rollout,
        reward=rollout.reward + factor * value,
        parts=(*rollout.parts, RewardPart(PART, value, factor)),
    )


def reward_of_the_task(rollout: Rollout) -> float:
    """The reward of a scored rollout without the punishment."""
    assert rollout.reward is not None, f"draw {rollout.draw}, member {rollout.member} has no reward"
    penalties = [part.weight * (part.value or 0.0) for part in rollout.parts if part.name == PART]
    return rollout.reward - sum(penalties)
