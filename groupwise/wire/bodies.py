"""What the bodies of requests have in common: a list is refused at its first mistake.

Pydantic tells of every mistake that it finds. Of a list with a million wrong numbers that would be a gigabyte, and hold everybody
up meanwhile.
"""

from __future__ import annotations

from typing import Any, cast

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema

MANY = ("list", "tuple", "set", "frozenset", "dict")


class FailFast:
    """Beside BaseModel, for what a client sends."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


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
