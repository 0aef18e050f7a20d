"""Messages between the HTTP process and its engine: pickled, because the engine is the HTTP process's own child.

The HTTP process sends `Call`s, each answered by `Answered` or `Failed` with its id, in any order, and `Cancel` if the caller no longer
waits. The engine sends a `Beat` about every second from its event loop (silence means that the loop hangs) and a `LogRecordMessage` for
each of its log records. The first `Beat` means that the engine is ready; a `Failed` with the id `MAKING` before it means that the engine
could not be created. The content of each call or answer is pickled separately, so content that cannot be written or read fails only that
call.
"""

from __future__ import annotations

import errno
import pickle
from dataclasses import dataclass
from typing import Any

from groupwise.core.errors import GroupwiseError, RunError, StoreError
from groupwise.core.plugins import explain
from groupwise.engine.distributed.messages import LogRecordMessage, MessageChannel
from groupwise.engine.models.memory import is_out_of_memory, out_of_memory

__all__ = [
    "CANCELLED_METHODS",
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
"""Used as the call's id if the engine could not be created."""

CANCELLED_METHODS = frozenset(
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
"""Calls that change nothing: they are cancelled at their deadline, or once the caller no longer waits. Cancelling any other call would
leave it half done, so it continues; if it outlasts its deadline, the engine is killed.
"""


class CallTimedOutError(RunError):
    """The engine is healthy, but this call was not done by its deadline and was cancelled. A smaller request may succeed."""

    code = "engine_call_timed_out"


@dataclass(frozen=True, slots=True)
class Call:
    """A request to run one method of the engine."""

    id: int
    method: str
    """The name of a method of the engine, or of one of its parts (`models.sample`)."""
    deadline: float
    """A time of `time.monotonic` in seconds; that clock is the same for all processes of a machine."""
    body: bytes
    """The tuple of arguments, written by `pack`."""


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
    """Sign that the engine's event loop runs."""

    progress: int
    """Number of calls started plus number of calls ended: it grows as long as there is progress."""
    busy: int
    """Number of calls in progress."""


def pack(value: Any) -> bytes:
    """Pickle a value for the socket. Raises any error that pickling raises."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    return pickle.loads(data)


def pack_error(error: BaseException) -> bytes:
    """Pickle an error. A GroupwiseError stays as it is; any other becomes a RunError that explains it, or the specific error for lack of
    memory or disk space.
    """
    if isinstance(error, GroupwiseError):
        try:
            packed = pack(error)
            unpack(packed)
        except Exception:  # noqa: BLE001 — user code may have derived a class whose pickling fails in any way
            return pack(RunError(f"The engine failed: {error}"))
        return packed
    if is_out_of_memory(error):
        return pack(out_of_memory(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return pack(StoreError(f"The engine could not write: {error}"))
    return pack(RunError(f"The engine failed:\n{explain(error)}"))


def unpack_error(data: bytes) -> BaseException:
    """The inverse of `pack_error`."""
    try:
        return unpack(data)
    except Exception as error:  # noqa: BLE001 — only the engine may know its class, and unpickling may raise anything
        return RunError(
            f"The engine failed, with an error that cannot be read here:\n{explain(error)}"
        )
