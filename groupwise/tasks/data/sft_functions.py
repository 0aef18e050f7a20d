"""The functions that a task may define for teacher rows: a formatting function and a collator.

`get_sft_formatting_func` gives a function from a row, or a batch of columns, to text or messages. `get_sft_data_collator` gives one
from rows to a batch of transformers, whose labels are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from groupwise.core.errors import TaskError
from groupwise.core.plugins import run_user_code
from groupwise.core.types import number_of, with_number_of
from groupwise.tasks.data.sft import IGNORED, Tokens, tokens_of

FORMLESS = ("messages", "prompt", "completion", "input_ids", "labels")
"""Columns removed from a formatted row, because they would indicate another form."""


def format_rows(
    rows: Sequence[dict[str, Any]], function: Callable[[Any], Any], *, text_field: str, where: str
) -> list[dict[str, Any]]:
    """The rows made by a formatting function, which takes one row or a batch of columns; its result for one row shows which."""
    first = _format_row(function, rows[0], where)
    if _is_formatted(first):
        formatted = [first, *(_format_row(function, row, where) for row in rows[1:])]
    else:
        # The result of a function that takes a batch: a list with an entry for each row.
        if not isinstance(first, list):
            raise TaskError(
                f"{where} returned {type(first).__name__} for a row. Expected text or a list of chat messages; or, if it takes a "
                "batch (a dict of columns), a list of these."
            )
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        results = run_user_code(lambda: function(columns), what=f"{where} failed")
        if not isinstance(results, list) or len(cast("list[Any]", results)) != len(rows):
            description = (
                f"{len(cast('list[Any]', results))} entries"
                if isinstance(results, list)
                else type(results).__name__
            )
            raise TaskError(
                f"{where} returned {description} for a batch of {len(rows)} rows. Expected one for each."
            )
        formatted = cast("list[Any]", results)
    return [
        _with_formatted(row, value, text_field, f"{where}: row {number_of(row, n)}")
        for n, (row, value) in enumerate(zip(rows, formatted, strict=True))
    ]


def collate(
    collator: Callable[[Any], Any],
    row: Mapping[str, Any],
    tokens: Sequence[int] | None,
    where: str,
) -> Tokens:
    """One row collated. The collator gets `input_ids` and `attention_mask`, or the row itself if it asks for other columns.

    `tokens` are None if the row has no form that can be tokenised.
    """
    what = f"{where}: get_sft_data_collator's collator failed"
    if tokens is None:
        return _tokens_of_batch(run_user_code(lambda: collator([dict(row)]), what=what), where)
    feature = {"input_ids": list(tokens), "attention_mask": [1] * len(tokens)}

    def call() -> Any:
        try:
            return collator([feature])
        except KeyError:  # it needs another column
            return collator([{**row, **feature}])

    return _tokens_of_batch(run_user_code(call, what=what), where)


def _format_row(function: Callable[[Any], Any], row: Mapping[str, Any], where: str) -> Any:
    """The function's result for one row; if that fails, for a batch of this row."""

    def call() -> Any:
        try:
            return function(dict(row))
        except Exception as error:
            # after any exception: the function may be one for batches
            try:
                result = function({name: [value] for name, value in row.items()})
            except Exception:  # noqa: BLE001 - it fails with both, so the first failure is reported
                raise error from None
            if not isinstance(result, list) or _is_formatted(result):
                raise
            return cast("list[Any]", result)

    return run_user_code(call, what=f"{where} failed")


def _is_formatted(value: Any) -> bool:
    """True for text, or messages: a list of dicts with roles."""
    if isinstance(value, list) and value:
        return all(isinstance(entry, Mapping) for entry in cast("list[Any]", value))
    return isinstance(value, str)


def _with_formatted(
    row: dict[str, Any], formatted: Any, text_field: str, where: str
) -> dict[str, Any]:
    """The row's columns, with the formatted value in place of the original form."""
    if not _is_formatted(formatted):
        raise TaskError(
            f"{where}: get_sft_formatting_func's function made {type(formatted).__name__} of it. Expected text or chat messages."
        )
    other_columns = {
        name: value for name, value in row.items() if name not in (*FORMLESS, text_field)
    }
    return with_number_of(
        row,
        {**other_columns, (text_field if isinstance(formatted, str) else "messages"): formatted},
    )


def _tokens_of_batch(batch: Any, where: str) -> Tokens:
    collated: Mapping[str, Any] = (
        cast("Mapping[str, Any]", batch) if isinstance(batch, Mapping) else {}
    )
    if "input_ids" not in collated or "labels" not in collated:
        description = (
            f"the keys {', '.join(collated)}" if collated else type(cast("object", batch)).__name__
        )
        raise TaskError(
            f"{where}: get_sft_data_collator's collator returned {description}. Expected a batch with `input_ids` and `labels`, "
            f"where {IGNORED} marks tokens that are not trained."
        )
    return tokens_of(collated, where)
