"""Describes the content of any value in a dataset in the same way in every process, so changes of the data are detected.

Plain values describe themselves. Other values are described by their parts if their content is certain: bytes, sets, dates, paths,
numbers and some other classes of the standard library (`PARTS`), enums, dataclasses, attrs, pydantic models, arrays, pictures, and
the times of pandas. For the rest, including subclasses of library classes, nothing is guessed: `repr`, pickle or `__dict__` may
abridge, include caches and addresses, or depend on the order of a set. Different data would then look equal, or equal data
different.

Objects come from the author of the task, and may contain themselves, lack fields, or raise when they are read. Such objects are
described by name, and never raise here.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from json import dumps
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, cast
from uuid import UUID
from zoneinfo import ZoneInfo

from pydantic import BaseModel

UNSUPPORTED = "untold"
DEEPEST = 100
"""Levels of nesting that are described. With the calls that each level needs, they stay within Python's recursion limit from any
starting depth.
"""
MAX_REPEATED_VISITS = 10_000
"""Most repeated visits to values in cycles. The number of paths through a few dozen values that all refer to each other is
practically endless.
"""
LONGEST_INTEGER = 14_284
"""Most bits of an integer that is written in decimal; Python refuses more than 4300 digits."""


def canonical(value: Any) -> Any:
    """The content as a JSON-compatible value. Lists and tuples count as the same, and so do arrays and lists of their numbers."""
    try:
        return _Walk().describe(value)
    except _TangledError:
        return _unsupported_part(
            f"objects of {_qualified_name(type(value))} with parts that refer to each other in more than {MAX_REPEATED_VISITS} ways"
        )


def unsupported_parts(canonical: Any) -> Iterator[str]:
    """Yields descriptions of the parts that `canonical` could not describe, found in its result."""
    pending = [canonical]
    while pending:
        entry = pending.pop()
        if isinstance(entry, list):
            pending.extend(reversed(cast("list[Any]", entry)))
        elif isinstance(entry, dict):
            parts = cast("dict[str, Any]", entry)
            if UNSUPPORTED in parts:
                yield parts[UNSUPPORTED]
            else:
                pending.extend(parts.values())


class _TangledError(Exception):
    """A value has too many paths through its loops to describe them all."""


class _Walk:
    """A walk through a value and all that is in it.

    A value that contains itself is described by the number of levels up to it, which does not depend on the order in
    which sets give their entries. All visited values are kept here until the end, because their `id` could otherwise be reused.
    """

    def __init__(self) -> None:
        self.ancestors: dict[int, int] = {}
        self.visited: dict[int, object] = {}
        self.cached: dict[int, Any] = {}
        """Descriptions, by identity, of values whose description does not depend on their position."""
        self.dependent = 0
        self.repeated_visits = 0

    def describe(self, value: Any) -> Any:
        # The real type is used: a proxy or a mock may report another one as its `__class__`.
        kind = cast("Any", type(value))
        if value is None or (
            issubclass(kind, bool | int | float | str) and not issubclass(kind, Enum)
        ):
            if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
                return {"integer": hex(value)}
            return value
        name = id(value)
        if name in self.cached:
            return self.cached[name]
        if name in self.ancestors:
            self.dependent += 1
            return {"up": len(self.ancestors) - self.ancestors[name]}
        if len(self.ancestors) == DEEPEST:
            self.dependent += 1
            return _unsupported_part(f"something nested more than {DEEPEST} levels deep")
        self.repeated_visits += name in self.visited
        if self.repeated_visits > MAX_REPEATED_VISITS:
            raise _TangledError
        self.visited[name] = value
        self.ancestors[name] = len(self.ancestors)
        count_before = self.dependent
        try:
            content = self._describe_content(value, kind)
        except _TangledError:
            raise
        except Exception:  # noqa: BLE001 — the code of any class may run here
            content = _unsupported_part(f"objects of {_qualified_name(kind)}")
        finally:
            del self.ancestors[name]
        if self.dependent == count_before:
            self.cached[name] = content
        return content

    def _describe_content(self, value: Any, kind: Any) -> Any:
        if issubclass(kind, Enum):
            return self._describe_object(kind, {"name": value.name, "value": value.value})
        if issubclass(kind, list | tuple):
            return [self.describe(entry) for entry in value]
        if issubclass(kind, Mapping):
            return self._describe_pairs(value)
        if issubclass(kind, AbstractSet):
            return {"set": sorted((self.describe(entry) for entry in value), key=dumps)}
        if issubclass(kind, bytes | bytearray | memoryview):
            return {"bytes": hashlib.sha256(bytes(value)).hexdigest()}
        if _is_array(kind):
            return self.describe(value.tolist())
        if issubclass(kind, type | FunctionType | BuiltinFunctionType):
            return _unsupported_part(_qualified_name(value))
        return self._describe_object(kind, _parts_of_value(value, kind))

    def _describe_object(self, kind: Any, parts: dict[str, Any] | None) -> Any:
        if parts is None:
            return _unsupported_part(f"objects of {_qualified_name(kind)}")
        return {"object": [_qualified_name(kind), self._describe_pairs(parts)]}

    def _describe_pairs(self, mapping: Mapping[Any, Any]) -> Any:
        """Pairs with text keys first, then others, each in an order that does not depend on hashes."""
        pairs = [[self.describe(key), self.describe(value)] for key, value in mapping.items()]
        text_pairs = sorted((pair for pair in pairs if isinstance(pair[0], str)), key=_pair_key)
        other_pairs = sorted((pair for pair in pairs if not isinstance(pair[0], str)), key=dumps)
        return {"dict": text_pairs + other_pairs}


def _pair_key(pair: list[Any]) -> Any:
    return pair[0]


def _unsupported_part(description: str) -> dict[str, str]:
    return {UNSUPPORTED: description}


def _is_array(kind: Any) -> bool:
    """True for an array or a number of these libraries. A class derived elsewhere may hold more, such as a unit."""
    if kind.__name__ in ("longdouble", "clongdouble"):
        return False  # has no counterpart in Python; its `tolist` returns its own type
    return _library_of(kind) in ("array", "jaxlib", "numpy", "torch") and hasattr(kind, "tolist")


def _parts_of_value(value: Any, kind: Any) -> dict[str, Any] | None:
    """The parts of a value, if they are certain; None for anything else."""
    if issubclass(kind, BaseModel):
        # Reads `__dict__` directly: attribute access may warn about deprecated fields, and `__iter__` may be redefined.
        instance_values = cast("dict[str, Any]", value.__dict__)
        values = {name: item for name, item in instance_values.items() if name in kind.model_fields}
        return values | (value.__pydantic_extra__ or {})
    if is_dataclass(kind):
        return _present_attributes(value, (field.name for field in fields(kind)))
    if (attributes := getattr(kind, "__attrs_attrs__", None)) is not None:
        return _present_attributes(value, (attribute.name for attribute in attributes))
    # An image of Pillow can only exist once Pillow is imported.
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and issubclass(kind, pillow.Image):
        return {
            "mode": value.mode,
            "size": value.size,
            "palette": value.getpalette(),
            "pixels": value.tobytes(),
        }
    if kind is ZoneInfo and value.key is None:
        return None
    describe = PARTS.get(kind) or PARTS_BY_NAME.get(f"{_library_of(kind)}.{kind.__name__}")
    return describe(value) if describe else None


def _present_attributes(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attributes that are set."""
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _text_parts(value: Any) -> dict[str, Any]:
    return {"text": str(value)}


def _date_parts(value: Any) -> dict[str, Any]:
    return {"iso": value.isoformat()}


def _datetime_parts(value: Any) -> dict[str, Any]:
    return {"iso": value.isoformat(), "fold": value.fold, "zone": value.tzinfo}


def _timestamp_parts(value: Any) -> dict[str, Any]:
    parts = _datetime_parts(value)
    name = getattr(value.tzinfo, "zone", None)  # of pytz, which pandas before 3 uses
    return {**parts, "zone": name} if isinstance(name, str) else parts


def _attribute_parts(*names: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: getattr(value, name) for name in names}


PARTS: dict[type, Callable[[Any], dict[str, Any]]] = {
    complex: _attribute_parts("real", "imag"),
    range: _attribute_parts("start", "stop", "step"),
    slice: _attribute_parts("start", "stop", "step"),
    Decimal: _text_parts,
    Fraction: _attribute_parts("numerator", "denominator"),
    UUID: _text_parts,
    PurePosixPath: _text_parts,
    PosixPath: _text_parts,
    PureWindowsPath: _text_parts,
    WindowsPath: _text_parts,
    date: _date_parts,
    datetime: _datetime_parts,
    time: _datetime_parts,
    timedelta: _attribute_parts("days", "seconds", "microseconds"),
    timezone: lambda zone: {"offset": zone.utcoffset(None), "name": zone.tzname(None)},
    ZoneInfo: _attribute_parts("key"),
    re.Pattern: _attribute_parts("pattern", "flags"),
    deque: lambda line: {"entries": list(line), "maxlen": line.maxlen},
    SimpleNamespace: vars,
}
"""Classes of the standard library, without those derived from them, and what their instances consist of."""
PARTS_BY_NAME: dict[str, Callable[[Any], dict[str, Any]]] = {
    "pandas.Timestamp": _timestamp_parts,
    "pandas.Timedelta": _date_parts,
    "pandas.NaTType": _attribute_parts(),
    "pandas.NAType": _attribute_parts(),
}
"""The same for values that `to_dict` of a pandas table returns, by library and class name, because this module does not import pandas."""


def _library_of(kind: Any) -> str:
    return str(kind.__module__).partition(".")[0]


def _qualified_name(value: Any) -> str:
    """The full name of a class or function. For one in a task file the hash of the path is left out, because the file may be moved."""
    module = str(value.__module__)
    if module.startswith("groupwise_user_"):
        module = module.rpartition("_")[0]
    return f"{module}.{value.__qualname__}"
