"""The keys of a schema as a table for readers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import BaseModel

from groupwise.core.settings.schema import KeyPath, Leaf, leaves, locate, sections_in
from groupwise.core.settings.wording import choices, describe


def document(model: type[BaseModel]) -> str:
    """A Markdown table of all keys: path, what it accepts, default, meaning, and what a resume allows."""
    rows = ["| key | value | default | meaning | on resume |", "|---|---|---|---|---|"]
    by_path: dict[KeyPath, list[Leaf]] = {}
    for leaf in leaves(model):
        by_path.setdefault(leaf.path, []).append(leaf)
    rows += [_row(model, path, same) for path, same in by_path.items()]
    return "\n".join(rows) + "\n"


def _row(model: type[BaseModel], path: KeyPath, same: Sequence[Leaf]) -> str:
    first = same[0]
    kinds = [leaf.kind for leaf in same]
    accepts = describe(first.key) or "any value"
    if first.key.is_required():
        default = "required"
    else:
        value = first.key.get_default(call_default_factory=True)
        section = isinstance(value, BaseModel)
        default = "as below" if section else json.dumps(value, ensure_ascii=False)
    place = locate(model, path[:-1])
    all_kinds = list(sections_in(place.key.annotation)) if place.key else kinds
    meaning = first.key.description or ""
    if path[-1] == "type" and len(kinds) > 1 and place.key is not None:
        accepts = choices(kinds)
        default = getattr(place.key.get_default(call_default_factory=True), "type", default)
    elif len(kinds) < len(all_kinds):
        meaning = f"{meaning} Only for {', '.join(kinds)}."
    cells = [f"`{'.'.join(path)}`", accepts, f"`{default}`", meaning, first.on_resume]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
