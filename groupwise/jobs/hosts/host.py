"""The interface between the control side and a machine: one call, with plain data in both directions.

A `Host` carries a request to the runner of one machine, and the answer back. There are these implementations: over SSH (`ssh.py`), as a
process of this machine (`local.py`), through Modal (`clouds/modal/runner.py`), and a fake for tests (`tests/fake_hosts.py`). `driver.py`
builds typed calls on it.

The meaning of an error decides whether a job may run twice. So there are two errors for a call without an answer: `HostUnreachable` (no
part of the request was sent, so nothing happened) and `OutcomeUnknown` (it may have happened: ask the same machine, with the same
epoch)."""

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
    """The machine showed another key than the pinned one, or no key is pinned. `seen`: the key that it showed, as `type base64`."""

    def __init__(self, message: str, seen: str | None = None) -> None:
        super().__init__(message)
        self.seen = seen


class RunnerRefused(HostError):
    """The runner rejected the request, and nothing was changed. `code` is one word, such as `bad_request`, `protocol`, `disk_full`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


DEFAULT_MAX_BODY = 8 << 20
"""Default limit of an answer's body in bytes. Bodies are parsed on the event loop that serves all machines; this size takes a tenth of a
second."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the runner, with `verb` and `body` as described in `runner/protocol.py`."""

    verb: str
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    payload: bytes = b""
    """Raw bytes after the body: blobs, for `put`."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Values that are sent with the body and never logged."""
    longest: float | None = None
    """Limit of the whole call in seconds, if the runner sends signs of life; the timeout then limits only the time between them."""
    most_body: int = DEFAULT_MAX_BODY
    """Most bytes of the answer's body. The caller sets it, because a machine is not trusted to limit its answers."""
    most_payload: int = 0
    """Most raw bytes after the body: as many as the request asks for."""


@dataclass(frozen=True, slots=True)
class RunnerResponse:
    """The runner's answer."""

    body: Mapping[str, Any]
    payload: bytes = b""


class Host(Protocol):
    """One machine, as the control side reaches it. Several calls may be in progress at once."""

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        """Send a request to the runner. `timeout` in seconds limits the whole call; with `request.longest`, the time between signs of life.

        Raises HostUnreachable, OutcomeUnknown, HostKeyError or RunnerRefused."""
        ...

    async def close(self) -> None:
        """Close the connection, if there is one; calls in progress end with OutcomeUnknown."""
        ...
