"""Checks a config once against its schema, and words every problem.

`validate` raises one `ConfigError` that lists every problem: its place, the given value, and the allowed values. For an unknown key the
message names the nearest known one, or our name for another framework's key. It also says if a key belongs to a feature that does not
exist yet, and why a section leaves out a key on purpose.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from groupwise.core.errors import ConfigError
from groupwise.core.settings.credentials import explain_secret, is_secret, names_secret
from groupwise.core.settings.field_errors import field_errors
from groupwise.core.settings.schema import (
    SKIP_CONFLICT_CHECKS,
    Conflict,
    KeyPath,
    Problems,
    SchemaLocation,
    Strict,
    foreign_key,
    keys_of,
    later_keys,
    leaves,
    locate,
    refused_keys,
    sections_in,
    tag_of,
)
from groupwise.core.settings.tree import Tree
from groupwise.core.settings.wording import as_given, describe

Model = TypeVar("Model", bound=BaseModel)


def validate(
    model: type[Model],
    tree: Tree,
    at: KeyPath = (),
    check: Callable[[Tree], Sequence[str]] | None = None,
) -> Model:
    """The tree (or its section `at`) as a `model`. Raises one ConfigError with every problem, each with its place.

    `check` receives the raw tree, checks rules that a schema cannot express, and returns further problems.
    """
    problems = [*tree.problems, *(check(tree) if check else ())]
    section = tree.value(at) if at else tree.values
    unread = [path[len(at) :] for path in tree.unread if path[: len(at)] == at]
    search = _ProblemSearch(model, {} if section is None else section, unread)
    result = search.run()
    problems += [line for detail in search.reported for line in _explain(model, detail, tree, at)]
    if search.unreported_count:
        problems.append(
            f"{tree.source}: {search.unreported_count:,} more keys or values are wrong."
        )
    for section_path, conflict in _conflicts(result) if result is not None else ():
        if not search.doubts((*section_path, *key.split(".")) for key in conflict.keys):
            problems.append(f"{_section_origin(tree, at + section_path)}: {conflict.message}")
    if problems or result is None:
        foreign_keys = [
            detail for detail in search.reported if _is_foreign(model, detail, tree, at)
        ]
        if len(foreign_keys) >= MANY_FOREIGN and Path(tree.source).is_file():
            problems.append(
                f"{len(foreign_keys)} of these keys are of other frameworks. If this is a config of TRL, open-r1 or Unsloth, `groupwise "
                f"init --from {tree.source}` converts it, and says where each value comes from."
            )

        def line_of(problem: str) -> float:
            """The problem's line in the file; problems of overrides are sorted last."""
            match = re.match(rf"{re.escape(tree.source)}(:\d+)?: ", problem)
            return int((match[1] or ":0")[1:]) if match else math.inf

        raise ConfigError("\n".join(sorted(dict.fromkeys(problems), key=line_of)))
    return result


def _is_foreign(model: type[BaseModel], detail: ErrorDetails, tree: Tree, at: KeyPath) -> bool:
    """True for an unknown key of another framework. A section, or a key in one, that belongs to another command is of a config of ours."""
    if detail["type"] != "extra_forbidden":
        return False
    foreign = foreign_key(model, str(detail["loc"][-1]))
    if foreign is None:
        return False
    path = tuple(map(str, detail["loc"]))
    in_section = len(path) > 1 or isinstance(tree.value((*at, *path)), Mapping)
    return not (in_section and foreign.kind == "other_command")


def _section_origin(tree: Tree, path: KeyPath) -> str:
    """Origin and name of a section; the root of the config has no name."""
    return ": ".join([tree.origin(path), *([".".join(path)] if path else [])])


def _conflicts(section: BaseModel, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Conflict]]:
    """Conflicts in a section and its nested sections, each with the path of its section, or of the list that contains the section."""
    if isinstance(section, Strict):
        for conflict in section.conflicts():
            yield at, conflict
    for name, info in section.__class__.model_fields.items():
        inner = getattr(section, name)
        sections = cast("Sequence[Any]", inner if isinstance(inner, list | tuple) else [inner])
        for value in sections:
            if isinstance(value, BaseModel):
                yield from _conflicts(value, (*at, info.alias or name))


class _ProblemSearch:
    """Searches for every problem with single keys.

    Some problems appear only if the rest is valid. So a wrong value is removed, a missing key gets a value, and the
    config is validated again, until no new problem appears. From then on the config's values for such keys count as unknown: a problem
    that exists only because of the values put in their place is not reported.
    """

    def __init__(self, model: type[Model], section: Any, unread: Iterable[KeyPath]) -> None:
        self.model = model
        self.reported: list[ErrorDetails] = []
        # A copy, from which `_replace` removes wrong values.
        self._remaining = json.loads(json.dumps(section))
        self._replaced: set[KeyPath] = set()
        self._suggested: set[KeyPath] = set()
        """Keys that the user may have meant by an unknown key, whose value is therefore uncertain."""
        self.unreported_count = 0
        """Number of problems that were not examined: the advice for one takes some milliseconds."""
        for path in unread:
            self._replaced.add(path)
            _remove_value(self._remaining, path)

    def run(self) -> Any:
        """The model of the valid keys; None if no replacement made the rest valid."""
        seen: set[str] = set()
        while (text := json.dumps(self._remaining)) not in seen:
            seen.add(text)
            try:
                # Unknown keys are rejected even by a model whose config does not say so.
                return self.model.model_validate_json(
                    text,
                    extra=None if self.model.model_config.get("extra") else "forbid",
                    context=SKIP_CONFLICT_CHECKS,
                )
            except ValidationError as error:
                details = error.errors(include_url=False, include_input=False)
                self.unreported_count = len(details[MAX_PROBLEMS:])
                # Each wrong value is replaced by a valid one, so that the next round finds what it hid.
                entries = details[:MAX_PROBLEMS]
                deciding_keys = [self._deciding_keys(detail) for detail in entries]
                replaced_before = frozenset(self._replaced)
                for detail, keys in zip(entries, deciding_keys, strict=True):
                    if not keys:
                        location = locate(self.model, detail["loc"])
                        if not any(_is_within(location.path, path) for path in replaced_before):
                            self.reported.append(detail)
                        self._replace(location, detail["type"])
                for detail, keys in zip(entries, deciding_keys, strict=True):
                    if keys:
                        if not self.doubts(keys):
                            self.reported.append(detail)
                        self._replace(locate(self.model, detail["loc"]), detail["type"])
                if self.unreported_count:
                    break
        return None

    def doubts(self, keys: Iterable[KeyPath]) -> bool:
        """True if the config's value for one of these keys or sections is unknown."""
        unknown_paths = self._replaced | self._suggested
        return any(
            _is_within(key, path) or _is_within(path, key) for key in keys for path in unknown_paths
        )

    def _deciding_keys(self, detail: ErrorDetails) -> list[KeyPath]:
        """The other keys that decide whether this is a problem at all; mostly none."""
        location = locate(self.model, detail["loc"])
        if detail["type"] in ("value_error", "assertion_error"):
            # The schema's own validator raised; it does not say which keys it reads.
            return (
                [location.path]
                if isinstance(_value_at(self._remaining, location.path), dict)
                else []
            )
        of_another_type = detail["type"] == "extra_forbidden" and any(
            location.path[-1] in keys_of(variant) for variant in location.variants.values()
        )
        if not of_another_type or not issubclass(location.section, Strict):
            return []
        return [(*location.path[:-1], key) for key in location.section.type_from]

    def _replace(self, location: SchemaLocation, kind: str) -> None:
        path = location.path
        value, parent = _value_at(self._remaining, path), _value_at(self._remaining, path[:-1])
        inner = sections_in(location.key.annotation) if location.key else {}
        if kind == "extra_forbidden":
            self._suggested.update(_explain_unknown(self.model, location).suggestions)
        if kind.startswith("union_tag") and isinstance(value, dict):
            section = cast("dict[str, Any]", value)
            # Choose the type that has most of the given keys.
            section["type"] = max(
                inner, key=lambda kind: len(keys_of(inner[kind]).keys() & section.keys())
            )
            path = (*path, "type")
        elif kind == "missing" and isinstance(parent, dict):
            parent[path[-1]] = {} if inner else _SOME_TEXT
        else:
            _remove_value(self._remaining, path)
        self._replaced.add(path)


MANY_FOREIGN = 3
"""A config with this many keys of other frameworks is taken for one of theirs."""
MAX_PROBLEMS = 50
"""The most problems reported for one config."""
MAX_NAMES = 3
"""The most keys that a message names if it is unclear which one is meant."""

_UNQUOTED = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false|null")
"""Quoted texts that YAML would read as another kind of value without the quotes."""
_SOME_TEXT = "…"
"""Replaces a missing required value. The required keys of our own sections that conflicts compare are all texts."""


def _is_within(path: KeyPath, other: KeyPath) -> bool:
    """True if `path` equals `other` or lies below it."""
    return path[: len(other)] == other


def _remove_value(root: Any, path: KeyPath) -> None:
    parent = _value_at(root, path[:-1])
    if path and isinstance(parent, dict):
        cast("dict[str, Any]", parent).pop(path[-1], None)


def _value_at(value: Any, path: KeyPath) -> Any:
    """The value at a path; None if there is none."""
    for key in path:
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    return value


def _explain(
    model: type[BaseModel], detail: ErrorDetails, tree: Tree, at: KeyPath
) -> Iterator[str]:
    location = locate(model, detail["loc"])
    path = at + location.path
    if detail["type"] == "extra_forbidden":
        yield f"{tree.origin(path)}: {_explain_unknown(model, location, at).text}"
    elif detail["type"] == "missing":
        origin = tree.origin(path[:-1])
        yield from (f"{origin}: {text}" for text in _explain_missing(location, at))
    elif detail["type"].startswith("union_tag"):
        yield f"{tree.origin((*path, 'type'))}: {_explain_type(location, tree, at)}"
    elif isinstance(validator_error := detail.get("ctx", {}).get("error"), Problems):
        yield from (
            f"{_section_origin(tree, path)}: {problem}" for problem in validator_error.problems
        )
    else:
        yield f"{tree.origin(path)}: {_explain_value(model, location, detail, tree, at)}"


def _explain_missing(location: SchemaLocation, at: KeyPath) -> Iterator[str]:
    assert location.key is not None
    inner = sections_in(location.key.annotation)
    if len(inner) != 1:
        meaning = f": {location.key.description}" if location.key.description else "."
        yield f"{'.'.join(at + location.path)} is required{meaning}"
        return
    (section,) = inner.values()
    for name, info in keys_of(section).items():
        if info.is_required():
            yield from _explain_missing(
                SchemaLocation((*location.path, name), section, info, inner), at
            )


def _explain_type(location: SchemaLocation, tree: Tree, at: KeyPath) -> str:
    assert location.key is not None
    path = ".".join(at + location.path)
    variants = sections_in(location.key.annotation)
    value = tree.value(at + location.path)
    if not isinstance(value, Mapping):
        return f"{path} is {as_given(value)}; it must be a section, with {path}.type one of {', '.join(variants)}."
    kind = cast("Mapping[str, Any]", value).get("type")
    if any(f"type={kind}" in later_keys(variant) for variant in variants.values()):
        return f"{path}.type: {kind} is not in this version; there are {', '.join(variants)}."
    if kind is None:
        return f"{path}.type is required; it must be one of {', '.join(variants)}."
    close_matches = difflib.get_close_matches(str(kind), variants, n=1)
    hint = f"; did you mean {close_matches[0]}?" if close_matches else "."
    return f"{path}.type is {as_given(kind)}; it must be one of {', '.join(variants)}{hint}"


def _explain_value(
    model: type[BaseModel], location: SchemaLocation, detail: ErrorDetails, tree: Tree, at: KeyPath
) -> str:
    path = at + location.path
    dotted = ".".join(path) or tree.source
    if detail["type"] in ("value_error", "assertion_error"):
        return f"{dotted}: {detail.get('ctx', {}).get('error', detail['msg'])}"
    value = tree.value(path)
    if location.key is not None and f"{path[-1]}={value}" in later_keys(location.section):
        return f"{dotted}: {value} is not in this version; it must be {describe(location.key)}."
    secret = (path and is_secret(path[-1])) or names_secret(str(value))
    visible = "…" if secret else as_given(value)
    allowed_values = describe(location.key) if location.key is not None else None
    if allowed_values is None:
        return f"{dotted} is {visible}: {field_errors([detail], model)[0].message}."
    if detail["type"] == "too_short":
        minimum = detail.get("ctx", {}).get("min_length", 1)
        return f"{dotted} is {visible}; it must have at least {minimum} item{'s' * (minimum > 1)}."
    key, hint = (path[-1] if path else "", repr(value)), ""
    if issubclass(model, Strict) and (foreign_hint := model.foreign_values.get(key)):
        hint = f" {foreign_hint}."
    elif value == -1 and "null" in allowed_values:
        hint = " Write null for none."
    elif isinstance(value, str) and _UNQUOTED.fullmatch(value):
        hint = " Write it without quotes."
    return f"{dotted} is {visible}; it must be {allowed_values}.{hint}"


@dataclass(frozen=True, slots=True)
class _KeyAdvice:
    """The message about a key that does not exist."""

    text: str
    suggestions: tuple[KeyPath, ...] = ()
    """The keys or sections that the user may have meant, as paths from the root of the schema."""


def _explain_unknown(
    root: type[BaseModel], location: SchemaLocation, at: KeyPath = ()
) -> _KeyAdvice:
    """Advice for an unknown key; the most certain advice first."""
    *section_path, key = at + location.path
    dotted = ".".join((*section_path, key))
    prefix = f"{dotted} is not a key"
    if reason := refused_keys(location.section).get(key):
        return _KeyAdvice(f"{prefix}; {reason}.")
    if any(key in later_keys(variant) for variant in location.variants.values()):
        return _KeyAdvice(f"{dotted} is not in this version.")
    if foreign := foreign_key(root, key):
        # The advice names keys in full, e.g. `training.max_steps`.
        suggested_keys = tuple(
            tuple(name.split(".")) for name in re.findall(r"\w+(?:\.\w+)+", foreign.advice)
        )
        return _KeyAdvice(f"{prefix}; {foreign.advice}.", suggested_keys)
    if is_secret(key):
        return _KeyAdvice(explain_secret((*section_path, key)))
    if variant_advice := _explain_variant(location, at):
        return variant_advice
    if paths := tuple(dict.fromkeys(leaf.path for leaf in leaves(root) if leaf.path[-1] == key)):
        names = " or ".join(".".join(path) for path in paths[:MAX_NAMES])
        # Another section may say why it leaves out the same key.
        reasons = (
            f" {'.'.join((*leaf.path[:-1], key))} is none either: {reason}."
            for leaf in leaves(root)
            if (reason := refused_keys(leaf.section).get(key))
        )
        return _KeyAdvice(f"{prefix}; did you mean {names}?{next(reasons, '')}", paths)
    later_path = next(
        (leaf.path[:-1] for leaf in leaves(root) if key in later_keys(leaf.section)), None
    )
    if later_path is not None:
        return _KeyAdvice(
            f"{prefix}; {'.'.join((*later_path, key))} would be, but it is not in this version."
        )
    if nearest_path := _nearest(root, location):
        return _KeyAdvice(f"{prefix}; did you mean {'.'.join(at + nearest_path)}?", (nearest_path,))
    keys = list(keys_of(location.section))
    closest = difflib.get_close_matches(key, keys, n=MAX_NAMES, cutoff=0.0)
    section = f"in {'.'.join(section_path)}" if section_path else "at the top"
    if len(keys) <= MAX_NAMES:
        return _KeyAdvice(f"{prefix}; the keys {section} are: {', '.join(keys)}.")
    return _KeyAdvice(
        f"{prefix}; of the {len(keys)} keys {section} the nearest are {', '.join(closest)}."
    )


def _explain_variant(location: SchemaLocation, at: KeyPath) -> _KeyAdvice | None:
    """Advice if another type of the section has the key."""
    if len(location.variants) < 2:
        return None
    *section_path, key = at + location.path
    owners: dict[str, list[str]] = {}
    for kind, variant in location.variants.items():
        for name in keys_of(variant):
            owners.setdefault(name, []).append(kind)
    close_matches = difflib.get_close_matches(key, owners, n=1)
    if not close_matches:
        return None
    kind, owner_names = tag_of(location.section), ", ".join(owners[close_matches[0]])
    suggestion = (
        f"a key of {owner_names}"
        if close_matches[0] == key
        else f"{'.'.join((*section_path, close_matches[0]))} (of {owner_names})"
    )
    question = f"it is {suggestion}." if close_matches[0] == key else f"did you mean {suggestion}?"
    return _KeyAdvice(
        f"{'.'.join((*section_path, key))} is not a key of {'.'.join(section_path)} type {kind}; {question}",
        () if close_matches[0] == key else ((*location.path[:-1], close_matches[0]),),
    )


def _nearest(root: type[BaseModel], location: SchemaLocation) -> KeyPath | None:
    key = location.path[-1]
    keys = keys_of(location.section)
    close_matches = difflib.get_close_matches(key, keys, n=1)
    close_matches = close_matches or [
        name for name in keys if len(key) > 2 and name.startswith(key)
    ]
    if close_matches:
        return (*location.path[:-1], close_matches[0])
    path_by_key = {leaf.path[-1]: leaf.path for leaf in leaves(root)}
    distant_matches = difflib.get_close_matches(key, path_by_key, n=1, cutoff=0.75)
    return path_by_key[distant_matches[0]] if distant_matches else None
