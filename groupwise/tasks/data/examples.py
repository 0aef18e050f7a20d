"""Turns the rows that a task returns into a list of `Example`s, checked before anything expensive starts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, cast

from groupwise.core.errors import TaskError
from groupwise.core.plugins import printable
from groupwise.core.types import Example, NumberedRow, Prompt, number_of, with_number_of
from groupwise.tasks.data.content import canonical, unsupported_parts
from groupwise.tasks.data.messages import Unusable, prompt_of
from groupwise.tasks.data.sources import row_numbers

logger = logging.getLogger(__name__)

_EXPECTED = (
    "Expected a Hugging Face Dataset, a list of dicts or an iterable of dicts, with {} in each"
)
_PROMPT = "a `prompt`"


def examples_from_rows(
    rows: object, *, where: str, limit: int | None = None, limited_by: str = "a limit"
) -> list[Example]:
    """The examples in `rows`. Raises TaskError with a message that starts with `where` (what returned them).

    A stream without a length is read up to `limit` rows, and refused without a limit, because it may be endless; `limited_by` names
    the config key that sets one. A dataset with a length is read whole, because otherwise the order of draws would depend on the
    length of the run.
    """
    row_columns = read_rows(rows, where=where, limit=limit, limited_by=limited_by, holding=_PROMPT)
    return [_make_example(index, columns, where) for index, columns in enumerate(row_columns)]


def read_rows(
    rows: object, *, where: str, limit: int | None, limited_by: str, holding: str
) -> list[dict[str, Any]]:
    """The columns of every row, from any form of dataset; see `examples_from_rows`.

    `holding` is the text for messages that describes what each row must have.
    """
    expected = _EXPECTED.format(holding)
    endless = isinstance(rows, Iterable) and not hasattr(cast("object", rows), "__len__")
    if endless and limit is None:
        kind = _type_of(cast("object", rows)).__name__
        raise TaskError(
            f"{where} returned a {kind}, which has no length, and nothing says how many of its rows to read. "
            f"Set {limited_by}, or return a list."
        )
    stream = _iterate_rows(cast("object", rows), where, limit, expected)
    if (numbers := row_numbers(rows)) is not None:
        stream = map(NumberedRow, stream, numbers)
    row_columns = [_check_columns(index, row, where, expected) for index, row in enumerate(stream)]
    if not row_columns:
        raise TaskError(f"{where} returned an empty dataset. {expected}.")
    return row_columns


def fingerprint(examples: Iterable[Example]) -> str:
    """SHA-256 (hex) of all prompts and columns: equal exactly if the data are the same, in the same order.

    Warns once about a column with objects whose content cannot be described: only their class is hashed, so a change inside them
    goes unnoticed. This is not an error, because training with them works.
    """
    digest = hashlib.sha256()
    for example in examples:
        prompt = canonical(example.prompt)
        columns = {name: canonical(value) for name, value in sorted(example.columns.items())}
        content = [prompt, {"dict": list(columns.items())}]
        digest.update(json.dumps(content).encode() + b"\n")
        for column, value in [("prompt", prompt), *columns.items()]:
            for description in unsupported_parts(value):
                _warn_of_untold(column, description)
    return digest.hexdigest()


@cache
def _warn_of_untold(column: str, description: str) -> None:
    logger.warning(
        "column `%s` holds %s, whose content cannot be told: if it is another one when a run is resumed, that goes unnoticed. Keep "
        "plain values in the dataset, or make the class a dataclass of such.",
        column,
        description,
    )


def _iterate_rows(rows: object, where: str, limit: int | None, expected: str) -> Iterator[Any]:
    if isinstance(rows, Mapping):
        names = ", ".join(repr(name) for name in cast("Mapping[Any, Any]", rows))
        raise TaskError(
            f"{where} returned a dict of {names}, not one dataset. Return one of these."
        )
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise TaskError(f"{where} returned {type(rows).__name__}. {expected}.")
    stream = cast("Iterable[Any]", rows)
    return iter(stream) if hasattr(stream, "__len__") else islice(stream, limit)


def _check_columns(index: int, row: Any, where: str, expected: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        hint = " Of a pandas table, return `table.to_dict('records')`." if index == 0 else ""
        raise TaskError(f"{where}: row {index} is {type(row).__name__}. {expected}.{hint}")
    mapping = cast("Mapping[Any, Any]", row)
    columns = {str(name): value for name, value in mapping.items()}
    for name, value in columns.items():
        # Tokenizers, files and databases reject text with unpaired surrogates.
        for text in (value,) if type(value) is str else _iterate_texts(value):
            if not text.isascii() and (safe_text := printable(text)) != text:
                location = f"{where}: row {number_of(mapping, index)}, column `{name}`"
                raise TaskError(
                    f"{location}: the text {safe_text[:60]!r} holds half of a surrogate pair, which is not a character. It comes from "
                    'cutting text in UTF-16 or from a broken escape; fix it with text.encode("utf-16", '
                    '"surrogatepass").decode("utf-16", "replace").'
                )
    return with_number_of(mapping, columns)


def _make_example(index: int, columns: dict[str, Any], where: str) -> Example:
    location = f"{where}: row {number_of(columns, index)}"
    if "prompt" not in columns:
        names = ", ".join(columns) or "none"
        raise TaskError(
            f"{location} has no column `prompt`. It has: {names}. Rename the one that holds the "
            "prompt, as text or as a list of chat messages."
        )
    return Example(index, checked_prompt(columns.pop("prompt"), location), columns)


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yields every text in lists and dicts. Each container is visited once, because it may contain itself."""
    pending = [value]
    # Maps ids to the objects themselves, which keeps them alive: the id of a freed object could be reused.
    visited: dict[int, object] = {}
    while pending:
        entry = pending.pop()
        if issubclass(type(entry), str):
            yield entry
        elif issubclass(type(entry), (dict, list, tuple, Mapping)) and id(entry) not in visited:
            visited[id(entry)] = entry
            pending.extend(reversed(_items_of(entry)))


def _items_of(value: Any) -> list[Any]:
    try:
        if issubclass(type(value), (dict, Mapping)):
            return [item for pair in value.items() for item in pair]
        return list(value)
    except Exception:  # noqa: BLE001 — a class of the task may raise anything; then there is no text to check
        return []


def checked_prompt(value: Any, where: str, name: str = "prompt") -> Prompt:
    """Text or chat messages, from a column of this name. Raises TaskError with a message that starts with `where`."""
    try:
        return prompt_of(value)
    except Unusable as reason:
        message_number = "" if reason.message is None else f", message {reason.message}"
        raise TaskError(
            f"{where}{message_number}: `{name}` cannot be used: {reason}. It is of type {_type_of(value).__name__}: {value!r:.80}. "
            'Expected text, or a list of chat messages such as [{"role": "user", "content": "..."}].'
        ) from reason


def _type_of(value: object) -> type[object]:
    return type(value)
