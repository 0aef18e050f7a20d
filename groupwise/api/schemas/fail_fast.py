"""Request bodies that many entries, or many mistakes, do not make slow.

Pydantic reports every mistake that it finds. A list with a million wrong numbers would give a report of a gigabyte, and all other
clients would wait meanwhile: a list is refused at its first mistake (`FailFast`). Pydantic also validates a list at one go, for which all
other threads wait: lists that may be long are validated in slices (`IN_SLICES`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import SchemaValidator

if TYPE_CHECKING:
    from pydantic import BaseModel

MANY = ("list", "tuple", "set", "frozenset", "dict")
SLICE = 20_000
"""Entries of a list that are validated at one go, for about a millisecond."""


class FailFast:
    """Mixin for the models of request bodies."""

    @classmethod
    def __pydantic_on_complete__(cls) -> None:
        """Rebuild the model's validator with `fail_fast` set. Models that contain this one use the changed schema, too."""
        model = cast("type[BaseModel]", cls)
        schema = model.__pydantic_core_schema__
        _fail_fast(schema)
        model.__pydantic_validator__ = SchemaValidator(schema, _use_prebuilt=False)


def _fail_fast(schema: object) -> None:
    """Set `fail_fast` in the schemas of all collections, at any depth."""
    if isinstance(schema, dict):
        inner = cast("dict[str, object]", schema)
        if inner.get("type") in MANY:
            inner["fail_fast"] = True
        for key in inner.keys() - {"metadata", "serialization"}:
            _fail_fast(inner[key])
    elif isinstance(schema, list | tuple):
        for item in cast("list[object]", schema):
            _fail_fast(item)


def _validate_in_slices(given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if type(given) is not list or len(entries := cast("list[Any]", given)) <= SLICE:
        return validate(given)
    validated: list[Any] = []
    for start in range(0, len(entries), SLICE):
        try:
            validated += validate(entries[start : start + SLICE])
        except ValidationError as error:
            of_all = error.errors(include_url=False)
            for details in of_all:
                index, *inner = details["loc"]
                details["loc"] = (start + cast("int", index), *inner)
            raise ValidationError.from_exception_data(error.title, cast("Any", of_all)) from None
    return validated


IN_SLICES = WrapValidator(_validate_in_slices)
"""Annotates a list without limits of its own: `Annotated[list[Item], IN_SLICES]`; limits of its length are added around it."""
