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
LAST = 5.0
"""Seconds that `end` waits for a computation in progress."""
EVERY = 1.0
"""Seconds for which a value is valid."""
MOMENT = 0.5
"""Seconds that a caller waits for a newer value."""
WAIT = 5.0
"""Seconds that other callers wait for the one that makes the query."""


class Ends(Protocol):
    """A background watcher that can be ended."""

    def end(self) -> None: ...


E = TypeVar("E", bound=Ends)


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
        self._found: tuple[float, T] | None = None
        self._finding: threading.Thread | None = None
        self._forgotten = 0
        self._ended = False

    def now(self, moment: float = MOMENT) -> T | None:
        """The latest known value; None if nothing is known yet."""
        with self._lock:
            if self._found is not None and self._clock() - self._found[0] < EVERY:
                return self._found[1]
            if self._ended:
                return None if self._found is None else self._found[1]
            if self._finding is None or not self._finding.is_alive():
                self._finding = threading.Thread(target=self._look, daemon=True)
                self._finding.start()
            finding = self._finding
        finding.join(moment)
        with self._lock:
            return None if self._found is None else self._found[1]

    def forget(self) -> None:
        """Drop the value, because it has just changed: the next caller computes it again."""
        with self._lock:
            self._found, self._finding = None, None
            self._forgotten += 1

    def end(self, seconds: float = LAST) -> None:
        """Stop computing, so the source can be closed. Waits at most `seconds` for a computation in progress."""
        with self._lock:
            self._ended, finding = True, self._finding
        if finding is not None:
            finding.join(seconds)

    def _look(self) -> None:
        with self._lock:
            generation = self._forgotten
        found = self._find()
        with self._lock:
            if generation == self._forgotten:
                self._found = (self._clock(), found)


class CachedCall(Generic[T]):
    """Caches a recent answer, or the failure to get one."""

    def __init__(
        self, ask: Callable[[], T], who: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`who` is the name of the queried service, for messages."""
        self._ask, self._who, self._clock = ask, who, clock
        self._lock = threading.Lock()
        self._kept: tuple[float, int, T | GroupwiseError] | None = None
        self._forgotten = 0

    def now(self) -> T:
        """The answer. Raises the error of `ask`, and `too_busy` if another caller's query takes too long."""
        if not self._lock.acquire(timeout=WAIT):
            raise Refusal("too_busy", f"{self._who} is slow to answer others.", retry_after=WAIT)
        try:
            cached = self._kept
            if cached is None or cached[1] != self._forgotten or self._clock() - cached[0] >= EVERY:
                generation = self._forgotten
                cached = self._kept = (self._clock(), generation, self._answer())
            found: Any = cached[2]
        finally:
            self._lock.release()
        if isinstance(found, GroupwiseError):
            raise found.with_traceback(None)
        return found

    def forget(self) -> None:
        """Drop the value, because it has just changed: the next caller queries again, even if an earlier query is still in progress."""
        self._forgotten += 1

    def _answer(self) -> T | GroupwiseError:
        try:
            return self._ask()
        except GroupwiseError as error:
            return error
