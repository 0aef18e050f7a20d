"""Finds the changes between two configs, sorted by how a resume treats them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import BaseModel

from groupwise.core.settings.schema import KeyPath, Leaf, leaves
from groupwise.core.settings.tree import copy_plain

Change = tuple[Any, Any]
"""Old and new value of a key; None also if a side does not have the key."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Changes between two configs, by dotted path, sorted by how a resume treats them."""

    free: dict[str, Change] = field(default_factory=dict[str, Change])
    warned: dict[str, Change] = field(default_factory=dict[str, Change])
    fixed: dict[str, Change] = field(default_factory=dict[str, Change])


def compare(old: Mapping[str, Any], new: Mapping[str, Any], model: type[BaseModel]) -> Differences:
    """Differences of two resolved configs. A key that is missing in the old one counts as having its default."""
    schema = {leaf.path: leaf for leaf in leaves(model)}
    result = Differences()
    by_class = {"free": result.free, "warn": result.warned, "fixed": result.fixed}
    for path, change in _changes(old, new, (), schema):
        prefixes = (schema[path[:n]] for n in range(len(path), 0, -1) if path[:n] in schema)
        leaf = next(prefixes, None)
        by_class[leaf.on_resume if leaf else "fixed"][".".join(path)] = change
    return result


_ABSENT: Any = object()


def _changes(
    old: Any, new: Any, path: KeyPath, schema: Mapping[KeyPath, Leaf]
) -> Iterator[tuple[KeyPath, Change]]:
    if isinstance(new, Mapping) and (old is _ABSENT or isinstance(old, Mapping)):
        old_section = cast("Mapping[str, Any]", {} if old is _ABSENT else old)
        new_section = cast("Mapping[str, Any]", new)
        for key in dict.fromkeys([*new_section, *old_section]):
            sides = old_section.get(key, _ABSENT), new_section.get(key, _ABSENT)
            yield from _changes(*sides, (*path, key), schema)
        return
    if old is _ABSENT:
        has_default = path in schema and not schema[path].key.is_required()
        old = schema[path].key.get_default(call_default_factory=True) if has_default else None
    change = copy_plain(old), None if new is _ABSENT else copy_plain(new)
    if change[0] != change[1]:
        yield path, change
