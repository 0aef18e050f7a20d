"""Strict JSON: refuses what other readers silently accept.

A duplicate key, NaN, a number beyond the range of a float, half of a surrogate pair, and nesting that no request needs would all
be read by the standard library, and would mean something else to the next reader, or break it. Millions of small lists or texts, each of
which takes more memory than what was sent, are refused before they are made.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from itertools import islice
from typing import Any

DEEPEST = 64
"""Lists and objects inside each other, at most; the deepest request has a dozen."""

MOST_LISTS, MOST_TEXTS = 500_000, 2_000_000
"""Lists and objects of a body together, and its texts; numbers stand in long lists and may be as many as there is room for."""
MOST_KEYS = 100_000
"""Limit on one object's keys, because each unknown one is reported."""
LARGE = 256 * 1024
"""Bytes that are read beside everything else."""

# A text that is never closed matches to its end, or each of its quotes would be tried as the beginning of one.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_BRACKET_OR_TEXT = re.compile(rb'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class NotStrict(json.JSONDecodeError):
    """The body is not JSON, or not of the strict kind."""

    def __init__(self, message: str, position: int = 0) -> None:
        super().__init__(message, "", position)


def parse(text: bytes) -> Any:
    """The value. Raises NotStrict, which repeats nothing of the text."""
    check_number(text, MOST_LISTS, MOST_TEXTS)
    _check_depth(text)
    try:
        value = json.loads(
            text.decode("utf-8"),
            parse_float=finite,
            parse_constant=no_constant,
            object_pairs_hook=once_each,
        )
    except UnicodeDecodeError as error:
        raise NotStrict("the body is not UTF-8", error.start) from None
    except NotStrict:
        raise
    except json.JSONDecodeError as error:
        raise NotStrict(error.msg, error.pos) from None
    except ValueError:  # Python's limit of digits
        raise NotStrict("a whole number has too many digits") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise NotStrict("a text has half of a surrogate pair") from None
    return value


def parse_inner(text: str) -> Any:
    """The value of JSON that stands in a text, as the arguments of a call do: within the same bounds, read as usual. Raises NotStrict."""
    encoded = text.encode("utf-8", "surrogatepass")
    check_number(encoded, MOST_LISTS, MOST_TEXTS)
    _check_depth(encoded)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise NotStrict(error.msg, error.pos) from None
    except ValueError:  # Python's limit of digits
        raise NotStrict("a whole number has too many digits") from None


async def parse_aside(text: bytes) -> Any:
    """See `parse`; runs in a thread if the body is large."""
    return await asyncio.to_thread(parse, text) if len(text) > LARGE else parse(text)


def check_number(text: bytes, lists: int, texts: int) -> None:
    """Raises NotStrict for JSON with more lists and objects, or more texts, before any of them is made."""
    beyond = islice(_TEXT.finditer(text), texts, None)
    if text.count(b'"') > 2 * texts and next(beyond, None) is not None:
        raise NotStrict(f"there are more than {texts:,} texts in it")
    if text.count(b"[") + text.count(b"{") > lists:
        bare = _TEXT.sub(b"", text)
        if bare.count(b"[") + bare.count(b"{") > lists:
            raise NotStrict(f"there are more than {lists:,} lists and objects in it")


def _check_depth(text: bytes) -> None:
    if text.count(b"[") + text.count(b"{") <= DEEPEST:
        return
    depth = 0
    for match in _BRACKET_OR_TEXT.finditer(text):
        first = match[0][:1]
        depth += (first in b"[{") - (first in b"]}")
        if depth > DEEPEST:
            raise NotStrict(f"lists and objects are nested more than {DEEPEST} deep", match.start())


def finite(text: str) -> float:
    """`parse_float` of `json.loads`: a number beyond a double is none."""
    value = float(text)
    if not math.isfinite(value):
        raise NotStrict("a number is beyond the range of a double")
    return value


def no_constant(name: str) -> Any:
    """`parse_constant`: NaN and Infinity are no JSON."""
    raise NotStrict(f"{name} is no number of JSON")


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook`: no key stands twice, and there are not more than MOST_KEYS."""
    if len(pairs) > MOST_KEYS:
        raise NotStrict(f"an object has more than {MOST_KEYS:,} keys")
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotStrict("a key stands twice in an object")
    return found
