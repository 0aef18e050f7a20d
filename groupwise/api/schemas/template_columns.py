"""The columns of a row that its chat template receives in addition to the messages: `tools` and `chat_template_kwargs`."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from groupwise.core.errors import TaskError

TOOLS = "tools"
ARGUMENTS = "chat_template_kwargs"
ALIKE = 0.7
"""Similarity ratio (`difflib`) from which a column name counts as a misspelt `chat_template_kwargs`."""


@dataclass(frozen=True, slots=True)
class ForTemplate:
    """The arguments that a row passes to the chat template in addition to its messages."""

    tools: tuple[Any, ...] = ()
    """Schemas."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


def for_template(columns: Mapping[str, Any], where: str) -> ForTemplate:
    """Read both columns. Raises TaskError, which starts with `where`, for values of the wrong type and for misspelt column names."""
    for name in columns:
        if _nearly_arguments(name):
            raise TaskError(
                f"{where}: the column `{name}` has no effect: arguments of the chat template go into the column `{ARGUMENTS}`, such as "
                '{"enable_thinking": false}. Rename the column, or leave it out.'
            )
    tools = _parse_cell(columns.get(TOOLS), TOOLS, where)
    if not isinstance(tools, list | tuple | None):
        raise TaskError(f"{where}: `tools` is {type(tools).__name__}. Expected a list of schemas.")
    schemas = [_parse_cell(entry, TOOLS, where) for entry in cast("Sequence[Any]", tools or ())]
    arguments = _parse_cell(columns.get(ARGUMENTS), ARGUMENTS, where)
    if not isinstance(arguments, Mapping | None):
        raise TaskError(
            f"{where}: `{ARGUMENTS}` is {type(arguments).__name__}. Expected a dict, such as "
            '{"enable_thinking": false}.'
        )
    template_arguments = dict(cast("Mapping[str, Any]", arguments or {}))
    return ForTemplate(
        tuple(without_nulls(schema) for schema in schemas), without_nulls(template_arguments)
    )


@cache  # each row has the same columns, and likeness takes its time
def _nearly_arguments(name: str) -> bool:
    """True for names such as `template_kwargs` and `enable_thinking`, not for `chat_template` and `chat_template_id`."""
    if not any(part in name.lower() for part in ("kw", "arg", "param", "option")):
        return name == "enable_thinking"
    likeness = difflib.SequenceMatcher(None, name.lower(), ARGUMENTS).ratio()
    return name != ARGUMENTS and likeness >= ALIKE


def _parse_cell(value: Any, name: str, where: str) -> Any:
    """The value of a cell, parsed if it is JSON text; None if the cell is empty (None, "" or NaN)."""
    cell = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(cell, str):
        return None if isinstance(cell, float) and math.isnan(cell) else cell
    if not cell.strip():
        return None
    try:
        return json.loads(cell)
    except ValueError as error:
        raise TaskError(f"{where}: `{name}` is text, but no JSON: {error}.") from error


def without_nulls(value: Any) -> Any:
    """The value without keys that hold None, at every depth: tables give each row all keys that any row has."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value).items()
        return {key: without_nulls(entry) for key, entry in entries if entry is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(entry) for entry in cast("Sequence[Any]", value)]
    return value


def columns_of(tools: Sequence[Any] | None, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns that pass these to the template; without empty ones."""
    columns = {TOOLS: tools, ARGUMENTS: arguments}
    return {name: value for name, value in columns.items() if value}


def for_request(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Both columns of a row as fields of a request to a service. Raises TaskError like `for_template`."""
    template_input = for_template(columns, "a row")
    return columns_of(list(template_input.tools), template_input.arguments)
