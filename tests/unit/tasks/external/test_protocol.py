"""Answers of environments, which may be any JSON: unusable ones are reported, and no other error is raised."""

import math
from typing import Any

import pytest

from groupwise.tasks.external.protocol import MAX_NOTES, InvalidAnswer, parse_attempt_result

ONE_REWARD = {"name": "r", "value": 1}


def nested(levels: int) -> Any:
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "answer",
    [
        "won",
        {"rewards": {"r": 1}},
        {"rewards": [{"name": "r", "value": math.nan}]},
        {"rewards": [{"name": "r", "value": 10**400}]},
        {"rewards": [{"name": "r", "value": 1e308}, {"name": "q", "value": 1e308}]},
        {"rewards": [ONE_REWARD], "metrics": {"m" * 1000: 1}},
        {"rewards": [ONE_REWARD], "completions": "all"},
        {"rewards": [ONE_REWARD], "completions": ["of another"]},
        {"rewards": [ONE_REWARD], "notes": {"text": "\ud800"}},
        {"rewards": [ONE_REWARD], "notes": {"board": math.inf}},
        {"rewards": [ONE_REWARD], "notes": {"board": nested(900)}},
        {"rewards": [ONE_REWARD], "notes": {"text": "x" * MAX_NOTES}},
    ],
)
def test_an_answer_that_cannot_be_used_is_refused(answer: Any):
    with pytest.raises(InvalidAnswer):
        parse_attempt_result(answer, {"a1": None})


def test_names_that_are_taken_and_odd_characters_are_kept_apart():
    answer = {
        "rewards": [ONE_REWARD],
        "metrics": {"r": 2.0},
        "stopped": "\ud800",
        "notes": {"seat": 1},
    }
    played = parse_attempt_result(answer, {"a1": None})
    assert [(part.name, part.value, part.weight) for part in played.parts] == [
        ("r", 1.0, 1.0),
        ("metric/r", 2.0, 0.0),
    ]
    assert played.notes == {"seat": 1, "stopped": "\\ud800"}
