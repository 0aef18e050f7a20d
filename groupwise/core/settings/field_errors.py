"""Explains in plain words which fields pydantic refused, and why.

Pydantic's messages ("Extra inputs are not permitted") mean little to users. `field_errors` says instead which values are expected, and
where. For an unknown field it gives the nearest known name, or all known ones. Messages never repeat a given value, which may be secret or
huge: a caller that wants to show it takes it from `FieldError.given`. Config files get more advice: see
`groupwise.core.settings.validation`.
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
"""A location in pydantic's form: names, list indices, and union tags in parentheses."""

MAX_FIELD_ERRORS = 50
"""Limit for the errors returned: a huge invalid document must not cause a huge response."""
LONGEST_MESSAGE = 500
"""Limit, in characters, of a field's path and of a message."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Names of runs and checkpoints: each is a folder name and part of an address `run@step`."""
GROUP_ID_PATTERN = r"^[A-Za-z0-9_-]+$"
_PATTERNS: Mapping[str, str] = {
    NAME_PATTERN: "must begin with a letter (A to Z) or digit, and have only these, `.`, `_` and `-`",
    GROUP_ID_PATTERN: "must have only letters (A to Z), digits, `_` and `-`",
}
_MESSAGES: Mapping[str, str] = {
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
_WRONG_TYPE_CODES = (
    *("int_type", "int_parsing", "int_from_float", "float_type", "float_parsing"),
    *("string_type", "bool_type", "bool_parsing", "literal_error"),
)
_OUT_OF_RANGE_CODES = (
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    *("string_too_short", "string_too_long"),
)
"""Pydantic's error types for ranges. If the field's declaration includes the range, the message describes the field's type instead."""
_UNION_VARIANT_MESSAGES: Mapping[str, str] = {
    "(messages)": "must be text, or a list of messages",
    "(section)": "must be a name, or an object, { … }, with parameters",
}
"""Message for each union tag: the forms that the union accepts."""
_LENGTH_SUFFIX = re.compile(r" after validation, not \d+$")
"""The end of messages such as `List should have at least 1 item after validation, not 0`."""
_PYDANTIC_PREFIXES = (
    "Input should ",
    "String should ",
    "List should ",
    "Tuple should ",
    "Value should ",
)


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
    error: ValidationError | Iterable[Mapping[str, Any]],
    model: Any = None,
    document_name: str = "the body",
) -> list[FieldError]:
    """The errors, each field and message once, at most `MAX_FIELD_ERRORS`. `error`: pydantic's exception, or its details.

    `model` is the validated type, if known; messages are then more specific. `document_name` names the document in messages about all
    of it, as in `the body must be an object`.
    """
    details = error.errors(include_url=False) if isinstance(error, ValidationError) else error
    errors: dict[tuple[str, str], FieldError] = {}
    for detail in details:
        location = cast("Location", detail.get("loc", ()))
        field_location = _FieldLocation(model, location, str(detail.get("type", "")))
        context = cast("Mapping[str, Any]", detail.get("ctx") or {})
        validator_error = context.get("error")
        messages = (
            validator_error.problems
            if isinstance(validator_error, Problems)
            else (_error_message(detail, location, field_location, document_name),)
        )
        # For invalid JSON the location is an offset in the text, not a field.
        keys = [] if detail.get("type") == "json_invalid" else field_location.keys
        if isinstance(field := context.get("field"), str) and field:
            keys = [*keys, field]
        path = _writable(".".join(keys))
        for message in map(_writable, messages):
            errors.setdefault((path, message), FieldError(path, message, detail.get("input")))
        if len(errors) >= MAX_FIELD_ERRORS:
            break
    return list(errors.values())[:MAX_FIELD_ERRORS]


def _writable(text: str) -> str:
    """Cut to `LONGEST_MESSAGE`; lone surrogates, which no encoding can write, are escaped."""
    return text.encode(errors="backslashreplace").decode()[:LONGEST_MESSAGE]


def _error_message(
    detail: Mapping[str, Any],
    location: Location,
    field_location: _FieldLocation,
    document_name: str,
) -> str:
    kind = str(detail.get("type", ""))
    if kind == "extra_forbidden" and (owners := field_location.owners()):
        return _unknown_field_message(str(location[-1]), owners)
    at_top = not field_location.keys
    if at_top and kind == "missing":
        return f"{document_name} is empty: send a JSON object, at least {{}}"
    if (
        location
        and kind in ("list_type", "dict_type")
        and str(location[-1]) in _UNION_VARIANT_MESSAGES
    ):
        return _UNION_VARIANT_MESSAGES[str(location[-1])]
    context = cast("Mapping[str, Any]", detail.get("ctx") or {})
    if kind == "json_invalid":
        return f"{document_name} is not valid JSON: {context.get('error', 'it cannot be read')}"
    if kind == "string_pattern_mismatch":
        pattern = str(context.get("pattern"))
        return _PATTERNS.get(pattern, f"must match {pattern}")
    expected = (
        field_location.expected() if kind in (*_WRONG_TYPE_CODES, *_OUT_OF_RANGE_CODES) else None
    )
    if expected is not None and (kind in _WRONG_TYPE_CODES or "(" in expected):
        message = f"must be {expected}"
    else:
        message = _MESSAGES.get(kind) or _plain_message(str(detail.get("msg", "is not valid")))
    return f"{document_name} {message}" if at_top and message.startswith("must ") else message


def _plain_message(message: str) -> str:
    message = _LENGTH_SUFFIX.sub("", message.removeprefix("Value error, "))
    for begin in _PYDANTIC_PREFIXES:
        if message.startswith(begin):
            return f"must {message.removeprefix(begin)}"
    return message


def _unknown_field_message(key: str, owners: Sequence[type[BaseModel]]) -> str:
    names = list(dict.fromkeys(name for owner in owners for name in owner.model_fields))
    kind = "key" if any(issubclass(owner, Strict) for owner in owners) else "field"
    for owner in owners:
        if reason := refused_keys(owner).get(key):
            return f"is not a {kind}; {reason}"
    if close_matches := difflib.get_close_matches(key, names, n=1):
        return f"is not a {kind}; did you mean {close_matches[0]}?"
    if not names:
        return f"is not a {kind}: no {kind} is taken here"
    return f"is not a {kind}; there are {', '.join(names)}"


def _is_union_tag(component: int | str) -> bool:
    return str(component).startswith("(")


class _FieldLocation:
    """The field of a model that a location refers to. `kind` is the type of the error."""

    def __init__(self, model: Any, location: Location, kind: str) -> None:
        self.keys: list[str] = []
        """The path without union tags, which are not keys."""
        self._parents: list[Any] = []
        self._current: list[Any] = [] if model is None else [model]
        for number, component in enumerate(location, 1):
            children = [
                step for annotation in self._current for step in _children(annotation, component)
            ]
            must_be_key = number == len(location) and kind in ("extra_forbidden", "missing")
            if not children and isinstance(component, str) and not must_be_key and self._in_union():
                continue  # pydantic's own label for a member of a union: `str`, `list[int]`
            if not _is_union_tag(component):
                self.keys.append(str(component))
            self._parents, self._current = self._current, children

    def _in_union(self) -> bool:
        return any(
            len([kind for _, kind in _union_members(annotation) if kind is not NoneType]) > 1
            for annotation in self._current
        )

    def owners(self) -> list[type[BaseModel]]:
        """The models that could have had the last part of the location as a field."""
        return [model for parent in self._parents for model in _model_types(parent)]

    def expected(self) -> str | None:
        """The values that the field accepts, in words."""
        descriptions = {
            describe(
                annotation
                if isinstance(annotation, FieldInfo)
                else FieldInfo.from_annotation(annotation)
            )
            for annotation in self._current
        }
        return descriptions.pop() if len(descriptions) == 1 else None


def _union_members(annotation: Any) -> Iterator[tuple[str | None, Any]]:
    """The possible types of an annotation, each with its union tag."""
    if isinstance(annotation, FieldInfo):
        yield from _union_members(annotation.annotation)
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        label = next((marker.tag for marker in arguments[1:] if isinstance(marker, Tag)), None)
        for inner, member in _union_members(arguments[0]):
            yield label or inner, member
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _union_members(argument)
    else:
        yield None, annotation


def _model_types(annotation: Any) -> list[type[BaseModel]]:
    types = (member for _, member in _union_members(annotation))
    return [kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _children(annotation: Any, component: int | str) -> Iterator[Any]:
    """The types that a component of a location leads to."""
    if _is_union_tag(component):
        yield from (member for label, member in _union_members(annotation) if label == component)
        return
    for _, member_kind in _union_members(annotation):
        arguments = get_args(member_kind)
        if isinstance(component, int) and get_origin(member_kind) in (list, tuple) and arguments:
            yield arguments[0]
        elif (
            isinstance(member_kind, type)
            and issubclass(member_kind, BaseModel)
            and component in member_kind.model_fields
        ):
            yield member_kind.model_fields[str(component)]
