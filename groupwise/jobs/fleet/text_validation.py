"""What can be passed on: text that a database keeps, JSON carries and a program can be given as an argument.

Two things cannot: NUL, which ends a string for PostgreSQL and for every program, and half a character, which is what Python makes of bytes
that are no UTF-8 (an argument or a file's name in another encoding). Whoever submits such a thing is told where it stands.

Rows by hand may hold them all the same, and numbers beyond all bounds, which JSON cannot say either: `json_safe` is what can be told then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from groupwise.api.schemas.problems import Refusal

MOST_PROBLEMS = 10
"""That one refusal tells."""

_NOT_PASSABLE = re.compile("[\0\ud800-\udfff]")


def text_problems(value: Any, place: str) -> Iterator[str]:
    """What of a document cannot be passed on, by its place in it; keys as well."""
    if isinstance(value, str):
        if (found := _NOT_PASSABLE.search(value)) is not None:
            what = "a NUL character" if found[0] == "\0" else "bytes that are no UTF-8"
            yield f"{place}: {what} at position {found.start()}; text without it is wanted"
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[Any, Any]", value).items():
            name = ascii(key)[1:-1][:80] if isinstance(key, str) else str(key)
            yield from text_problems(key, f"{place}.{name}" if place else name)
            yield from text_problems(inner, f"{place}.{name}" if place else name)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for number, inner in enumerate(cast("Sequence[Any]", value)):
            yield from text_problems(inner, f"{place}.{number}")


def require_passable(*names: str, **given: Any) -> None:
    """Raise `invalid_request` unless all of it can be passed on. `names`: as somebody typed them."""
    told = [*((ascii(name)[:80], name) for name in names), *given.items()]
    wrong = [problem for place, value in told for problem in text_problems(value, place)]
    if wrong:
        raise Refusal("invalid_request", "; ".join(wrong[:MOST_PROBLEMS]) + ".")


def json_safe(value: Any) -> Any:
    """A document as JSON can say it: null for NaN and infinities, `?` for half a character."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {json_safe(k): json_safe(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in cast("Sequence[Any]", value)]
    return value
