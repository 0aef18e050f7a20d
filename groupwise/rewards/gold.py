"""The gold answer of a row: the column it stands in, and the forms in which it is accepted.

A column holds text or a number, a list of accepted forms, or tagged text such as a worked solution, of which the content of the
last answer tag counts. Without `rewards.answer_column` it is the first of `GOLD_COLUMNS` that holds something in the row; None, empty
text and the NaN of tables hold nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from groupwise.rewards.tags import last_tagged

GOLD_COLUMNS = ("answer", "reference", "reference_response", "gold", "solution", "label")
"""Where a gold answer is looked for, in this order."""


def gold_answers(
    columns: Mapping[str, Any],
    count: int,
    answer_column: str | None = None,
    tag: str = "answer",
) -> list[tuple[str, ...]]:
    """For each of `count` completions the forms in which its gold answer is accepted: at least one, without white space around it.

    `columns` are those that a reward function gets, each with an entry for each completion. Raises ValueError for a row without a
    gold answer, and for one of another kind.
    """
    entries = {
        name: _entries(name, columns[name], count)
        for name in _sought(answer_column)
        if name in columns
    }
    found: list[tuple[str, ...]] = []
    for index in range(count):
        try:
            row = {name: values[index] for name, values in entries.items()}
            found.append(_first_forms(row, columns, answer_column, tag))
        except ValueError as error:
            raise ValueError(f"completion {index}: {error}") from None
    return found


def gold_of_row(
    row: Mapping[str, Any], answer_column: str | None = None, tag: str = "answer"
) -> tuple[str, ...]:
    """The accepted forms of one row of a dataset. Raises ValueError as `gold_answers` does."""
    return _first_forms(row, row, answer_column, tag)


def _sought(answer_column: str | None) -> tuple[str, ...]:
    return GOLD_COLUMNS if answer_column is None else (answer_column,)


def _first_forms(
    row: Mapping[str, Any], columns: Collection[str], answer_column: str | None, tag: str
) -> tuple[str, ...]:
    for name in _sought(answer_column):
        if forms := _forms(name, row.get(name), tag):
            return forms
    raise ValueError(_no_gold(columns, answer_column))


def _entries(name: str, values: Any, count: int) -> Sequence[Any]:
    if isinstance(values, str) or len(values) != count:
        raise ValueError(f"the column `{name}` has no list with one entry for each completion")
    return values


def _forms(name: str, value: Any, tag: str) -> tuple[str, ...]:
    """The accepted forms in the order of the column, each once; none where it holds nothing."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    listed = cast("Sequence[Any]", plain if isinstance(plain, list | tuple) else [plain])
    forms = [_form(name, each, tag) for each in listed]
    return tuple(dict.fromkeys(form for form in forms if form))


def _form(name: str, value: Any, tag: str) -> str:
    """The answer as text; empty where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():  # what tables make of a column with gaps
        return str(int(value))
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(
            f"the gold answer in the column `{name}` is {type(value).__name__}; "
            "expected text, a number, or a list of accepted forms"
        )
    tagged = last_tagged(value, tag)
    return value.strip() if tagged is None else tagged


def _no_gold(columns: Collection[str], answer_column: str | None) -> str:
    exists = f"The dataset has: {', '.join(sorted(columns)) or 'none but prompt'}."
    if answer_column is None:
        return (
            f"there is no gold answer in {', '.join(GOLD_COLUMNS)}. {exists} "
            "Name the column that holds it in rewards.answer_column."
        )
    if answer_column in columns:
        return f"the gold answer's column `{answer_column}` is empty. {exists}"
    return f"there is no column `{answer_column}` for the gold answer. {exists}"
