"""Validation of texts: whether a database can store them, JSON can carry them and a program can receive them as an argument.

Two things cannot be passed on: NUL, which ends a string for PostgreSQL and for every program, and lone surrogates, into which Python
decodes bytes that are not UTF-8 (an argument or a file name in another encoding). The refusal of such a text states its position. Rows
written by hand may hold them all the same, and infinite numbers, which JSON cannot express either: `json_safe` replaces them by displayable
values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from groupwise.api.schemas.problems import Refusal

MAX_PROBLEMS = 10
"""Maximum problems listed in one refusal."""

_NOT_PASSABLE = re.compile("[\0\ud800-\udfff]")


def text_problems(value: Any, path: str) -> Iterator[str]:
    """Yield a message for each text in a document, including keys, that cannot be passed on, with its path."""
    if isinstance(value, str):
        if (match := _NOT_PASSABLE.search(value)) is not None:
            description = "a NUL character" if match[0] == "\0" else "bytes that are not UTF-8"
            yield f"{path}: {description} at position {match.start()}; text without it is wanted"
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[Any, Any]", value).items():
            name = ascii(key)[1:-1][:80] if isinstance(key, str) else str(key)
            yield from text_problems(key, f"{path}.{name}" if path else name)
            yield from text_problems(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for number, inner in enumerate(cast("Sequence[Any]", value)):
            yield from text_problems(inner, f"{path}.{number}")


def require_passable(*names: str, **given: Any) -> None:
    """Raise `invalid_request` unless all values can be passed on. `names`: the names as the user typed them."""
    named_values = [*((ascii(name)[:80], name) for name in names), *given.items()]
    problems = [problem for place, value in named_values for problem in text_problems(value, place)]
    if problems:
        raise Refusal("invalid_request", "; ".join(problems[:MAX_PROBLEMS]) + ".")


def json_safe(value: Any) -> Any:
    """Replace values that JSON cannot express: NaN and infinities by null, lone surrogates by `?`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {json_safe(k): json_safe(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in cast("Sequence[Any]", value)]
    return value
