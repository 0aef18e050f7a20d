"""Decides if a rollout has solved its example, by the task's own reward.

Success is judged by the reward part that the config names, else by a part with accuracy in its name, else by the total reward. The
signals of reward hacking also accept other part names (`part_of_success`) and never use the total, because the total is what they
question.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from groupwise.core.errors import TaskError
from groupwise.core.types import Group, Rollout

ACCURACY = "accuracy"
"""A reward part with this in its name measures success, unless the config names a part."""
SOLVED = (
    "correct",
    "correctness",
    "correctness_xml",
    "math_answer",
    "python_tests",
    "rush_solution_exact",
    "right",
    "right_positions",
    "won",
    "all_satisfied",
)
"""Other parts that measure how far an example is solved, as named by the package's rewards, tasks and examples."""


def successes(group: Group, threshold: float, part: str | None) -> tuple[int, int]:
    """The number of scored members that reached `threshold`, and the number of scored members."""
    values = [success_value(rollout, part) for rollout in group.scored]
    return sum(value is not None and value >= threshold for value in values), len(values)


def success_value(rollout: Rollout, part: str | None) -> float | None:
    """The reward part `part`; without one the first that applies with accuracy in its name, else the total reward."""
    parts = rollout.part_values
    if part is not None:
        return parts.get(part)
    accuracies = [value for name, value in parts.items() if ACCURACY in name and value is not None]
    return accuracies[0] if accuracies else rollout.reward


def part_of_success(names: Iterable[str]) -> str | None:
    """The part whose name shows that it measures whether an example is solved.

    The first with accuracy in its name, else the first of SOLVED, with or without a task label as prefix.
    """
    all_names = list(names)
    candidates = (name for name in all_names if name.rpartition("/")[2] in SOLVED)
    return next((name for name in all_names if ACCURACY in name), None) or next(candidates, None)


def check_part(key: str, part: str | None, names: Collection[str], described: str) -> None:
    """Raise TaskError if a key names a part that the reward of the task does not have."""
    if part is not None and part not in names:
        hint = f"It has: {', '.join(names)}." if names else "It has no get_reward_funcs."
        raise TaskError(f"{key} is {part!r}, but {described} has no such part. {hint}")


@dataclass(slots=True)
class ConfiguredPart:
    """A part that a config key names. It is searched for in a run's groups, because only they show which parts an environment gives."""

    key: str
    name: str | None
    settled: bool = False
    """True once the part was found or the user was warned."""

    def missing(self, groups: Sequence[Group]) -> str | None:
        """A warning that rollouts were scored and none of them has the part; given once, because the name may be wrong."""
        scored = [rollout for group in groups for rollout in group.scored]
        if self.settled or self.name is None or not scored:
            return None
        self.settled = True
        part_names = sorted({part.name for rollout in scored for part in rollout.parts})
        if self.name in part_names:
            return None
        return (
            f"{self.key} is {self.name!r}, but no reward part so far is called so, so that nothing counts as solved. There are: "
            f"{', '.join(part_names) or 'none'}"
        )
