"""What the bodies of requests have in common: a list is refused at its first mistake.

Pydantic tells of every mistake that it finds. Of a list with a million wrong numbers that would be a gigabyte, and hold everybody
up meanwhile.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

from pydantic_core import SchemaValidator

if TYPE_CHECKING:
    from pydantic import BaseModel

MANY = ("list", "tuple", "set", "frozenset", "dict")


class FailFast:
    """Beside BaseModel, for what a client sends."""

    @classmethod
    def __pydantic_on_complete__(cls) -> None:
        """Validate by a schema that differs in this alone, in all that stands in it."""
        model = cast("type[BaseModel]", cls)
        schema = copy.deepcopy(model.__pydantic_core_schema__)
        _fail_fast(schema)
        model.__pydantic_validator__ = SchemaValidator(schema, _use_prebuilt=False)


def _fail_fast(schema: object) -> None:
    """Change the schemas of all values with many parts, however deep they stand in it."""
    if isinstance(schema, dict):
        inner = cast("dict[str, object]", schema)
        if inner.get("type") in MANY:
            inner["fail_fast"] = True
        for key in inner.keys() - {"metadata", "serialization"}:
            _fail_fast(inner[key])
    elif isinstance(schema, list | tuple):
        for each in cast("list[object]", schema):
            _fail_fast(each)
