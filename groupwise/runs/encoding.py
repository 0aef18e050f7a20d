"""Converts a record's values to types that SQLite can store, and back, without losing a bit.

SQLite has signed 64-bit integers, float64, UTF-8 text and blobs. Each function here converts one other type and has an inverse.

SQLite stores a value of any type in any column. Where another program has put one that is none of ours, the inverse raises a StoreError.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, cast

from groupwise.core.errors import StoreError

LONGEST_REPR = 10_000
"""Characters kept of the repr of a value that JSON cannot hold (an image, an array): enough to recognise it."""


LAST_MOMENT = 250_000_000_000
"""Largest time, in seconds since 1970, that `datetime` can represent, approximately: the year 9892."""


def moment(value: Any) -> float | None:
    """The value if it is a plausible time in seconds since 1970, else None."""
    return value if isinstance(value, int | float) and 0 < value < LAST_MOMENT else None


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32; struct.error if one does not fit."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def unpack_tokens(blob: bytes | None) -> tuple[int, ...]:
    """The inverse of `pack_tokens`; empty if they were not kept."""
    return () if blob is None else struct.unpack(f"<{len(blob) // 4}i", blob)


def pack_floats(values: Sequence[float] | None) -> bytes | None:
    """Floats as little-endian float64, every bit kept."""
    return None if values is None else struct.pack(f"<{len(values)}d", *values)


def unpack_floats(blob: bytes | None) -> tuple[float, ...] | None:
    """The inverse of `pack_floats`."""
    return None if blob is None else struct.unpack(f"<{len(blob) // 8}d", blob)


def pack_singles(values: Sequence[float] | None) -> bytes | None:
    """Floats as little-endian float32; exact for values that were computed in float32."""
    return None if values is None else struct.pack(f"<{len(values)}f", *values)


def unpack_singles(blob: bytes | None) -> tuple[float, ...] | None:
    """The inverse of `pack_singles`."""
    return None if blob is None else struct.unpack(f"<{len(blob) // 4}f", blob)


def to_signed(seed: int | None) -> int | None:
    """An unsigned 64-bit number as the signed one with the same bits; OverflowError beyond 64 bits."""
    return None if seed is None else int.from_bytes(seed.to_bytes(8, "big"), "big", signed=True)


def to_unsigned(stored: int | None) -> int | None:
    """The inverse of `signed`."""
    return None if stored is None else stored % 2**64


def number(value: float | None) -> float | str | None:
    """The value for SQLite; a NaN becomes the text "nan", because SQLite would store it as NULL, which means "none" here."""
    return "nan" if value is not None and math.isnan(value) else value


def plain_number(stored: float | str | None) -> float | None:
    """The inverse of `number`."""
    if stored is None or isinstance(stored, int | float):
        return None if stored is None else float(stored)
    if stored != "nan":
        raise _foreign_value(stored, "a number")
    return math.nan


def text(value: str | None) -> str | bytes | None:
    """Text unchanged; as a blob if it contains a lone surrogate, which UTF-8 cannot encode."""
    if value is None:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def plain_text(stored: str | bytes | None) -> str | None:
    """The inverse of `text`."""
    try:
        return stored.decode("utf-8", "surrogatepass") if isinstance(stored, bytes) else stored
    except UnicodeDecodeError:
        raise _foreign_value(stored, "text") from None


def label(name: str) -> str:
    """A name in a form that UTF-8 can encode; ordinary names stay unchanged."""
    return name.encode("utf-8", "backslashreplace").decode()


def pack_json(value: Any) -> str:
    """Any value as JSON. A value that JSON cannot hold becomes `{"__repr__": "<its repr>"}`; tuples read back as lists."""
    try:
        return json.dumps(value, default=_as_repr)
    except (TypeError, ValueError, RecursionError):
        if not isinstance(value, dict):
            return json.dumps(_as_repr(value))
    # Some value in the mapping has keys that are not strings, or contains itself: keep the other values.
    packed: dict[str, Any] = {}
    for name, column in cast("dict[object, object]", value).items():
        try:
            packed[str(name)] = json.loads(json.dumps(column, default=_as_repr))
        except (TypeError, ValueError, RecursionError):
            packed[str(name)] = _as_repr(column)
    return json.dumps(packed)


def unpack_json(stored: str) -> Any:
    """The inverse of `pack_json`."""
    try:
        return json.loads(stored)
    except (ValueError, TypeError):
        raise _foreign_value(stored, "JSON") from None


def unpack_mapping(stored: str) -> dict[str, Any]:
    """The inverse of `pack_json` for a mapping."""
    value = unpack_json(stored)
    if not isinstance(value, dict):
        raise _foreign_value(stored, "a JSON object")
    return cast("dict[str, Any]", value)


def _foreign_value(stored: Any, expected: str) -> StoreError:
    return StoreError(
        f"The run's record has {stored!r:.60} where {expected} belongs: another program has changed it, or it is damaged. Restore it from "
        "a copy; or move it away, and `groupwise rl --resume` makes it from the checkpoints."
    )


def _as_repr(value: Any) -> dict[str, str]:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a user's own class, whose repr may do anything
        text = object.__repr__(value)
    return {"__repr__": text[:LONGEST_REPR]}
