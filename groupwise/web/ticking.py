"""A value that many pages ask for again and again, found in the background: nobody waits long, and whatever is slow is asked once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
LAST = 5.0
"""Seconds that an end waits for the look under way."""
EVERY = 1.0
"""Seconds for which a value is good."""
MOMENT = 0.5
"""Seconds that whoever asks waits for a newer one."""


class Ends(Protocol):
    """What looks at something in the background."""

    def end(self) -> None: ...


E = TypeVar("E", bound=Ends)


@contextmanager
def ending(watched: E) -> Generator[E]:
    """Have it end before what it looks at is closed."""
    try:
        yield watched
    finally:
        watched.end()


class Ticking(Generic[T]):
    """One such value."""

    def __init__(self, find: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        """`find` may take as long as it likes, and raises nothing."""
        self._find, self._clock = find, clock
        self._lock = threading.Lock()
        self._found: tuple[float, T] | None = None
        self._finding: threading.Thread | None = None
        self._ended = False

    def now(self, moment: float = MOMENT) -> T | None:
        """The value as it is known now; None: nothing is known yet."""
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
        """It has just become another one: the next who asks finds it anew."""
        with self._lock:
            self._found = None

    def end(self, seconds: float = LAST) -> None:
        """Find nothing any more: what is asked may be closed then. Waits for the look under way, for so many seconds at most."""
        with self._lock:
            self._ended, finding = True, self._finding
        if finding is not None:
            finding.join(seconds)

    def _look(self) -> None:
        found = self._find()
        with self._lock:
            self._found = (self._clock(), found)
