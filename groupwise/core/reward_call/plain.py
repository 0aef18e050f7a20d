"""Converts values of user code to plain JSON values, which can be stored and sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from groupwise.core.plugins import printable

_LONGEST_INTEGER = 1024
"""Maximum number of bits: readers of JSON, and Python itself, refuse much longer integers."""


def plain(value: Any) -> Any:
    """`value` with only dicts with text keys, lists, text, numbers, booleans and None.

    Arrays, tensors and numpy scalars become lists and numbers, tuples and sets lists. NaN and infinities, which JSON does
    not have, become None; any other object becomes its `str`. Text that no encoding can write is escaped, and
    an integer of more than 1024 bits becomes hexadecimal text.
    """
    if value is None:
        return None
    if isinstance(value, int):
        return value if value.bit_length() <= _LONGEST_INTEGER else hex(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {printable(str(key)): plain(entry) for key, entry in items}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in cast("list[Any]", value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(entry) for entry in cast("set[Any]", value)), key=repr)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return printable(str(value))
