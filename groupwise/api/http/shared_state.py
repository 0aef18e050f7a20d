"""State that the requests to one server share: limits, requests left to each key, what each key has done; and the facts of one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from groupwise.api.http.bodies import Bodies
from groupwise.api.http.prometheus import RequestMetrics
from groupwise.api.http.route import Route
from groupwise.api.schemas.keys import WORDS, Caller, Role
from groupwise.api.schemas.problems import Refusal

LOOKS = frozenset({"GET /status", "GET /activity", "GET /metrics"})
"""Routes that show the state of a server."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a server's requests."""

    max_body_bytes: int
    """Limit for one request."""
    requests_per_second: float | None = None
    """Long-run limit for each key; None: no limit."""
    burst: int = 50
    """Requests that a key may make at once before that counts."""
    max_json_bytes: int | None = None
    """Limit for a request whose body is JSON; None: as for any other."""


class Buckets:
    """How many requests each key has left: `burst` at once, and `per_second` more each second."""

    def __init__(
        self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        """Key id -> requests left, and when that was; ordered by last use, and without keys that have all of them again."""

    def take(self, key_id: str) -> float:
        """Take one; 0 if there was one, else the seconds until there is."""
        now = self._clock()
        full_since = now - self._burst / self._per_second
        while (oldest := next(iter(self._left), None)) and self._left[oldest][1] <= full_since:
            del self._left[oldest]
        left, since = self._left.pop(key_id, (float(self._burst), now))
        left = min(left + (now - since) * self._per_second, float(self._burst))
        enough = left >= 1
        self._left[key_id] = (left - 1 if enough else left, now)
        return 0.0 if enough else (1 - left) / self._per_second


@dataclass(slots=True)
class Seen:
    """The record of one key's requests."""

    key_id: str
    role: Role
    last: float
    """When the key's last request was answered, in seconds of the clock."""
    requests: int = 0
    refused: int = 0
    last_request: str = ""
    last_problem: str | None = None


class Clients:
    """The records of all keys that have sent a request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seen: dict[str, Seen] = {}

    def note(self, caller: Caller, request: str, code: str) -> None:
        """Record an answered request; `code`: of the problem, or empty. `LOOKS` are not counted."""
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
        """All records, the most recently active key first."""
        return sorted(self._seen.values(), key=lambda seen: -seen.last)


class Shared:
    """State shared by all requests to one server. Each kind of server has its own subclass."""

    role_words: Mapping[Role, str] = WORDS
    """Its words for the roles of its keys."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.metrics = RequestMetrics()
        self.clients = Clients()
        self.ending = asyncio.Event()
        """Set when the server has been asked to end."""
        self.bodies = Bodies(limits.max_body_bytes)
        json_bytes = limits.max_json_bytes
        self.json_bodies = self.bodies if json_bytes is None else Bodies(json_bytes)
        rate = limits.requests_per_second
        self._buckets = None if rate is None else Buckets(rate, limits.burst)

    def count(self, key_id: str) -> None:
        """Count a request of a key, in any protocol. Raises `rate_limited`."""
        if self._buckets is not None and (seconds := self._buckets.take(key_id)):
            raise Refusal("rate_limited", retry_after=seconds)

    def end(self) -> None:
        """Accept no new work, and none whose body is not complete."""
        self.ending.set()
        self.bodies.give_up()
        self.json_bodies.give_up()

    def refusal_of(self, error: Exception) -> Refusal | None:
        """The refusal to answer an error that a route let through; None: it is a mistake of ours."""
        del error
        return None

    async def refused(self, facts: Facts) -> None:
        """Called when a request was answered with a problem."""


@dataclass(slots=True)
class Facts:
    """Facts about a request, filled in on its way through the middleware."""

    request_id: str
    route: Route | None = None
    caller: Caller | None = None
    code: str = ""
    """Code of the problem that it is answered with."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers of a refusal, beside those that every refusal has."""

    @property
    def instance(self) -> str:
        """Id of the request in the problem and the log."""
        return f"urn:groupwise:request:{self.request_id}"


SCOPE = "groupwise.facts"
"""Key of the facts in the scope of a request."""


def facts_of(scope: Any) -> Facts:
    """Facts that the middleware has put into the scope."""
    return cast("Facts", scope[SCOPE])
