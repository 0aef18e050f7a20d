"""The base of request bodies: a list is refused at its first mistake.

Pydantic reports every mistake that it finds. A list with a million wrong numbers would give a report of a gigabyte, and all other
clients would wait meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pydantic_core import SchemaValidator

if TYPE_CHECKING:
    from pydantic import BaseModel

MANY = ("list", "tuple", "set", "frozenset", "dict")


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
