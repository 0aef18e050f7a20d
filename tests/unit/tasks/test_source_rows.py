"""What is used of a source's rows: each once, the others counted by the reason or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from groupwise.data.chat import Unusable
from groupwise.errors import TaskError
from groupwise.tasks.source_rows import usable

ROWS = [{"n": 1}, {"n": 20}, {"n": -3}, {"n": 1}, {"n": 0}, {"n": -4}, {"n": 21}]


def positive(row: Mapping[str, Any]) -> int:
    if row["n"] <= 0:
        raise Unusable("it is 0" if row["n"] == 0 else "it is negative")
    return row["n"]


def used(rows: list[dict[str, Any]], *, strict: bool = False) -> tuple[list[int], dict[str, int]]:
    """Numbers are the same here if they have as many digits."""
    made, left_out = usable(
        rows, positive, lambda n: len(str(n)), source="Numbers", strict=strict, remedy="Count."
    )
    return made, dict(left_out)


def test_the_first_of_those_that_are_the_same_is_used_and_others_are_counted() -> None:
    counts = {"it is negative": 2, "it is the same as an earlier row": 2, "it is 0": 1}
    assert used(ROWS) == ([1, 20], counts)
    assert used(ROWS[:2]) == ([1, 20], {})


def test_who_knows_better_says_why_a_later_one_is_left_out() -> None:
    _, left_out = usable(
        ROWS,
        positive,
        lambda n: len(str(n)),
        source="Numbers",
        strict=False,
        remedy="Count.",
        again=lambda earlier, later: f"{later} after {earlier}",
    )
    assert left_out == {"it is negative": 2, "it is 0": 1, "1 after 1": 1, "21 after 20": 1}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (ROWS, "Numbers, row 2: it is negative."),
        (ROWS[:2] + ROWS[3:], "Numbers, row 2: it is the same as an earlier row."),
    ],
)
def test_strictly_the_first_that_cannot_be_used_is_refused(
    rows: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(TaskError) as caught:
        used(rows, strict=True)
    assert str(caught.value) == reason


def test_where_none_is_left_the_reasons_are_told() -> None:
    with pytest.raises(TaskError) as caught:
        used([ROWS[2], ROWS[4], ROWS[5]])
    assert str(caught.value) == (
        "Numbers has no usable row: 2 × it is negative; 1 × it is 0. Its columns: n. Count."
    )
