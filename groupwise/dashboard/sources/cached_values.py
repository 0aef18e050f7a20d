"""Caches values that many pages request repeatedly: a slow query is made once for all.

`BackgroundValue` computes its value in the background, so no page waits long; callers of a `CachedCall` wait for the one of them
that makes the query.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import GroupwiseError

T = TypeVar("T")
END_TIMEOUT = 5.0
"""Seconds that `end` waits for a computation in progress."""
VALID_SECONDS = 1.0
"""Seconds for which a value is valid."""
NEWER_VALUE_TIMEOUT = 0.5
"""Seconds that a caller waits for a newer value."""
QUERY_TIMEOUT = 5.0
"""Seconds that other callers wait for the one that makes the query."""


class Endable(Protocol):
    """A background watcher that can be ended."""

    def end(self) -> None: ...


E = TypeVar("E", bound=Endable)


@contextmanager
def ending(watched: E) -> Generator[E]:
    """End a watcher when the block is left, before its source is closed."""
    try:
        yield watched
    finally:
        watched.end()


class BackgroundValue(Generic[T]):
    """A value that is computed in the background."""

    def __init__(self, find: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        """`find` may take any time, and must not raise."""
        self._find, self._clock = find, clock
        self._lock = threading.Lock()
        self._cached: tuple[float, T] | None = None
        self._thread: threading.Thread | None = None
        self._generation = 0
        self._ended = False

    def latest(self, timeout: float = NEWER_VALUE_TIMEOUT) -> T | None:
        """The latest known value; None if nothing is known yet."""
        with self._lock:
            if self._cached is not None and self._clock() - self._cached[0] < VALID_SECONDS:
                return self._cached[1]
            if self._ended:
                return None if self._cached is None else self._cached[1]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._compute, daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(timeout)
        with self._lock:
            return None if self._cached is None else self._cached[1]

    def forget(self) -> None:
        """Drop the value, because it has just changed: the next caller computes it again."""
        with self._lock:
            self._cached, self._thread = None, None
            self._generation += 1

    def end(self, seconds: float = END_TIMEOUT) -> None:
        """Stop computing, so the source can be closed. Waits at most `seconds` for a computation in progress."""
        with self._lock:
            self._ended, thread = True, self._thread
        if thread is not None:
            thread.join(seconds)

    def _compute(self) -> None:
        with self._lock:
            generation = self._generation
        value = self._find()
        with self._lock:
            if generation == self._generation:
                self._cached = (self._clock(), value)


class CachedCall(Generic[T]):
    """Caches a recent answer, or the failure to get one."""

    def __init__(
        self, ask: Callable[[], T], who: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`who` is the name of the queried service, for messages."""
        self._ask, self._who, self._clock = ask, who, clock
        self._lock = threading.Lock()
        self._cached: tuple[float, int, T | GroupwiseError] | None = None
        self._generation = 0

    def get(self) -> T:
        """The answer. Raises the error of `ask`, and `too_busy` if another caller's query takes too long."""
        if not self._lock.acquire(timeout=QUERY_TIMEOUT):
            raise Refusal(
                "too_busy", f"{self._who} is slow to answer others.", retry_after=QUERY_TIMEOUT
            )
        try:
            cached = self._cached
            if (
                cached is None
                or cached[1] != self._generation
                or self._clock() - cached[0] >= VALID_SECONDS
            ):
                generation = self._generation
                cached = self._cached = (self._clock(), generation, self._query())
            answer: Any = cached[2]
        finally:
            self._lock.release()
        if isinstance(answer, GroupwiseError):
            raise answer.with_traceback(None)
        return answer

    def forget(self) -> None:
        """Drop the value, because it has just changed: the next caller queries again, even if an earlier query is still in progress."""
        self._generation += 1

    def _query(self) -> T | GroupwiseError:
        try:
            return self._ask()
        except GroupwiseError as error:
            return error
