"""A sampled group combined with the rewards that its client posted: the input of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from groupwise.core.types import Group, RewardPart, Rollout

PART = "reward"
"""The name of the one reward that a client gives a completion."""
NO_REWARD = "its client gave it no reward (null)"


def scored_group(group: Group, rewards: Sequence[float | None]) -> Group:
    """Each rollout with its reward. A rollout without one is marked as failed and is not trained on."""

    def score(rollout: Rollout, reward: float | None) -> Rollout:
        if reward is None:
            return replace(rollout, outcome="failed", reason=NO_REWARD)
        return replace(rollout, outcome="scored", reward=reward, parts=(RewardPart(PART, reward),))

    return replace(
        group, rollouts=tuple(score(*pair) for pair in zip(group.rollouts, rewards, strict=True))
    )
