"""Makes a task's rows from those of a source, and counts the rows that it cannot use.

A task converts each row, or raises `Unusable` with the reason. Such rows are left out and counted by reason, and so are duplicates
of earlier rows. If the task's config is strict, the first such row is refused with its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from groupwise.core.errors import TaskError
from groupwise.core.types import number_of
from groupwise.tasks.data.messages import Unusable

Made = TypeVar("Made")

SAME = "it is the same as an earlier row"


def question_key(question: str) -> str:
    """Equal for questions that differ only in case and white space."""
    return " ".join(question.split()).casefold()


def keep_usable(
    rows: Sequence[Mapping[str, Any]],
    make: Callable[[Mapping[str, Any]], Made],
    same: Callable[[Made], Hashable],
    *,
    source: str,
    strict: bool,
    remedy: str,
    again: Callable[[Made, Made], str] = lambda earlier, later: SAME,
) -> tuple[list[Made], Counter[str]]:
    """The rows made by `make`, and counts of the rows left out, by reason. Rows are duplicates if `same` is equal; `again` returns
    the reason why the later one is left out.

    Raises TaskError with the `remedy` if no row is left, or with `strict` if any row is unusable. `source` names the source of the
    rows.
    """
    rows_by_key: dict[Hashable, Made] = {}
    left_out: Counter[str] = Counter()
    for index, row in enumerate(rows):
        try:
            new_row = make(row)
            if (earlier := rows_by_key.get(same(new_row))) is not None:
                raise Unusable(again(earlier, new_row))
        except Unusable as reason:
            if strict:
                raise TaskError(f"{source}, row {number_of(row, index)}: {reason}.") from reason
            left_out[str(reason)] += 1
        else:
            rows_by_key[same(new_row)] = new_row
    if not rows_by_key:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in left_out.items())
        first: object = rows[0] if rows else None
        columns = ", ".join(map(str, first)) if isinstance(first, Mapping) else "none"
        raise TaskError(f"{source} has no usable row: {reasons}. Its columns: {columns}. {remedy}")
    return list(rows_by_key.values()), left_out
