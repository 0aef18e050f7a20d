"""The content of any value in a dataset, told in the same way in every process, so that a change of the data is noticed.

Plain values tell themselves. Of other kinds those are told whose content is certain: bytes, sets, dates, paths, numbers of the
standard library, enums, dataclasses, pydantic models, arrays and pictures. A class with a `__repr__` of its own is taken at its
word. Nothing is guessed of the rest: what pickle or `__dict__` would say may hold caches and addresses, which differ from process to
process and would make equal data look changed.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from json import dumps
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast
from uuid import UUID

from pydantic import BaseModel

TOLD_BY_REPR = (
    complex,
    range,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    Decimal,
    Fraction,
    PurePath,
    UUID,
)
"""Classes, with those derived from them, whose `repr` has everything in it."""
UNTOLD = "untold"


def canonical(value: Any) -> Any:
    """The content as something that JSON can write. Lists and tuples are the same, as are arrays and lists of their numbers."""
    if value is None or (
        isinstance(value, bool | int | float | str) and not isinstance(value, Enum)
    ):
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {
            "dict": sorted(([str(k), canonical(v)] for k, v in items), key=lambda pair: pair[0])
        }
    if isinstance(value, list | tuple):
        return [canonical(entry) for entry in cast("Sequence[Any]", value)]
    if isinstance(value, AbstractSet):
        return {"set": sorted(dumps(canonical(entry)) for entry in cast("AbstractSet[Any]", value))}
    return _of_an_object(value)


def _of_an_object(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": hashlib.sha256(bytes(cast("bytes", value))).hexdigest()}
    if (parts := _parts(value)) is not None:
        return {"object": [_named(type(value)), canonical(parts)]}
    if hasattr(value, "tolist"):
        return canonical(value.tolist())
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return {UNTOLD: _named(value)}
    told = _own_words(value)
    if told is None:
        return {UNTOLD: f"objects of {_named(type(value))}"}
    return {"object": [_named(type(value)), told]}


def untold(told: Any) -> Iterator[str]:
    """What could not be told in something that `canonical` made."""
    if isinstance(told, list):
        for entry in cast("list[Any]", told):
            yield from untold(entry)
    elif isinstance(told, dict):
        for name, entry in cast("dict[str, Any]", told).items():
            yield from [entry] if name == UNTOLD else untold(entry)


def _parts(value: Any) -> dict[str, Any] | None:
    """What a thing consists of, where that is certain; None for anything else."""
    if isinstance(value, Enum):
        return {"name": value.name, "value": value.value}
    if isinstance(value, BaseModel):
        return dict(value)
    if _is_picture(value):
        palette = value.getpalette()
        return {
            "mode": value.mode,
            "size": value.size,
            "palette": palette,
            "pixels": value.tobytes(),
        }
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return None


def _is_picture(value: Any) -> bool:
    """Whether it is an image of Pillow, which nobody has made who has not imported it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _own_words(value: Any) -> str | None:
    """What a class says of its instance; None where that is not its content: an address, or something abridged."""
    if isinstance(value, TOLD_BY_REPR):
        return repr(value)
    if type(value).__repr__ is object.__repr__:
        return None
    shown = repr(value)
    return None if " at 0x" in shown or "..." in shown else shown


def _named(value: Any) -> str:
    """The full name of a class or function."""
    return f"{value.__module__}.{value.__qualname__}"
