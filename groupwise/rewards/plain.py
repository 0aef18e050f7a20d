"""Values of user code as plain JSON values, so that they can be stored and sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast


def plain(value: Any) -> Any:
    """`value` made of dicts with text keys, lists, text, numbers, booleans and None only.

    Arrays, tensors and numpy scalars become lists and numbers, tuples and sets lists; NaN and infinities, which JSON does
    not have, become None; anything else becomes its `str`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(key): plain(entry) for key, entry in items}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in cast("list[Any]", value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(entry) for entry in cast("set[Any]", value)), key=repr)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
