"""What counts as solved."""

from __future__ import annotations

import pytest

from groupwise.data.success import (
    SOLVED,
    SoughtPart,
    check_part,
    part_of_success,
    success_value,
    successes,
)
from groupwise.errors import TaskError
from groupwise.rewards.registry import registered
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


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("brief", "correct"), "correct"),
        (("correct", "word_accuracy"), "word_accuracy"),
        (("sums/correctness", "sums/correctness_xml"), "sums/correctness"),
        (("incorrect", "correct_form", "judge"), None),
        ((), None),
    ],
)
def test_the_part_that_is_known_to_say_what_is_solved(names, found):
    assert part_of_success(names) == found


def test_rewards_of_the_package_that_say_what_is_solved_are_known_by_the_names_that_they_have():
    of_tasks = {"correct", "right", "right_positions", "won", "all_satisfied"}
    assert of_tasks < set(SOLVED)
    assert set(SOLVED) - of_tasks <= set(registered())


def test_a_part_that_the_reward_does_not_have_is_refused():
    check_part("data.replay.success_part", None, (), "the task")
    check_part("data.replay.success_part", "form", ("form", "accuracy"), "the task")
    with pytest.raises(TaskError) as caught:
        check_part("data.replay.success_part", "acuracy", ("form", "accuracy"), "the task")
    assert str(caught.value) == (
        "data.replay.success_part is 'acuracy', but the task has no such part. It has: form, accuracy."
    )
    with pytest.raises(TaskError, match="It has no get_reward_funcs"):
        check_part("data.replay.success_part", "acuracy", (), "the task")


def test_a_part_that_groups_do_not_have_is_told_once():
    failed = Group(0, Example(0, "p"), (rollout(None, "failed"),))
    scored = Group(0, Example(0, "p"), (rollout(1.0, won=1.0, found=None),))
    sought = SoughtPart("data.curriculum.success_part", "wun")
    assert sought.missing([failed]) is None
    assert sought.missing([failed, scored]) == (
        "data.curriculum.success_part is 'wun', but no reward part so far is called so, so that nothing counts as solved. "
        "There are: found, won"
    )
    assert sought.missing([scored]) is None
    for name in ("won", "found", None):
        assert SoughtPart("data.curriculum.success_part", name).missing([scored]) is None
