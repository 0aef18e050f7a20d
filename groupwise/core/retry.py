"""Retries of something that may succeed later, such as a connection to a server that restarts: how long to pause, and how long in all.

`doubled` is the bound of a pause. `Backoff` counts failures and draws the pauses, `Retry` gives up after a time. `Outage` reports
that something does not answer, `ReportedRetry` does both. `Timing` holds clocks, sleep and random numbers, so tests need not wait.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Clocks, sleep and random numbers. Tests replace them."""

    clock: Callable[[], float] = time.monotonic
    """Seconds from an arbitrary start, which never go back."""
    today: Callable[[], float] = time.time
    """Seconds since 1970."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    sleep_blocking: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random
    """Uniform in [0, 1)."""


def doubled(first: float, failures: int, longest: float) -> float:
    """The longest pause in seconds after so many failures: `first` after one, doubled by each further one, at most `longest`."""
    return min(first * 2.0 ** min(max(failures - 1, 0), 60), longest)


class Backoff:
    """Each pause is at most twice as long as the one before, and random: clients that lost the same server do not all return at once."""

    def __init__(
        self,
        first: float,
        longest: float,
        jitter: Callable[[], float] = random.random,
        low: float = 0.5,
    ) -> None:
        """`first`, `longest`: bounds in seconds. A pause is random between `low` times its bound and the bound."""
        self._first, self._longest = first, longest
        self._jitter, self._low = jitter, low
        self._failures = 0

    def reset(self) -> None:
        """Call after a success: the next pause is the shortest again."""
        self._failures = 0

    def next(self, least: float = 0.0) -> float:
        """Seconds until the next attempt. `least`: the pause that the other side asked for (`Retry-After`); the random one is added."""
        self._failures += 1
        bound = doubled(self._first, self._failures, self._longest)
        return least + bound * (self._low + (1.0 - self._low) * self._jitter())


class Retry:
    """The time that is left for the attempts at one thing, and the pauses between them."""

    def __init__(
        self, seconds: float, backoff: Backoff, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`seconds`: no attempt starts later than that after this call."""
        self._seconds, self._backoff, self._clock = seconds, backoff, clock
        self._since: float | None = clock()

    def renew(self) -> None:
        """Call after a success: the whole time is counted from the next failure, and the next pause is the shortest again."""
        self._since = None
        self._backoff.reset()

    @property
    def left(self) -> float:
        """Seconds in which another attempt may start."""
        return self._seconds - (0.0 if self._since is None else self._clock() - self._since)

    def next(self, error: Exception, least: float = 0.0) -> float:
        """Seconds until the next attempt, at least `least`. Raises the error if the time would be over by then."""
        if self._since is None:
            self._since = self._clock()
        pause = self._backoff.next(least)
        if pause > self.left:
            raise error
        return pause


class Outage:
    """Reports once that something does not answer, and once that it answers again. Several calls may share it."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported_kinds: set[str] = set()

    @contextmanager
    def reported_to(self, report: Callable[[str], None]) -> Generator[None]:
        """Inside the context, use this function to report."""
        previous, self._report = self._report, report
        try:
            yield
        finally:
            self._report = previous

    def begin(self, message: str, kind: str = "") -> None:
        """Report the message, unless a failure of this kind was reported already in this outage. Call it after each failure."""
        if kind not in self._reported_kinds:
            self._reported_kinds.add(kind)
            self._report(message)

    def end(self, message: str) -> None:
        """Report the message if an outage was reported. Call it after each answer."""
        if self._reported_kinds:
            self._reported_kinds.clear()
            self._report(message)


class ReportedRetry:
    """A `Retry` whose outages are reported."""

    def __init__(
        self,
        retry: Retry,
        report: Callable[[str], None],
        lost: Callable[[Exception], str],
        back: str,
    ) -> None:
        """`lost` makes the first message of an outage from its first error, `back` is its last message."""
        self._retry, self._outage, self._lost, self._back = retry, Outage(report), lost, back

    def pause(self, error: Exception) -> float:
        """Seconds until the next attempt. Raises the error if the time for attempts is over."""
        pause = self._retry.next(error)
        self._outage.begin(self._lost(error))
        return pause

    def end(self) -> None:
        """Record that the service answered. The next failure starts a new time limit."""
        self._retry.renew()
        self._outage.end(self._back)
