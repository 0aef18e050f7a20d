"""What counts as solved."""

from __future__ import annotations

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.types import Example, Group, Outcome, RewardPart, Rollout
from groupwise.tasks.data.success import (
    SOLVED,
    ConfiguredPart,
    check_part,
    part_of_success,
    success_value,
    successes,
)
from groupwise.tasks.rewards.registry import registered_rewards


def rollout(reward: float | None, outcome: Outcome = "scored", **parts: float | None) -> Rollout:
    made = tuple(RewardPart(name.replace("__", "/"), value) for name, value in parts.items())
    return Rollout(0, 0, 0, (), (), "", outcome, reward=reward, parts=made)


@pytest.mark.parametrize(("made", "part", "value"), [
    (rollout(1.2, correct=1.0, brief=0.2), None, 1.2), (rollout(1.2, form=0.2, word_accuracy=1.0, accuracy_too=0.0), None, 1.0),
    (rollout(0.4, words__accuracy=None, sums__accuracy=0.4), None, 0.4), (rollout(1.0, accuracy=0.0, form=0.7), "form", 0.7),
    (rollout(1.0, accuracy=0.0), "form", None),
], ids=["the total", "the accuracy", "that of its task", "a named part", "no such part"])  # fmt: skip
def test_the_success_value_is_the_accuracy_else_the_reward(made, part, value):
    assert success_value(made, part) == value


@pytest.mark.parametrize(("threshold", "count"), [(1.0, 1), (0.5, 2), (0.51, 1), (-1.0, 3)])
def test_only_scored_members_count(threshold, count):
    failed = (rollout(None, "failed"), rollout(None, "timed_out"))
    members = (rollout(1.0), rollout(0.5), rollout(0.0), *failed)
    assert successes(Group(0, Example(0, "p"), members), threshold, None) == (count, 3)


@pytest.mark.parametrize(("names", "found"), [
    (("brief", "correct"), "correct"), (("correct", "word_accuracy"), "word_accuracy"),
    (("sums/correctness", "sums/correctness_xml"), "sums/correctness"),
    (("incorrect", "correct_form", "judge"), None), ((), None),
])  # fmt: skip
def test_the_part_that_is_known_to_say_what_is_solved(names, found):
    assert part_of_success(names) == found


def test_rewards_of_the_package_that_say_what_is_solved_are_known_by_the_names_that_they_have():
    of_tasks = {"correct", "right", "right_positions", "won", "all_satisfied"}
    assert of_tasks < set(SOLVED)
    assert set(SOLVED) - of_tasks <= set(registered_rewards())


def test_a_part_that_the_reward_does_not_have_is_refused():
    check_part("data.replay.success_part", None, (), "the task")
    check_part("data.replay.success_part", "form", ("form", "accuracy"), "the task")
    for parts, said in (
        (("form", "accuracy"), "It has: form, accuracy"),
        ((), "no get_reward_funcs"),
    ):
        with pytest.raises(TaskError, match=f"'acuracy'.*{said}"):
            check_part("data.replay.success_part", "acuracy", parts, "the task")


def test_a_part_that_groups_do_not_have_is_reported_once():
    failed = Group(0, Example(0, "p"), (rollout(None, "failed"),))
    scored = Group(0, Example(0, "p"), (rollout(1.0, won=1.0, found=None),))
    sought = ConfiguredPart("data.curriculum.success_part", "wun")
    assert sought.missing([failed]) is None
    told = str(sought.missing([failed, scored]))
    assert "'wun'" in told
    assert told.endswith("There are: found, won")
    assert sought.missing([scored]) is None
    for name in ("won", "found", None):
        assert ConfiguredPart("data.curriculum.success_part", name).missing([scored]) is None
