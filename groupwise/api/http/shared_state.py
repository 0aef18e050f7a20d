"""State that all requests to a server share (limits, rate limit and activity of each key), and the facts of one request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from groupwise.api.http.bodies import Bodies
from groupwise.api.http.prometheus import RequestMetrics
from groupwise.api.schemas.keys import WORDS, Caller, Role
from groupwise.api.schemas.problems import Refusal

if TYPE_CHECKING:  # it needs FastAPI, which the dashboard does not install
    from groupwise.api.http.route import Route

STATUS_ROUTES = frozenset({"GET /status", "GET /activity", "GET /metrics"})
"""Routes that only show the state of a server."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a server's requests."""

    max_body_bytes: int
    """The largest body of a request."""
    requests_per_second: float | None = None
    """Long-term rate limit for each key; None: no limit."""
    burst: int = 50
    """Requests that a key may make at once before the rate limit applies."""
    max_json_bytes: int | None = None
    """The largest body that is JSON; None: the same as for any other."""


class TokenBuckets:
    """A token bucket for each key: `burst` requests at once, refilled by `per_second`. Threads may share it."""

    def __init__(
        self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[float, float]] = {}
        """Key id -> requests left, and the time of that count; ordered by last use. Keys whose bucket is full again are removed."""

    def take(self, key_id: str) -> float:
        """Take one request from the bucket; returns 0, or the seconds until one is available."""
        with self._lock:
            now = self._clock()
            full_since = now - self._burst / self._per_second
            while (oldest := next(iter(self._tokens.items()), None)) and oldest[1][1] <= full_since:
                del self._tokens[oldest[0]]
            tokens, updated_at = self._tokens.pop(key_id, (float(self._burst), now))
            tokens = min(tokens + (now - updated_at) * self._per_second, float(self._burst))
            has_token = tokens >= 1
            self._tokens[key_id] = (tokens - 1 if has_token else tokens, now)
            return 0.0 if has_token else (1 - tokens) / self._per_second


@dataclass(slots=True)
class KeyActivity:
    """The activity of one key."""

    key_id: str
    role: Role
    last: float
    """Time of the key's last response, in seconds of the clock."""
    requests: int = 0
    refused: int = 0
    last_request: str = ""
    last_problem: str | None = None


class Clients:
    """The activity of all keys that have sent a request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seen: dict[str, KeyActivity] = {}

    def note(self, caller: Caller, request: str, code: str) -> None:
        """Record an answered request; `code`: of the problem body, or empty. `STATUS_ROUTES` are not counted."""
        if request in STATUS_ROUTES:
            return
        now = self.clock()
        seen = self._seen.setdefault(caller.key_id, KeyActivity(caller.key_id, caller.role, now))
        seen.role, seen.last, seen.last_request = caller.role, now, request
        seen.requests += 1
        if code:
            seen.refused += 1
            seen.last_problem = code

    def all(self) -> list[KeyActivity]:
        """The activity of all keys, the most recently active first."""
        return sorted(self._seen.values(), key=lambda seen: -seen.last)


class Shared:
    """State shared by all requests to a server. Each kind of server has its own subclass."""

    role_words: Mapping[Role, str] = WORDS
    """The names of the roles of its keys."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.metrics = RequestMetrics()
        self.clients = Clients()
        self.ending = asyncio.Event()
        """Set when the server has been asked to shut down."""
        self.bodies = Bodies(limits.max_body_bytes)
        json_bytes = limits.max_json_bytes
        self.json_bodies = self.bodies if json_bytes is None else Bodies(json_bytes)
        rate = limits.requests_per_second
        self._buckets = None if rate is None else TokenBuckets(rate, limits.burst)

    def count(self, key_id: str) -> None:
        """Count a request of a key, in any protocol. Raises `rate_limited`."""
        if self._buckets is not None and (seconds := self._buckets.take(key_id)):
            raise Refusal("rate_limited", retry_after=seconds)

    def end(self) -> None:
        """Accept no new work, and no request whose body is still incomplete."""
        self.ending.set()
        self.bodies.give_up()
        self.json_bodies.give_up()

    def refusal_of(self, error: Exception) -> Refusal | None:
        """The refusal for an exception that left a route; None: it is a bug."""
        del error
        return None

    async def refused(self, facts: Facts) -> None:
        """Hook for subclasses: called after a request was answered with a problem body."""


@dataclass(slots=True)
class Facts:
    """Facts about a request, filled in by the middleware."""

    request_id: str
    route: Route | None = None
    caller: Caller | None = None
    code: str = ""
    """Code of the problem body that it is answered with; empty without one."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Additional headers of a refusal."""
    note_delivery: Callable[[bool], None] = lambda delivered: None
    """Called when the request ends, with True if the whole response was sent while the client was connected."""

    @property
    def instance(self) -> str:
        """Id of the request in the problem and the log."""
        return f"urn:groupwise:request:{self.request_id}"


SCOPE = "groupwise.facts"
"""Key of the facts in the ASGI scope of a request."""


def facts_of(scope: Any) -> Facts:
    """The facts that the middleware put into the scope."""
    return cast("Facts", scope[SCOPE])
