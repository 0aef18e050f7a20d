"""The seam between the control side and a machine: one call, in either direction plain data.

`Host` is what carries a request to the runner of one machine and its answer back. There are three: over SSH (`ssh.py`), as a process of
this machine (`local.py`), and a fake for tests (`testing/fake_hosts.py`). `driver.py` makes typed calls of it.

What an error means decides whether a job may run twice, so there are two for a call that gave no answer: `HostUnreachable` (nothing of
the request was sent, so nothing happened) and `OutcomeUnknown` (it may have happened: ask the same machine, with the same epoch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class HostError(Exception):
    """A call to a machine gave no answer that could be used."""


class HostUnreachable(HostError):
    """No connection; nothing was sent."""


class OutcomeUnknown(HostError):
    """The request may have arrived; the answer did not."""


class HostKeyError(HostError):
    """The machine showed another key than the pinned one, or none is pinned. `seen` is the one it showed, as `type base64`."""

    def __init__(self, message: str, seen: str | None = None) -> None:
        super().__init__(message)
        self.seen = seen


class RunnerRefused(HostError):
    """The runner answered that it will not; nothing was changed. `code` is one word, as `bad_request`, `protocol`, `disk_full`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


USUAL_BODY = 8 << 20
"""Bytes. It is read where all machines are heard: of so many that takes a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the runner is asked. `verb` and `body` as described in `runner.py`."""

    verb: str
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    payload: bytes = b""
    """Raw bytes after the body: blobs, for `put`."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Travel with the body and stand in no log."""
    longest: float | None = None
    """Seconds for the whole call, where the runner says every few seconds that it gets on: the time limit is for its silence then."""
    most_body: int = USUAL_BODY
    """Bytes of the answer's body, at most: a machine is not believed about how much is to be kept of it."""
    most_payload: int = 0
    """Raw bytes after it, at most: as many as were asked for."""


@dataclass(frozen=True, slots=True)
class RunnerResponse:
    """What the runner answered."""

    body: Mapping[str, Any]
    payload: bytes = b""


class Host(Protocol):
    """One machine, as the control side reaches it. Several calls may be under way at once."""

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        """Ask the runner. `timeout` in seconds, for the whole call unless `request.longest` is.

        Raises HostUnreachable, OutcomeUnknown, HostKeyError or RunnerRefused.
        """
        ...

    async def close(self) -> None:
        """End the connection, if there is one; calls under way end as OutcomeUnknown."""
        ...
