"""Strict JSON: refuses input that other readers silently accept.

The standard library would read a duplicate key, NaN, a number beyond the range of a float, a lone surrogate, and nesting that
no request needs; the next reader would understand them differently, or fail. Millions of small lists or texts, each of
which takes more memory than its bytes in the body, are refused before they are created.

A large body is parsed in a thread (`bodies.read_body`), and no piece of the work holds the interpreter for long, so the event loop answers
other clients meanwhile: the entries of a body are limited, its texts and brackets are counted in a loop of Python, between whose rounds
other threads run, and long lists of numbers are read in slices. A regular expression over the whole body would hold them up for seconds.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

DEEPEST = 64
"""Maximum nesting of lists and objects; the deepest request has a dozen levels."""

MAX_LISTS, MAX_TEXTS = 300_000, 2_000_000
"""Limits for a body: its lists and objects together, and its texts. The largest body of rewards has 256 groups of 1024 lists of tokens."""
MAX_ENTRIES = 4_000_000
"""Limit on the entries of all lists and objects together. Lists of numbers with 8 bytes each reach the limit of the body's bytes first.
"""
MAX_KEYS = 10_000
"""Limit on one object's keys: each unknown one is a mistake that validation notes, for about ten microseconds."""
MAX_KEYS_IN_ALL = 300_000
"""Limit on the keys of all objects of a body together, counted before they are parsed: a million would hold up others for half a second."""
SLICE = 128 * 1024
"""Bytes of a list of numbers that are parsed at one go, which takes about two milliseconds."""

# A text that is never closed matches to its end, or each of its quotes would be tried as the beginning of one.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_TEXT_OR_KEY = re.compile(_TEXT.pattern + rb"[ \t\n\r]*+(:?)", re.DOTALL)
_BRACKET_OR_TEXT = re.compile(rb'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_LONG_LIST_OR_TEXT = re.compile(
    rb'\[[^\[\]{}"]{%d,}+\]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?+' % SLICE, re.DOTALL
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class NotStrict(json.JSONDecodeError):
    """The body is not JSON, or not strict JSON."""

    def __init__(self, message: str, position: int = 0) -> None:
        super().__init__(message, "", position)


def parse(text: bytes, max_keys: int = MAX_KEYS) -> Any:
    """The value. Raises NotStrict, whose message repeats nothing of the text. `max_keys`: limit on one object's keys."""
    _check_entries(text)
    _check_keys(text)
    check_number(text, MAX_LISTS, MAX_TEXTS, DEEPEST)
    with _explaining_json_errors():
        value = (
            _load_in_slices(text, max_keys)
            if text.count(b",") > SLICE
            else _load(text, max_keys=max_keys)
        )
    refuse_lone_surrogates(text, value)
    return value


@contextmanager
def _explaining_json_errors() -> Generator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise NotStrict("the body is not UTF-8", error.start) from None
    except NotStrict:
        raise
    except json.JSONDecodeError as error:
        raise NotStrict(error.msg, error.pos) from None
    except ValueError:  # Python's limit of digits
        raise NotStrict("a whole number has too many digits") from None


def refuse_lone_surrogates(text: bytes, value: Any) -> None:
    """Refuse a value that was read from this JSON, if a text in it has half of a surrogate pair, which nothing can encode."""
    if _SURROGATE.search(text):  # `json.loads` accepts them, but only where they are escaped
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise NotStrict("a text has half of a surrogate pair") from None


def _load(
    text: bytes, parse_float: Callable[[str], Any] | None = None, max_keys: int = MAX_KEYS
) -> Any:
    return json.loads(
        text.decode("utf-8"),
        parse_float=parse_float or finite,
        parse_constant=no_constant,
        object_pairs_hook=partial(refuse_duplicate_keys, max_keys=max_keys),
    )


def _load_in_slices(text: bytes, max_keys: int) -> Any:
    """Parse the text. Long lists of numbers and JSON names are read first, in slices; a placeholder number replaces each in the rest."""
    nonce = f"0.{secrets.randbits(96)}"  # the body cannot know it
    lists: list[list[Any]] = []
    rest: list[bytes] = []
    end = 0
    for match in _LONG_LIST_OR_TEXT.finditer(text):
        if text[match.start()] == ord("["):
            rest += text[end : match.start()], f"{nonce}e{len(lists)}".encode()
            lists.append(_load_list(text, match.start() + 1, match.end() - 1))
            end = match.end()
    rest.append(text[end:])

    def list_or_number(number: str) -> Any:
        prefix, _, index = number.partition("e")
        return lists[int(index)] if prefix == nonce else finite(number)

    return _load(b"".join(rest), list_or_number if lists else None, max_keys)


def _load_list(text: bytes, start: int, end: int) -> list[Any]:
    """The entries between two offsets, which are the brackets of a list of numbers and names of JSON."""
    values: list[Any] = []
    while start <= end:
        comma = text.find(b",", min(start + SLICE, end), end)
        stop = end if comma < 0 else comma
        entries = text[start:stop]
        if not entries.strip():
            raise NotStrict("Expecting value", start)
        values += _load(b"[" + entries + b"]")
        start = stop + 1
    return values


def parse_inner(text: str, *, finite_alone: bool = False) -> Any:
    """The value of JSON inside a text, e.g. the arguments of a tool call: with the same limits, but keys may stand twice. NaN and infinite
    numbers are accepted, unless `finite_alone`. Raises NotStrict.
    """
    encoded = text.encode("utf-8", "surrogatepass")
    check_number(encoded, MAX_LISTS, MAX_TEXTS, DEEPEST)
    numbers: dict[str, Any] = (
        {"parse_float": finite, "parse_constant": no_constant} if finite_alone else {}
    )
    with _explaining_json_errors():
        value = json.loads(text, **numbers)
    refuse_lone_surrogates(encoded, value)
    return value


def check_number(text: bytes, lists: int, texts: int, deepest: int | None = None) -> None:
    """Raises NotStrict if JSON has more lists and objects, or more texts, than allowed, or is nested deeper; counts without parsing."""
    if text.count(b'"') > 2 * texts:
        for number, _ in enumerate(_TEXT.finditer(text), 1):
            if number > texts:
                raise NotStrict(f"there are more than {texts:,} texts in it")
    if text.count(b"[") + text.count(b"{") <= (lists if deepest is None else min(lists, deepest)):
        return
    opened = depth = 0
    for match in _BRACKET_OR_TEXT.finditer(text):
        first = text[match.start()]
        if first in b"[{":
            opened, depth = opened + 1, depth + 1
            if opened > lists:
                raise NotStrict(f"there are more than {lists:,} lists and objects in it")
            if deepest is not None and depth > deepest:
                raise NotStrict(
                    f"lists and objects are nested more than {deepest} deep", match.start()
                )
        elif first in b"]}":
            depth -= 1


def _check_entries(text: bytes) -> None:
    """Raises NotStrict for more than MAX_ENTRIES entries; each but the first of its list follows a comma."""
    commas = text.count(b",")
    if commas < MAX_ENTRIES:
        return
    for match in _TEXT.finditer(text):
        commas -= text.count(b",", *match.span())
        if commas < MAX_ENTRIES:
            return
    raise NotStrict(
        f"there are more than {MAX_ENTRIES:,} entries in its lists and objects; send them in several requests"
    )


def _check_keys(text: bytes) -> None:
    """Raises NotStrict for more than MAX_KEYS_IN_ALL keys; a key is a text before a colon."""
    if text.count(b":") <= MAX_KEYS_IN_ALL:
        return
    keys = 0
    for match in _TEXT_OR_KEY.finditer(text):
        keys += match.end(1) > match.start(1)
        if keys > MAX_KEYS_IN_ALL:
            raise NotStrict(f"its objects have more than {MAX_KEYS_IN_ALL:,} keys together")


def finite(text: str) -> float:
    """The `parse_float` of `json.loads`: refuses a number beyond the range of a double."""
    value = float(text)
    if not math.isfinite(value):
        raise NotStrict("a number is beyond the range of a double")
    return value


def no_constant(name: str) -> Any:
    """The `parse_constant` of `json.loads`: refuses NaN and Infinity, which are not JSON."""
    raise NotStrict(f"{name} is not a number of JSON")


def refuse_duplicate_keys(pairs: list[tuple[str, Any]], max_keys: int = MAX_KEYS) -> dict[str, Any]:
    """The object as a dict; `json.loads` calls it as its `object_pairs_hook`. Raises NotStrict for duplicate keys and for too many."""
    if len(pairs) > max_keys:
        raise NotStrict(f"an object has more than {max_keys:,} keys")
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise NotStrict("a key is repeated in an object")
    return mapping
