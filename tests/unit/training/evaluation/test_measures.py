"""Measures from rows: values by prompt, samples that could not be scored, answers for majority votes, keys that pair."""

from dataclasses import replace
from typing import Any

import pytest

from groupwise.core.types import Example, Group, Outcome, RewardPart, Rollout, Segment
from groupwise.training.evaluation.measures import (
    Success,
    key_of,
    measure,
    metric_names,
    rows_of,
)


def rollout(member: int, reward: float | None, text: str = "7", **more: Any) -> Rollout:
    outcome: Outcome = "failed" if reward is None else "scored"
    reason = "it raised" if reward is None else None
    segment = Segment("policy", (1,) * (member + 1), finish_reason="length" if member else "stop")
    found = Rollout(0, member, 0, (1,), (segment,), text, outcome, reason, reward)
    return replace(found, **more)


def group(index: int, *rollouts: Rollout, **columns: Any) -> Group:
    return Group(index, Example(index, f"ask {index}", columns), rollouts)


def values(name: str, *groups: Group, success: Success | None = None) -> list[float]:
    found = measure(name, rows_of(groups, success or Success()))
    assert found is not None
    return list(found.values.values())


def test_a_value_for_each_prompt():
    first = group(0, rollout(0, 1.0), rollout(1, 0.0), rollout(2, 0.5), rollout(3, 0.0))
    second = group(1, *(rollout(member, 1.0) for member in range(4)))
    assert values("reward", first, second) == [0.375, 1.0]
    assert values("pass@1", first, second) == pytest.approx([0.25, 1.0])
    assert values("pass@2", first, second) == pytest.approx([0.5, 1.0])
    assert values("avg@4", first, second) == [0.25, 1.0]
    assert values("completions/mean_length", first, second) == [2.5, 2.5]
    assert values("completions/clipped_ratio", first, second) == [0.75, 0.75]


def test_unscored_rollouts_do_not_count_in_pass_at_k():
    torn = group(0, rollout(0, 1.0), rollout(1, 0.0), rollout(2, None), rollout(3, None))
    rows = rows_of([torn, group(1, *(rollout(m, 1.0) for m in range(4)))], Success())
    assert values("pass@1", torn) == [0.5]
    assert values("pass@2", torn) == [1.0]
    found = measure("pass@4", rows)
    assert (list(found.values.values()), found.left_out) == ([1.0], 1)
    assert found.interval.count == 1


def test_a_part_that_does_not_apply_says_nothing():
    parts = [(RewardPart("right", 1.0), RewardPart("brief", None)), (RewardPart("right", 0.0),)]
    first = group(0, *(rollout(m, 1.0, parts=each) for m, each in enumerate(parts)))
    assert values("pass@1", first, success=Success(0.9, "right")) == [0.5]
    assert values("pass@1", first, success=Success(0.9, "brief")) == []
    assert values("rewards/right/mean", first) == [0.5]
    assert "rewards/brief/mean" not in metric_names(rows_of([first], Success()), [1])


# The vote


def test_recorded_answers_come_before_texts():
    notes = [{"answer": 7}, {"answer": 7.0}, {"answer": "8"}, {"answer": None}, {}]
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0]
    pairs = zip(rewards, notes, strict=True)
    members = [rollout(m, r, f"long story {m}", notes=n) for m, (r, n) in enumerate(pairs)]
    rows = rows_of([group(0, *members)], Success())
    assert [row["answer"] for row in rows] == ["7", "7", "8", None, None]
    assert values("maj@5", group(0, *members)) == [1.0]
    gold = [replace(each, notes={"extracted_answer": "x", "answer": "gold"}) for each in members]
    assert rows_of([group(0, *gold)], Success())[0]["answer"] == "x"


def test_rewards_of_one_label_record_answers_and_those_of_another_need_not():
    told = [rollout(m, r, f"well, {m}", notes={"extracted_answer": a}) for m, r, a in [
        (0, 1.0, "4"), (1, 1.0, "4"), (2, 0.0, None)]]  # fmt: skip
    texts = [rollout(0, 1.0, "cat"), rollout(1, 1.0, "cat "), rollout(2, 0.0, "dog")]
    for column in ("task", "dataset_name"):
        groups = group(0, *told, **{column: "sums"}), group(1, *texts, **{column: "words"})
        answers = [row["answer"] for row in rows_of(groups, Success())]
        assert answers == ["4", "4", None, "cat", "cat", "dog"]
        assert values("maj@3", *groups) == [1.0, 1.0]


def test_no_answer_never_wins():
    unread = [rollout(m, 0.0, "hm", notes={"extracted_answer": None}) for m in range(2)]
    right = rollout(2, 1.0, "so 4", notes={"extracted_answer": "4"})
    assert values("maj@3", group(0, *unread, right)) == [1.0]
    assert values("maj@2", group(0, *unread)) == [0.0]
    lucky = [replace(each, reward=1.0) for each in unread]
    assert values("maj@2", group(0, *lucky)) == [0.0]


# Keys


def test_an_example_is_known_by_its_content_and_not_its_place():
    assert key_of(Example(0, "a", {"answer": 1})) == key_of(Example(9, "a", {"answer": 1}))
    assert key_of(Example(0, "a", {"answer": 1})) != key_of(Example(0, "a", {"answer": 2}))
