"""The terms of requests and answers: refusals, and checks of JSON, fields and hashes. A request comes from outside, and a job may have
written any record, so nothing is believed unchecked."""

from __future__ import annotations

import gc
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, NoReturn, Protocol

    class Readable(Protocol):
        """Anything that a blob can be read from."""

        def read(self, most: int, /) -> bytes:
            """Read at most that many bytes; none at the end."""
            ...

    Answered = tuple[dict[str, Any], bytes]

PROTOCOL = 1
SPOKEN = (1,)
"""Protocols whose requests are answered and whose folders are understood."""
SHA256 = re.compile(r"[0-9a-f]{64}")
GPU_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")
LONGEST_WORD = 4096


class Refusal(Exception):
    """The request is not carried out, and nothing was changed."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.body: dict[str, Any] = {"code": code, "message": message, **more}


class Refused(Exception):
    """A launch that is not possible; it becomes the record of its epoch."""

    def __init__(self, code: str, message: str, holder: str | None = None) -> None:
        super().__init__(message)
        self.record: dict[str, Any] = {"code": code, "message": message}
        if holder:
            self.record["holder"] = holder


NO_JSON = (ValueError, RecursionError, MemoryError)
"""Errors that `parse_json` raises for hostile text."""


def parse_json(data: bytes) -> Any:
    """Parse JSON that a job may have written. The garbage collector is off meanwhile: a million lists would trigger it over and over.

    Only UTF-8 is accepted: for bytes that look like another encoding Python would import a codec."""
    gc.disable()
    try:
        text = data.decode("utf-8")
        return json.loads(text, parse_int=whole_number, parse_constant=no_number)
    finally:
        gc.enable()


def whole_number(digits: str) -> int:
    """Parse an integer of at most 20 digits, about 64 bits: reading one of a million digits takes minutes."""
    if len(digits) > 20:
        raise ValueError("a number of that many digits")
    return int(digits)


def no_number(name: str) -> NoReturn:
    """Reject NaN and the like, which are not JSON."""
    raise ValueError(name)


def as_object(value: Any) -> dict[str, Any] | None:
    """A JSON object; None for all else."""
    return value if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType]


def as_list(value: Any) -> list[Any]:
    """A JSON list; empty for all else."""
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def as_bytes(document: dict[str, Any]) -> bytes:
    """Encode as JSON in ASCII, which holds any text, even a lone surrogate."""
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def text_of(body: dict[str, Any], name: str) -> str:
    """A field that must be text."""
    value = body[name]
    if not isinstance(value, str):
        raise Refusal("bad_request", f"{name}: text is expected")
    return value


def count_of(body: dict[str, Any], name: str, default: int | None = None) -> int:
    """A field that must be a whole number, not negative."""
    value = body.get(name, default)
    if type(value) is not int or value < 0:
        raise Refusal("bad_request", f"{name}: a whole number from 0 is expected")
    return value


def seconds_of(body: dict[str, Any], name: str, default: float) -> float:
    """A field that must be seconds."""
    value = body.get(name)
    if value is None:
        return default
    if not is_amount(value):
        raise Refusal("bad_request", f"{name}: seconds are expected")
    return float(value)


def is_count(value: Any, most: int = 1 << 62) -> bool:
    """True for a whole number from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def is_small(value: Any) -> bool:
    """True for a count that fits into 31 bits."""
    return is_count(value, (1 << 31) - 1)


def is_word(value: Any) -> bool:
    """True for a text of at most LONGEST_WORD characters."""
    return isinstance(value, str) and len(value) <= LONGEST_WORD


def are_words(value: Any) -> bool:
    """True for a list of texts, each of at most LONGEST_WORD characters."""
    return isinstance(value, list) and all(map(is_word, as_list(value)))


def is_amount(value: Any) -> bool:
    """True for a number from 0 to 1e12."""
    return type(value) in (int, float) and 0 <= value < 1e12


def is_sha(value: Any) -> bool:
    """True for a SHA-256 in lower-case hex."""
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


def is_utf8(text: str) -> bool:
    """False for a text with lone surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def shas_of(body: dict[str, Any], name: str) -> list[str]:
    """A list of hashes from a request. Raises Refusal `bad_request`."""
    found = [str(sha) for sha in body[name]]
    if not all(SHA256.fullmatch(sha) for sha in found):
        raise Refusal("bad_request", f"{name}: sha256 in hex are expected")
    return found


def gpus_of(body: dict[str, Any]) -> list[str]:
    """GPU UUIDs of a request, by which locks are named. Raises Refusal `bad_request`."""
    found = [str(uuid) for uuid in body.get("gpus") or ()]
    if not all(GPU_UUID.fullmatch(uuid) for uuid in found):
        raise Refusal("bad_request", "gpus: UUIDs as nvidia-smi shows them are expected")
    return found


def arguments_of(value: object) -> list[str]:
    """Check an argument list. Raises Refusal `bad_request`."""
    found: list[str] = []
    for item in as_list(value):
        if not isinstance(item, str) or "\0" in item:
            raise Refusal("bad_request", "an argument list holds texts without NUL")
        found.append(item)
    if not found or not found[0]:
        raise Refusal("bad_request", "an argument list with at least a program is expected")
    return found


class Work:
    """Counts the work that a request has done, for signs of life: a disk that hangs adds none."""

    done = 0


def lines_of(error: BaseException) -> str:
    """Line numbers of this file that an error came through."""
    found: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        found.append(str(trace.tb_lineno))
        trace = trace.tb_next
    return ", ".join(found[1:])
