"""Recognises a request that is sent twice: by the key that its client gives it, and the hash of its body.

A client makes a key for each call (`new_idempotency_key`) and sends it again whenever it repeats the call, because it cannot know
whether the first attempt arrived. The server keeps key, `body_hash` and answer for a day, per caller and route: the same key with the
same body gets the same answer, with another body a refusal.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from groupwise.api.schemas.problems import Refusal

HEADER = "Idempotency-Key"
HEADERS = (HEADER, "X-Idempotency-Key")
"""Headers that may hold a key."""
LONGEST = 255
"""Maximum length of a key."""

_EXACT = 2**53
"""Whole numbers up to this one have the same value as float and as int."""


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """Identifies a request with an Idempotency-Key."""

    route: str
    """Method and path: `POST /rewards`."""
    key: str
    body_hash: str
    retries: int | None = None
    """How often the client has sent the request before, if the server made the key; None: its client made it."""


def new_idempotency_key() -> str:
    """A key that no other call has."""
    return secrets.token_hex(16)


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """The key of a request; None if it has none. Raises `invalid_request` if the key is invalid, or if there are two."""
    lower_headers = {name.lower(): value for name, value in headers.items()}
    keys = {lower_headers[name.lower()] for name in HEADERS if name.lower() in lower_headers}
    if not keys:
        return None
    key = keys.pop()
    if keys:
        raise _invalid_key(f"differs from {HEADERS[1]}; send one of the two")
    if (problem := key_problem(key)) is not None:
        raise _invalid_key(problem)
    return key


def key_problem(key: str) -> str | None:
    """Why this is not a valid key, e.g. `has 0 characters …`; None if it is valid."""
    if not 1 <= len(key) <= LONGEST:
        return f"has {len(key)} characters; a key has 1 to {LONGEST}"
    if not all(" " <= letter <= "~" for letter in key):
        return "has characters that are not printable ASCII"
    return None


def body_hash(body: bytes) -> str:
    """A hash that is equal for equivalent bodies: the order of keys, white space, and 1 or 1.0 do not matter."""
    try:
        canonical = json.dumps(
            _with_whole_numbers(json.loads(body)), sort_keys=True, separators=(",", ":")
        )
    except (ValueError, RecursionError):  # no JSON, or nested too deep to be read: unchanged
        return hashlib.sha256(b"bytes:" + body).hexdigest()
    return hashlib.sha256(b"json:" + canonical.encode()).hexdigest()


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {
            key: _with_whole_numbers(item) for key, item in cast("dict[str, Any]", value).items()
        }
    return value


def _invalid_key(problem: str) -> Refusal:
    detail = f"The header {HEADER} {problem}."
    return Refusal("invalid_request", detail, field=HEADER, problem=problem)
