"""Checking a config once against its schema, and wording whatever is wrong with it.

`validate` raises one `ConfigError` that lists every problem with its place, what was given and what is allowed. An unknown key
is told the nearest known one; a key that other frameworks use is told its name here; a key of a part that does not exist yet is
told so, and a key that a section leaves out on purpose is told why.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from groupwise.errors import ConfigError
from groupwise.settings.credentials import explain_secret, is_secret
from groupwise.settings.schema import (
    KeyPath,
    Place,
    Problems,
    Strict,
    keys_of,
    later_keys,
    leaves,
    locate,
    refused_keys,
    sections_in,
    tag_of,
)
from groupwise.settings.tree import Tree
from groupwise.settings.wording import as_given, describe

Model = TypeVar("Model", bound=BaseModel)


def validate(
    model: type[Model],
    tree: Tree,
    at: KeyPath = (),
    check: Callable[[Tree], Sequence[str]] | None = None,
) -> Model:
    """The tree (or its section `at`) as a `model`. Raises one ConfigError with every problem, each with its place.

    `check` looks at the raw tree for what no schema can say and returns further problems.
    """
    problems = [*tree.problems, *(check(tree) if check else ())]
    section = tree.value(at) if at else tree.values
    result, details = _validated(model, {} if section is None else section)
    problems += [line for detail in details for line in _explain(model, detail, tree, at)]
    if problems or result is None:
        raise ConfigError(_listed(problems, tree.source))
    return result


def _validated(model: type[Model], section: Any) -> tuple[Model | None, list[ErrorDetails]]:
    """The section as a `model` with what is wrong with it; nothing, or not a model.

    Checks that look at several keys run only where each of them is right. So what is wrong is taken out and the rest is looked at
    again, until nothing new is found.
    """
    left = json.loads(json.dumps(section))
    found: list[ErrorDetails] = []
    out: set[KeyPath] = set()
    while True:
        try:
            result = model.model_validate_json(json.dumps(left), extra=_extra_keys(model))
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
        else:
            return None if found else result, found
        found += [detail for detail in details if not _follows(model, detail, out)]
        taken = [path for detail in details for path in _taken_out(model, detail, left)]
        if not taken:
            return None, found
        out.update(taken)


def _follows(model: type[BaseModel], detail: ErrorDetails, out: AbstractSet[KeyPath]) -> bool:
    """Whether it is only said because keys were taken out: of one of them, or of one that was misspelt."""
    if locate(model, detail["loc"]).path in out:
        return True
    words = re.findall(r"\w+", detail["msg"])
    return any(difflib.get_close_matches(path[-1], words, n=1, cutoff=0.8) for path in out)


def _taken_out(model: type[BaseModel], detail: ErrorDetails, root: Any) -> list[KeyPath]:
    """Delete the key that is wrong; of a section whose keys do not go together those that the message names, else all of it."""
    path = locate(model, detail["loc"]).path
    section = _inside(root, path)
    if isinstance(section, dict) and detail["type"] == "value_error":
        named = set(re.findall(r"\w+", detail["msg"])) & cast("dict[str, Any]", section).keys()
        if named:
            for key in named:
                del section[key]
            return [(*path, key) for key in named]
    above = _inside(root, path[:-1])
    if not path or not isinstance(above, dict) or path[-1] not in above:
        return []
    del above[path[-1]]
    return [path]


def _inside(value: Any, path: KeyPath) -> Any:
    """What stands at a path; None where nothing does."""
    for key in path:
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    return value


def _extra_keys(model: type[BaseModel]) -> Literal["forbid"] | None:
    """Unknown keys are refused also by a model that does not say what it does with them."""
    return None if model.model_config.get("extra") else "forbid"


def _listed(problems: Sequence[str], source: str) -> str:
    """One below the other: those of the file in its order, then those of overrides."""

    def line(problem: str) -> float:
        found = re.match(rf"{re.escape(source)}(:\d+)?: ", problem)
        return int((found[1] or ":0")[1:]) if found else math.inf

    return "\n".join(sorted(dict.fromkeys(problems), key=line))


def _explain(
    model: type[BaseModel], detail: ErrorDetails, tree: Tree, at: KeyPath
) -> Iterator[str]:
    place = locate(model, detail["loc"])
    path = at + place.path
    if detail["type"] == "extra_forbidden":
        yield f"{tree.origin(path)}: {_explain_unknown(model, place, at)}"
    elif detail["type"] == "missing":
        origin = tree.origin(path[:-1])
        yield from (f"{origin}: {text}" for text in _explain_missing(place, at))
    elif detail["type"].startswith("union_tag"):
        yield f"{tree.origin((*path, 'type'))}: {_explain_type(place, tree, at)}"
    elif isinstance(several := detail.get("ctx", {}).get("error"), Problems):
        dotted = ".".join(path) or tree.source
        yield from (f"{tree.origin(path)}: {dotted}: {problem}" for problem in several.problems)
    else:
        yield f"{tree.origin(path)}: {_explain_value(place, detail, tree, at)}"


def _explain_missing(place: Place, at: KeyPath) -> Iterator[str]:
    assert place.key is not None
    inner = sections_in(place.key.annotation)
    if len(inner) != 1:
        meaning = f": {place.key.description}" if place.key.description else "."
        yield f"{'.'.join(at + place.path)} is required{meaning}"
        return
    (section,) = inner.values()
    for name, info in keys_of(section).items():
        if info.is_required():
            yield from _explain_missing(Place((*place.path, name), section, info, inner), at)


def _explain_type(place: Place, tree: Tree, at: KeyPath) -> str:
    assert place.key is not None
    path = ".".join(at + place.path)
    variants = sections_in(place.key.annotation)
    given = tree.value(at + place.path)
    if not isinstance(given, Mapping):
        return f"{path} is {as_given(given)}; it must be a section, with {path}.type one of {', '.join(variants)}."
    kind = cast("Mapping[str, Any]", given).get("type")
    if any(f"type={kind}" in later_keys(variant) for variant in variants.values()):
        return f"{path}.type: {kind} is not in this version; there are {', '.join(variants)}."
    if kind is None:
        return f"{path}.type is required; it must be one of {', '.join(variants)}."
    near = difflib.get_close_matches(str(kind), variants, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{path}.type is {as_given(kind)}; it must be one of {', '.join(variants)}{hint}"


def _explain_value(place: Place, detail: ErrorDetails, tree: Tree, at: KeyPath) -> str:
    path = at + place.path
    dotted = ".".join(path) or tree.source
    if detail["type"] in ("value_error", "assertion_error"):
        return f"{dotted}: {detail.get('ctx', {}).get('error', detail['msg'])}"
    given = tree.value(path)
    if place.key is not None and f"{path[-1]}={given}" in later_keys(place.section):
        return f"{dotted}: {given} is not in this version; it must be {describe(place.key)}."
    shown = "…" if path and is_secret(path[-1]) else as_given(given)
    allowed = describe(place.key) if place.key is not None else None
    if allowed is None:
        return f"{dotted} is {shown}: {detail['msg'][:1].lower()}{detail['msg'][1:]}."
    return f"{dotted} is {shown}; it must be {allowed}.{_quotes_hint(given)}"


def _quotes_hint(given: Any) -> str:
    if isinstance(given, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false|null", given):
        return " Write it without quotes."
    return ""


def _explain_unknown(root: type[BaseModel], place: Place, at: KeyPath) -> str:
    """What to say of a key that is not there, the most certain advice first."""
    *above, key = at + place.path
    dotted = ".".join((*above, key))
    if reason := refused_keys(place.section).get(key):
        return f"{dotted} is not a key; {reason}."
    if any(key in later_keys(variant) for variant in place.variants.values()):
        return f"{dotted} is not in this version."
    if advice := _foreign_name(root, key):
        return f"{dotted} is not a key; {advice}."
    if is_secret(key):
        return explain_secret((*above, key))
    if elsewhere := _explain_variant(place, at):
        return elsewhere
    unknown = f"{dotted} is not a key"
    if found := _paths_named(root, key):
        return f"{unknown}; did you mean {' or '.join(found)}?"
    if late := _late_path(root, key):
        return f"{unknown}; {late} would be, but it is not in this version."
    if near := _nearest(root, place, at):
        return f"{unknown}; did you mean {near}?"
    section = f"in {'.'.join(above)}" if above else "at the top"
    return f"{unknown}; the keys {section} are: {', '.join(keys_of(place.section))}."


def _foreign_name(root: type[BaseModel], key: str) -> str | None:
    if not issubclass(root, Strict):
        return None
    by_start = (
        advice
        for name, advice in root.foreign.items()
        if name.endswith("*") and key.startswith(name[:-1])
    )
    return root.foreign.get(key) or next(by_start, None)


def _explain_variant(place: Place, at: KeyPath) -> str | None:
    """For a section that comes in several types: whether another type has the key."""
    if len(place.variants) < 2:
        return None
    *above, key = at + place.path
    owners: dict[str, list[str]] = {}
    for kind, variant in place.variants.items():
        for name in keys_of(variant):
            owners.setdefault(name, []).append(kind)
    near = difflib.get_close_matches(key, owners, n=1)
    if not near:
        return None
    kind, who = tag_of(place.section), ", ".join(owners[near[0]])
    found = f"a key of {who}" if near[0] == key else f"{'.'.join((*above, near[0]))} (of {who})"
    question = f"it is {found}." if near[0] == key else f"did you mean {found}?"
    return f"{'.'.join((*above, key))} is not a key of {'.'.join(above)} type {kind}; {question}"


def _paths_named(root: type[BaseModel], key: str) -> list[str]:
    return list(dict.fromkeys(".".join(leaf.path) for leaf in leaves(root) if leaf.path[-1] == key))


def _late_path(root: type[BaseModel], key: str) -> str | None:
    for leaf in leaves(root):
        if key in later_keys(leaf.section):
            return ".".join((*leaf.path[:-1], key))
    return None


def _nearest(root: type[BaseModel], place: Place, at: KeyPath) -> str | None:
    key = place.path[-1]
    known = keys_of(place.section)
    near = difflib.get_close_matches(key, known, n=1)
    near = near or [name for name in known if len(key) > 2 and name.startswith(key)]
    if near:
        return ".".join((*at, *place.path[:-1], near[0]))
    everywhere = {leaf.path[-1]: leaf.path for leaf in leaves(root)}
    far = difflib.get_close_matches(key, everywhere, n=1, cutoff=0.75)
    return ".".join(at + everywhere[far[0]]) if far else None
