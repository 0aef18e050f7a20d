"""Counts each key's requests since the server began, with its last request and last failure.

Polling is not work: a dashboard does it each second, under the key of those whose requests it shows. So `LOOKS` are not
counted, and neither are requests that take no key, such as health checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from groupwise.api.http.caller import Caller
from groupwise.api.schemas.keys import Role

LOOKS = frozenset({"GET /status", "GET /activity", "GET /metrics"})
"""Routes that tell how a server is doing."""


@dataclass(slots=True)
class Seen:
    """The record of one key's requests."""

    key_id: str
    role: Role
    last: float
    """When their last request was answered, in seconds of the clock."""
    requests: int = 0
    refused: int = 0
    last_request: str = ""
    last_problem: str | None = None


class Clients:
    """All of them; as many as there are keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seen: dict[str, Seen] = {}

    def note(self, caller: Caller, request: str, code: str) -> None:
        """A request of theirs was answered; `code` of the problem, if it was one. `LOOKS` are passed over."""
        if request in LOOKS:
            return
        now = self.clock()
        seen = self._seen.setdefault(caller.key_id, Seen(caller.key_id, caller.role, now))
        seen.role, seen.last, seen.last_request = caller.role, now, request
        seen.requests += 1
        if code:
            seen.refused += 1
            seen.last_problem = code

    def all(self) -> list[Seen]:
        """The last first."""
        return sorted(self._seen.values(), key=lambda seen: -seen.last)
