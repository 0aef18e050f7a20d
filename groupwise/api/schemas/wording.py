"""Explains in plain words what is wrong with a field of a request.

A model refuses a body in pydantic's words, which speak of inputs and extra inputs. Here each of its details becomes what was expected,
with the place of the field in the model: for an unknown field the nearest known one is named, or all of them. The value is never
repeated: it may be secret, or huge.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from groupwise.api.schemas.training import GROUP_ID_PATTERN, NAME_PATTERN
from groupwise.core.settings.wording import describe

Location = Sequence[int | str]
"""A location as pydantic gives it: names, places in lists, and the labels of unions in brackets."""

WHOLE = "the body"
"""The name of a mistake that belongs to no field."""
_BY_TYPE: Mapping[str, str] = {
    "missing": "is required",
    "extra_forbidden": "is not known here",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object, { … }",
    "model_type": "must be an object, { … }",
    "model_attributes_type": "must be an object, { … }",
}
_OF_TYPE = ("int_type", "int_from_float", "float_type", "string_type", "bool_type", "literal_error")
_OF_RANGE = (
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    *("string_too_short", "string_too_long"),
)
"""Types of errors about ranges. If the field is declared with the range, its own type says what was expected."""
_FORMS: Mapping[str, str] = {
    "(messages)": "must be text, or a list of messages",
    "(section)": "must be a name, or an object, { … }, with parameters",
}
"""Descriptions of the forms of a union, by the label of the form that was tried."""
_PATTERNS: Mapping[str, str] = {
    NAME_PATTERN: "must begin with a letter (A to Z) or digit, and have only these, `.`, `_` and `-`",
    GROUP_ID_PATTERN: "must have only letters (A to Z), digits and `-`",
}
_COUNTED = re.compile(r" after validation, not \d+$")
_PYDANTIC = ("Input should ", "String should ", "List should ", "Tuple should ", "Value should ")


def explain_detail(detail: Mapping[str, Any], location: Location, model: Any = None) -> str:
    """Say what was expected. `model` is the type of the body (or of the value in which `location` begins), if it is known."""
    kind = str(detail.get("type", ""))
    place = _FieldLocation(model, location)
    if kind == "extra_forbidden" and (owners := place.owners()):
        return _unknown(str(location[-1]), owners)
    if not [part for part in location if not _is_label(part)]:
        if kind == "missing":
            return f"{WHOLE} is empty: send a JSON object, at least {{}}"
        if kind in _BY_TYPE:
            return f"{WHOLE} {_BY_TYPE[kind]}"
    if location and kind in ("list_type", "dict_type") and str(location[-1]) in _FORMS:
        return _FORMS[str(location[-1])]
    if kind == "string_pattern_mismatch":
        pattern = str(cast("Mapping[str, Any]", detail.get("ctx") or {}).get("pattern"))
        return _PATTERNS.get(pattern, f"must match {pattern}")
    expected = place.expected() if kind in (*_OF_TYPE, *_OF_RANGE) else None
    if expected is not None and (kind in _OF_TYPE or "(" in expected):
        return f"must be {expected}"
    return _BY_TYPE.get(kind) or _plain(str(detail.get("msg", "is not valid")))


def _plain(message: str) -> str:
    message = _COUNTED.sub("", message.removeprefix("Value error, "))
    for begin in _PYDANTIC:
        if message.startswith(begin):
            return f"must {message.removeprefix(begin)}"
    return message


def _unknown(key: str, owners: Sequence[type[BaseModel]]) -> str:
    names = list(dict.fromkeys(name for owner in owners for name in owner.model_fields))
    for owner in owners:
        elsewhere = cast("Mapping[str, str]", getattr(owner, "elsewhere", {}))
        if key in elsewhere:
            return f"is not a field; {elsewhere[key]}"
    if near := difflib.get_close_matches(key, names, n=1):
        return f"is not a field; did you mean {near[0]}?"
    return (
        f"is not a field; there are {', '.join(names)}"
        if names
        else "is not a field: no field is taken here"
    )


def _is_label(part: int | str) -> bool:
    return str(part).startswith("(")


class _FieldLocation:
    """The field of a model to which a location leads."""

    def __init__(self, model: Any, location: Location) -> None:
        self._above: list[Any] = []
        self._here: list[Any] = [] if model is None else [model]
        for part in location:
            self._above = self._here
            self._here = [found for each in self._here for found in _steps(each, part)]

    def owners(self) -> list[type[BaseModel]]:
        """The models that might have had the last part as a field."""
        return [each for above in self._above for each in _models(above)]

    def expected(self) -> str | None:
        """The values that the field accepts, in words."""
        found = {describe(_field(each)) for each in self._here}
        return found.pop() if len(found) == 1 else None


def _field(annotation: Any) -> FieldInfo:
    return (
        annotation if isinstance(annotation, FieldInfo) else FieldInfo.from_annotation(annotation)
    )


def _members(annotation: Any) -> Iterator[tuple[str | None, Any]]:
    """The types that it may be, each with its label."""
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
    """The types to which a part of a location leads."""
    if _is_label(part):
        yield from (each for label, each in _members(annotation) if label == part)
        return
    for _, each in _members(annotation):
        arguments = get_args(each)
        if isinstance(part, int) and get_origin(each) in (list, tuple) and arguments:
            yield arguments[0]
        elif isinstance(each, type) and issubclass(each, BaseModel) and part in each.model_fields:
            yield each.model_fields[str(part)]
