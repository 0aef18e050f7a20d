"""Messages between the HTTP process and its engine: pickled, because the engine is the HTTP process's own child.

The HTTP process sends `Call`s, each answered by `Answered` or `Failed` with its id, in any order, and `Cancel` if the caller no longer
waits. The engine sends a `Beat` about every second from its event loop, whose silence means that the loop hangs, and `LogRecordMessage` for
what it logs. The first `Beat` says that it is ready; a `Failed` with the id `MAKING` before it, that it could not be made.

The content of each call or answer is pickled by itself, so that one that cannot be written or read spoils that call alone.
"""

from __future__ import annotations

import errno
import pickle
from dataclasses import dataclass
from typing import Any

from groupwise.core.errors import GroupwiseError, RunError, StoreError
from groupwise.core.plugins import explain
from groupwise.engine.distributed.messages import LogRecordMessage, MessageChannel
from groupwise.engine.models.memory import lacks_memory, out_of_memory

__all__ = [
    "CANCELLED_VERBS",
    "MAKING",
    "Answered",
    "Beat",
    "Call",
    "CallTimedOutError",
    "Cancel",
    "Failed",
    "LogRecordMessage",
    "MessageChannel",
    "pack",
    "pack_error",
    "unpack",
    "unpack_error",
]

MAKING = 0
"""Stands in for a call's id if the engine could not be made."""

CANCELLED_VERBS = frozenset(
    {
        "sample",
        "models.sample",
        "parts.generate",
        "partial",
        "token_texts",
        "metrics_of",
        "tokens_of",
        "tokenizer_files",
        "probe",
    }
)
"""Calls that change nothing: cancelled at their deadline, or once the caller no longer waits. All others would be left half done, so
they go on; if one of them outlasts its deadline, the engine is ended."""


class CallTimedOutError(RunError):
    """The engine is well, but this call was not done by its deadline and has been given up. Ask for less, or again."""

    code = "engine_call_timed_out"


@dataclass(frozen=True, slots=True)
class Call:
    """Have something done by the engine."""

    id: int
    verb: str
    """The name of a method of the engine, or of one of its parts (`models.sample`)."""
    deadline: float
    """Seconds of `time.monotonic`, which is the same for all processes of a machine."""
    body: bytes
    """Its arguments, a tuple, as `pack` writes them."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller no longer waits for that call."""

    id: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a call."""

    id: int
    body: bytes
    """Written by `pack`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The error raised by a call."""

    id: int
    error: bytes
    """Written by `pack_error`."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The engine's event loop turns."""

    progress: int
    """Calls begun and calls ended, together: it grows as long as work goes through."""
    busy: int
    """Calls under way."""


def pack(value: Any) -> bytes:
    """Pickle a value for the socket. Raises any error that pickling raises."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    return pickle.loads(data)


def pack_error(error: BaseException) -> bytes:
    """An error of ours as it is; any other one as a RunError that explains it, of the kind that lack of memory or disk space has."""
    if isinstance(error, GroupwiseError):
        try:
            written = pack(error)
            unpack(written)
        except Exception:  # noqa: BLE001 — user code may have derived one that refuses in any way
            return pack(RunError(f"The engine failed: {error}"))
        return written
    if lacks_memory(error):
        return pack(out_of_memory(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return pack(StoreError(f"The engine could not write: {error}"))
    return pack(RunError(f"The engine failed:\n{explain(error)}"))


def unpack_error(data: bytes) -> BaseException:
    """The inverse of `pack_error`."""
    try:
        return unpack(data)
    except Exception as error:  # noqa: BLE001 — its class may be known to the engine alone, and do anything when it is made
        return RunError(
            f"The engine failed, with an error that cannot be read here:\n{explain(error)}"
        )
