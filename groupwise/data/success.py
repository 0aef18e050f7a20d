"""Whether a rollout has solved its example, by the task's own reward."""

from __future__ import annotations

from groupwise.types import Group, Rollout

ACCURACY = "accuracy"
"""A reward part with this in its name tells success, where no part is named."""


def successes(group: Group, threshold: float, part: str | None) -> tuple[int, int]:
    """How many of the scored members reached `threshold`, and how many there are."""
    values = [success_value(rollout, part) for rollout in group.scored]
    return sum(value is not None and value >= threshold for value in values), len(values)


def success_value(rollout: Rollout, part: str | None) -> float | None:
    """The reward part `part`; without one the first that applies with accuracy in its name, else the total reward."""
    parts = rollout.part_values
    if part is not None:
        return parts.get(part)
    accuracies = [value for name, value in parts.items() if ACCURACY in name and value is not None]
    return accuracies[0] if accuracies else rollout.reward
