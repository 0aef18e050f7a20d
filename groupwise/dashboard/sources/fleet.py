"""The dashboard's view of a fleet: sends one request at a time, and makes common requests once a second for all pages."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import GroupwiseError
from groupwise.dashboard.sources.cached_values import (
    NEWER_VALUE_TIMEOUT,
    BackgroundValue,
    CachedCall,
)

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient

T = TypeVar("T")
Document = dict[str, Any]
LOCK_TIMEOUT, TIMEOUT = 5.0, 10.0
"""Seconds that a page waits for other pages' requests, and for an answer of the API."""
VOLATILE_KEYS = frozenset(
    {
        "time",
        "seen_at",
        "silent_seconds",
        "oldest_waiting_seconds",
        "outdated_seconds",
        "last_polled",
        "observed_at",
        "facts",
    }
)
"""Keys whose values change every second and do not count as news."""


class WatchedFleet:
    """A fleet as pages see it. Thread-safe."""

    def __init__(self, fleet: FleetClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet, self._clock = fleet, clock
        self._lock = threading.Lock()
        self._status = self._cached(lambda fleet: fleet.status())
        self._machines = self._cached(lambda fleet: fleet.machines())
        self._newest = self._cached(lambda fleet: fleet.jobs(limit=50))
        self._stamp = BackgroundValue(self._compute_stamp, clock)

    def ask(self, request: Callable[[FleetClient], T]) -> T:
        """Send a request to the fleet. Raises Refusal, and `FleetAway` if it does not answer."""
        with self._exclusive():
            return request(self._fleet)

    def change(self, who: str, request: Callable[[FleetClient], object]) -> None:
        """Act as a user, who is recorded in the fleet's events; the next page shows the result."""
        with self._exclusive():
            request(self._fleet.on_behalf_of(who))
        self.forget()

    @contextmanager
    def _exclusive(self) -> Generator[None]:
        if not self._lock.acquire(timeout=LOCK_TIMEOUT):
            raise Refusal(
                "too_busy", "The fleet is slow to answer others.", retry_after=LOCK_TIMEOUT
            )
        try:
            yield
        finally:
            self._lock.release()

    def status(self) -> Document:
        """The state of the fleet; see `FleetClient.status`."""
        return self._status.get()

    def machines(self) -> list[Document]:
        """All machines with their GPUs."""
        return self._machines.get()

    def newest(self) -> list[Document]:
        """The newest jobs."""
        return self._newest.get()

    def stamp(self, timeout: float = NEWER_VALUE_TIMEOUT) -> str | None:
        """A text that changes whenever pages have something new to show."""
        return self._stamp.latest(timeout)

    def end(self) -> None:
        """Stop background requests, so the client can be closed."""
        self._stamp.end()

    def _compute_stamp(self) -> str:
        try:
            content = (self.status(), self.machines(), self.newest())
        except GroupwiseError as error:
            return error.code
        return json.dumps(without_volatile(content), sort_keys=True, default=str)

    def _cached(self, request: Callable[[FleetClient], T]) -> CachedCall[T]:
        return CachedCall(lambda: self.ask(request), "The fleet", self._clock)

    def forget(self) -> None:
        """Drop cached values after a change made here, so the next page shows it."""
        for cached in (self._status, self._machines, self._newest, self._stamp):
            cached.forget()


def without_volatile(value: Any) -> Any:
    """The value without keys that change every second."""
    if isinstance(value, dict):
        return {str(k): without_volatile(v) for k, v in value.items() if k not in VOLATILE_KEYS}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [without_volatile(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
