"""Values of user code as plain JSON values, so that they can be stored and sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from groupwise.core.plugins import printable

_LONGEST_INTEGER = 1024
"""Bits; readers of JSON and Python itself refuse to write out much longer ones."""


def plain(value: Any) -> Any:
    """`value` made of dicts with text keys, lists, text, numbers, booleans and None only.

    Arrays, tensors and numpy scalars become lists and numbers, tuples and sets lists; NaN and infinities, which JSON does
    not have, become None; anything else becomes its `str`. Text that no encoding can write is escaped, and
    an integer beyond all floats is written in hexadecimal.
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
