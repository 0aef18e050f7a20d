"""Describes in words which values a key accepts and which was given, and lists the keys of a schema as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from groupwise.core.settings.schema import KeyPath, Leaf, leaves, locate, sections_in

_WORDS = {
    bool: ("true or false", "lists of true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
}

_LIMITS = {
    "gt": "above",
    "ge": "at least",
    "lt": "below",
    "le": "at most",
    "min_length": "of length at least",
    "max_length": "of length at most",
}


def describe(key: FieldInfo) -> str | None:
    """Describes the values of a key: `a number above 0 or null`. None for a type that has no description."""
    return _describe_annotation(key.annotation, key.metadata)


def _describe_annotation(annotation: Any, constraints: Sequence[Any]) -> str | None:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        words = [
            f"{phrase} {value if isinstance(value, int) else f'{value:g}'}"
            for limit in constraints
            for name, phrase in _LIMITS.items()
            if (value := getattr(limit, name, None)) is not None
        ]
        return _WORDS[annotation][0] + (f" ({', '.join(words)})" if words else "")
    if annotation in (None, NoneType):
        return "null"
    if origin is Annotated:
        return _describe_annotation(arguments[0], [*constraints, *arguments[1:]])
    if origin is Literal:
        return choices(arguments)
    if origin in (Union, UnionType):
        members = [_describe_annotation(member, constraints) for member in arguments]
        return None if None in members else " or ".join(dict.fromkeys(cast("list[str]", members)))
    if origin in (list, tuple) and arguments and arguments[0] in _WORDS:
        return f"a list of {_WORDS[arguments[0]][1]}"
    if origin in (list, tuple) and arguments:
        inner = _describe_annotation(arguments[0], ())
        return f"a list, each {inner}" if inner else None
    if origin is dict or sections_in(annotation):
        return "a section with keys of its own"
    return None


def choices(values: Sequence[Any]) -> str:
    """`one of a, b`."""
    names = ", ".join(str(value) for value in values)
    return names if len(values) == 1 else f"one of {names}"


def as_given(value: Any) -> str:
    """A given value as a user would write it, shortened if it is long."""
    if isinstance(value, str | int | float | bool | list | dict | None):
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def key_rows(model: type[BaseModel]) -> dict[KeyPath, str]:
    """For each key a row of a Markdown table: path, accepted values, default, meaning, and the effect of a change on a resume."""
    by_path: dict[KeyPath, list[Leaf]] = {}
    for leaf in leaves(model):
        by_path.setdefault(leaf.path, []).append(leaf)
    return {path: _key_row(model, path, path_leaves) for path, path_leaves in by_path.items()}


def section_tables(rows: Mapping[KeyPath, str]) -> str:
    """Markdown with a heading and a table for each section."""
    by_section: dict[str, list[str]] = {}
    for path, row in rows.items():
        by_section.setdefault(path[0], []).append(row)
    head = "| key | value | default | meaning | on resume |\n|---|---|---|---|---|"
    return "\n".join(
        f"## `{section}`\n\n{head}\n" + "\n".join(lines) + "\n"
        for section, lines in by_section.items()
    )


def _key_row(model: type[BaseModel], path: KeyPath, path_leaves: Sequence[Leaf]) -> str:
    first = path_leaves[0]
    kinds = [leaf.kind for leaf in path_leaves]
    accepts = describe(first.key) or "any value"
    if first.key.is_required():
        default = "required"
    else:
        value = first.key.get_default(call_default_factory=True)
        section = isinstance(value, BaseModel)
        default = "as below" if section else json.dumps(value, ensure_ascii=False)
    location = locate(model, path[:-1])
    all_kinds = list(sections_in(location.key.annotation)) if location.key else kinds
    meaning = first.key.description or ""
    if path[-1] == "type" and len(kinds) > 1 and location.key is not None:
        accepts = choices(kinds)
        default = getattr(location.key.get_default(call_default_factory=True), "type", default)
    elif len(kinds) < len(all_kinds):
        meaning = f"{meaning} Only for {', '.join(kinds)}."
    cells = [f"`{'.'.join(path)}`", accepts, f"`{default}`", meaning, first.on_resume]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
