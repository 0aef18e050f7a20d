r"""The gold answer of a row: the column that holds it, and the forms in which it is accepted.

A column holds text or a number, a list of accepted forms, or a worked solution in which the answer is marked: by the last answer
tag, else by `####` before the end of the text, else, for rewards that read mathematics, by the last `\boxed{}`. Without
`rewards.answer_column` it is the first of `GOLD_COLUMNS` that is filled in the row; None, empty text and the NaN of tables count as
empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from groupwise.core.reward_call.call import RESERVED
from groupwise.core.reward_call.tags import Tag, last_tagged
from groupwise.tasks.rewards.boxes import last_boxed

GOLD_COLUMNS = ("answer", "reference", "reference_response", "gold", "solution", "label")
"""Columns searched for a gold answer, in this order."""

MARK = "####"
"""Precedes the answer at the end of a solution, as in GSM8K. With lines after it, it is a Markdown heading."""

LONGEST_MARKED = 120
"""Most characters of an answer after the mark; more is a paragraph."""


def gold_answers(
    columns: Mapping[str, Any],
    count: int,
    answer_column: str | None = None,
    tag: Tag = "answer",
    boxes: bool = False,
) -> list[tuple[str, ...]]:
    r"""The accepted forms of the gold answer of each of `count` completions: at least one, without white space around it.

    `columns` are those that a reward function gets, each with an entry for each completion; `boxes` says whether `\boxed{}` marks
    an answer. Raises ValueError for a row without a gold answer, and for a value of another type.
    """
    entries = {
        name: _require_entries(name, columns[name], count)
        for name in _gold_columns(answer_column)
        if name in columns
    }
    forms_of_rows: list[tuple[str, ...]] = []
    for index in range(count):
        try:
            row = {name: values[index] for name, values in entries.items()}
            forms_of_rows.append(_first_forms(row, columns, answer_column, tag, boxes))
        except ValueError as error:
            raise ValueError(f"completion {index}: {error}") from None
    return forms_of_rows


def gold_of_row(
    row: Mapping[str, Any],
    answer_column: str | None = None,
    tag: Tag = "answer",
    boxes: bool = False,
) -> tuple[str, ...]:
    """The accepted forms of one row of a dataset. Raises ValueError like `gold_answers`."""
    return _first_forms(row, row, answer_column, tag, boxes)


def marked_answer(text: str, tag: Tag = "answer", boxes: bool = False) -> str | None:
    """The marked answer in a text, which may be empty; None if nothing is marked."""
    tagged = last_tagged(text, tag)
    if tagged is not None:
        return tagged
    solution_and_answer = at_mark(text)
    if solution_and_answer is not None:
        return solution_and_answer[1]
    inner = last_boxed(text) if boxes else None
    return None if inner is None else inner.strip()


def at_mark(text: str) -> tuple[str, str] | None:
    """The text before the mark and the answer after it; None unless the answer is one short line at the end of the text."""
    before, mark, after = text.rpartition(MARK)
    answer = after.strip()
    stands_alone = mark and not before[-1:].strip()
    if not stands_alone or "\n" in answer or len(answer) > LONGEST_MARKED:
        return None
    return before, answer


def _gold_columns(answer_column: str | None) -> tuple[str, ...]:
    return GOLD_COLUMNS if answer_column is None else (answer_column,)


def _first_forms(
    row: Mapping[str, Any],
    columns: Collection[str],
    answer_column: str | None,
    tag: Tag,
    boxes: bool,
) -> tuple[str, ...]:
    for name in _gold_columns(answer_column):
        # The accepted forms in the order of the column, each once.
        value: Any = row.get(name)
        plain = value.tolist() if hasattr(value, "tolist") else value
        entries = cast("Sequence[Any]", plain if isinstance(plain, list | tuple) else [plain])
        candidates = [form for entry in entries for form in _forms_of(name, entry, tag, boxes)]
        if forms := tuple(dict.fromkeys(form for form in candidates if form)):
            return forms
    raise ValueError(_no_gold_message(columns, answer_column))


def _require_entries(name: str, values: Any, count: int) -> Sequence[Any]:
    if isinstance(values, str) or len(values) != count:
        raise ValueError(f"the column `{name}` has no list with one entry for each completion")
    return values


def _forms_of(name: str, value: Any, tag: Tag, boxes: bool) -> tuple[str, ...]:
    """The accepted forms from one entry; a marked number with thousands commas is accepted without them too."""
    if not isinstance(value, str):
        return (_value_text(name, value),)
    marked = marked_answer(value, tag, boxes)
    if marked is None:
        return (value.strip(),)
    grouped = re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", marked)
    return (marked, marked.replace(",", "")) if grouped else (marked,)


def _value_text(name: str, value: Any) -> str:
    """A value other than text, as text; empty if there is none. Raises ValueError for types other than numbers."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():  # a column with gaps holds floats
        return str(int(value))
    if isinstance(value, int | float):
        return str(value)
    raise ValueError(
        f"the gold answer in the column `{name}` is {type(value).__name__}; "
        "expected text, a number, or a list of accepted forms"
    )


def _no_gold_message(columns: Collection[str], answer_column: str | None) -> str:
    names = sorted(set(columns).difference(RESERVED))
    exists = f"The dataset has: {', '.join(names) or 'none but prompt'}."
    if answer_column is None:
        return (
            f"there is no gold answer in {', '.join(GOLD_COLUMNS)}. {exists} "
            "Name the column that holds it in rewards.answer_column."
        )
    if answer_column in columns:
        return f"the gold answer's column `{answer_column}` is empty. {exists}"
    return f"there is no column `{answer_column}` for the gold answer. {exists}"
