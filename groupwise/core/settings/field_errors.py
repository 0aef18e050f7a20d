"""Explains in plain words which fields pydantic refused, and why.

Pydantic speaks of inputs and extra inputs. `field_errors` turns its errors into the expected values, with the place of each field. For
an unknown field it gives the nearest known name, or all known ones. Messages never repeat a given value, which may be secret or huge: a
caller that wants to show it takes it from `FieldError.given`. Config files get more advice: see `groupwise.core.settings.validation`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, cast, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic.fields import FieldInfo

from groupwise.core.settings.schema import Problems, Strict, refused_keys
from groupwise.core.settings.wording import describe

Location = Sequence[int | str]
"""A location in pydantic's form: names, list indices, and union labels in parentheses."""

MOST_FIELD_ERRORS = 50
"""The most errors returned: a document may have a million."""
LONGEST_MESSAGE = 500
"""Limit, in characters, of a field's path and of a message."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Names of runs and checkpoints: each is a folder name and part of an address `run@step`."""
GROUP_ID_PATTERN = r"^[A-Za-z0-9-]+$"
_PATTERNS: Mapping[str, str] = {
    NAME_PATTERN: "must begin with a letter (A to Z) or digit, and have only these, `.`, `_` and `-`",
    GROUP_ID_PATTERN: "must have only letters (A to Z), digits and `-`",
}
_BY_TYPE: Mapping[str, str] = {
    "missing": "is required",
    "missing_argument": "is required",
    "missing_keyword_only_argument": "is required",
    "extra_forbidden": "is not known here",
    "unexpected_keyword_argument": "is not a parameter",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object, { … }",
    "model_type": "must be an object, { … }",
    "dataclass_type": "must be an object, { … }",
    "model_attributes_type": "must be an object, { … }",
}
_OF_TYPE = (
    *("int_type", "int_parsing", "int_from_float", "float_type", "float_parsing"),
    *("string_type", "bool_type", "bool_parsing", "literal_error"),
)
_OF_RANGE = (
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    *("string_too_short", "string_too_long"),
)
"""Pydantic's error types for ranges. If the field's declaration includes the range, the message describes the field's type instead."""
_FORMS: Mapping[str, str] = {
    "(messages)": "must be text, or a list of messages",
    "(section)": "must be a name, or an object, { … }, with parameters",
}
"""The accepted forms of a union, by the label of the form that was tried."""
_COUNTED = re.compile(r" after validation, not \d+$")
_PYDANTIC = ("Input should ", "String should ", "List should ", "Tuple should ", "Value should ")


class FieldError(NamedTuple):
    """One field with an error."""

    field: str
    """Its place: `rewards.3`, `groups.0.group_id`; empty for the document as a whole."""
    message: str
    """The expected value, or the problem: `must be a whole number`."""
    given: Any = None
    """The refused value."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


def field_errors(
    error: ValidationError | Iterable[Mapping[str, Any]], model: Any = None, whole: str = "the body"
) -> list[FieldError]:
    """The errors, each field and message once, at most `MOST_FIELD_ERRORS`. `error`: pydantic's exception, or its details.

    `model` is the validated type, if known; messages are then more specific. `whole` names the document in messages about all
    of it, as in `the body must be an object`.
    """
    details = error.errors(include_url=False) if isinstance(error, ValidationError) else error
    found: dict[tuple[str, str], FieldError] = {}
    for detail in details:
        location = cast("Location", detail.get("loc", ()))
        place = _FieldLocation(model, location, str(detail.get("type", "")))
        context = cast("Mapping[str, Any]", detail.get("ctx") or {})
        several = context.get("error")
        messages = (
            several.problems
            if isinstance(several, Problems)
            else (_message(detail, location, place, whole),)
        )
        # For invalid JSON the location is an offset in the text, not a field.
        keys = [] if detail.get("type") == "json_invalid" else place.keys
        if isinstance(field := context.get("field"), str) and field:
            keys = [*keys, field]
        path = _writable(".".join(keys))
        for message in map(_writable, messages):
            found.setdefault((path, message), FieldError(path, message, detail.get("input")))
        if len(found) >= MOST_FIELD_ERRORS:
            break
    return list(found.values())[:MOST_FIELD_ERRORS]


def _writable(text: str) -> str:
    """Cut to `LONGEST_MESSAGE`; lone surrogates, which no encoding can write, are escaped."""
    return text.encode(errors="backslashreplace").decode()[:LONGEST_MESSAGE]


def _message(
    detail: Mapping[str, Any], location: Location, place: _FieldLocation, whole: str
) -> str:
    kind = str(detail.get("type", ""))
    if kind == "extra_forbidden" and (owners := place.owners()):
        return _unknown(str(location[-1]), owners)
    at_top = not place.keys
    if at_top and kind == "missing":
        return f"{whole} is empty: send a JSON object, at least {{}}"
    if location and kind in ("list_type", "dict_type") and str(location[-1]) in _FORMS:
        return _FORMS[str(location[-1])]
    context = cast("Mapping[str, Any]", detail.get("ctx") or {})
    if kind == "json_invalid":
        return f"{whole} is not valid JSON: {context.get('error', 'it cannot be read')}"
    if kind == "string_pattern_mismatch":
        pattern = str(context.get("pattern"))
        return _PATTERNS.get(pattern, f"must match {pattern}")
    expected = place.expected() if kind in (*_OF_TYPE, *_OF_RANGE) else None
    if expected is not None and (kind in _OF_TYPE or "(" in expected):
        message = f"must be {expected}"
    else:
        message = _BY_TYPE.get(kind) or _plain(str(detail.get("msg", "is not valid")))
    return f"{whole} {message}" if at_top and message.startswith("must ") else message


def _plain(message: str) -> str:
    message = _COUNTED.sub("", message.removeprefix("Value error, "))
    for begin in _PYDANTIC:
        if message.startswith(begin):
            return f"must {message.removeprefix(begin)}"
    return message


def _unknown(key: str, owners: Sequence[type[BaseModel]]) -> str:
    names = list(dict.fromkeys(name for owner in owners for name in owner.model_fields))
    kind = "key" if any(issubclass(owner, Strict) for owner in owners) else "field"
    for owner in owners:
        if reason := refused_keys(owner).get(key):
            return f"is not a {kind}; {reason}"
    if near := difflib.get_close_matches(key, names, n=1):
        return f"is not a {kind}; did you mean {near[0]}?"
    if not names:
        return f"is not a {kind}: no {kind} is taken here"
    return f"is not a {kind}; there are {', '.join(names)}"


def _is_label(part: int | str) -> bool:
    return str(part).startswith("(")


class _FieldLocation:
    """The field of a model that a location refers to. `kind` is the type of the error."""

    def __init__(self, model: Any, location: Location, kind: str) -> None:
        self.keys: list[str] = []
        """The path without union labels, which are no keys."""
        self._above: list[Any] = []
        self._here: list[Any] = [] if model is None else [model]
        for number, part in enumerate(location, 1):
            found = [step for each in self._here for step in _steps(each, part)]
            must_be_key = number == len(location) and kind in ("extra_forbidden", "missing")
            if not found and isinstance(part, str) and not must_be_key and self._in_union():
                continue  # pydantic's own label for a member of a union: `str`, `list[int]`
            if not _is_label(part):
                self.keys.append(str(part))
            self._above, self._here = self._here, found

    def _in_union(self) -> bool:
        return any(
            len([kind for _, kind in _members(each) if kind is not NoneType]) > 1
            for each in self._here
        )

    def owners(self) -> list[type[BaseModel]]:
        """The models that could have had the last part of the location as a field."""
        return [each for above in self._above for each in _models(above)]

    def expected(self) -> str | None:
        """The values that the field accepts, in words."""
        found = {
            describe(each if isinstance(each, FieldInfo) else FieldInfo.from_annotation(each))
            for each in self._here
        }
        return found.pop() if len(found) == 1 else None


def _members(annotation: Any) -> Iterator[tuple[str | None, Any]]:
    """The possible types of an annotation, each with its union label."""
    if isinstance(annotation, FieldInfo):
        yield from _members(annotation.annotation)
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        label = next((each.tag for each in arguments[1:] if isinstance(each, Tag)), None)
        for inner, found in _members(arguments[0]):
            yield label or inner, found
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _members(argument)
    else:
        yield None, annotation


def _models(annotation: Any) -> list[type[BaseModel]]:
    found = (each for _, each in _members(annotation))
    return [each for each in found if isinstance(each, type) and issubclass(each, BaseModel)]


def _steps(annotation: Any, part: int | str) -> Iterator[Any]:
    """The types that a part of a location leads to."""
    if _is_label(part):
        yield from (each for label, each in _members(annotation) if label == part)
        return
    for _, each in _members(annotation):
        arguments = get_args(each)
        if isinstance(part, int) and get_origin(each) in (list, tuple) and arguments:
            yield arguments[0]
        elif isinstance(each, type) and issubclass(each, BaseModel) and part in each.model_fields:
            yield each.model_fields[str(part)]
