"""The seam between the control side and a machine: one call, with plain data in both directions.

A `Host` carries a request to the runner of one machine, and the answer back. There are three: over SSH (`ssh.py`), as a process of this
machine (`local.py`), and a fake for tests (`tests/fake_hosts.py`). `driver.py` builds typed calls on it.

The meaning of an error decides whether a job may run twice, so there are two for a call without an answer: `HostUnreachable` (nothing of
the request was sent, so nothing happened) and `OutcomeUnknown` (it may have happened: ask the same machine, with the same epoch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class HostError(Exception):
    """A call to a machine gave no usable answer."""


class HostUnreachable(HostError):
    """No connection; nothing was sent."""


class OutcomeUnknown(HostError):
    """The request may have arrived; the answer did not."""


class HostKeyError(HostError):
    """The machine showed another key than the pinned one, or none is pinned. `seen` is the key that it showed, as `type base64`."""

    def __init__(self, message: str, seen: str | None = None) -> None:
        super().__init__(message)
        self.seen = seen


class RunnerRefused(HostError):
    """The runner refused, and nothing was changed. `code` is one word, such as `bad_request`, `protocol`, `disk_full`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


USUAL_BODY = 8 << 20
"""Bytes. Bodies are parsed on the event loop that serves all machines; this many take a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the runner, with `verb` and `body` as described in `runner/protocol.py`."""

    verb: str
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    payload: bytes = b""
    """Raw bytes after the body: blobs, for `put`."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Values that travel with the body and stand in no log."""
    longest: float | None = None
    """Seconds for the whole call, if the runner sends signs of life; the timeout then limits only its silence."""
    most_body: int = USUAL_BODY
    """Most bytes of the answer's body: a machine is not trusted to say how much of it to keep."""
    most_payload: int = 0
    """Most raw bytes after the body: as many as were asked for."""


@dataclass(frozen=True, slots=True)
class RunnerResponse:
    """The runner's answer."""

    body: Mapping[str, Any]
    payload: bytes = b""


class Host(Protocol):
    """One machine, as the control side reaches it. Several calls may be under way at once."""

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        """Send a request to the runner. `timeout` in seconds limits the whole call; if `request.longest` is given, only the silence.

        Raises HostUnreachable, OutcomeUnknown, HostKeyError or RunnerRefused."""
        ...

    async def close(self) -> None:
        """End the connection, if there is one; calls under way end as OutcomeUnknown."""
        ...
