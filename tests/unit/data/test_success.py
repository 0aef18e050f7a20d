"""What counts as solved."""

from __future__ import annotations

import pytest

from groupwise.data.success import success_value, successes
from groupwise.types import Example, Group, Outcome, RewardPart, Rollout


def rollout(reward: float | None, outcome: Outcome = "scored", **parts: float | None) -> Rollout:
    made = tuple(RewardPart(name.replace("__", "/"), value) for name, value in parts.items())
    return Rollout(0, 0, 0, (), (), "", outcome, reward=reward, parts=made)


def test_the_total_where_no_part_speaks_of_accuracy():
    assert success_value(rollout(1.2, correct=1.0, brief=0.2), None) == 1.2


def test_the_part_whose_name_contains_accuracy():
    assert success_value(rollout(1.2, form=0.2, word_accuracy=1.0, accuracy_too=0.0), None) == 1.0


def test_one_that_does_not_apply_is_passed_over():
    """Of several tasks in one run each has its own."""
    mixed = rollout(0.4, words__accuracy=None, sums__accuracy=0.4)
    assert success_value(mixed, None) == 0.4


def test_a_named_part():
    assert success_value(rollout(1.0, accuracy=0.0, form=0.7), "form") == 0.7
    assert success_value(rollout(1.0, accuracy=0.0), "form") is None


@pytest.mark.parametrize(("threshold", "count"), [(1.0, 1), (0.5, 2), (0.51, 1), (-1.0, 3)])
def test_only_scored_members_count(threshold, count):
    members = (
        rollout(1.0),
        rollout(0.5),
        rollout(0.0),
        rollout(None, "failed"),
        rollout(None, "timed_out"),
    )
    group = Group(0, Example(0, "p"), members)
    assert successes(group, threshold, None) == (count, 3)
