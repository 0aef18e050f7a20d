"""Pauses between tries of what may succeed later, as connecting to a server that restarts."""

from __future__ import annotations

import random


class Backoff:
    """Each pause is at most twice as long as the one before, and drawn: those that lost the same server do not all come back at once."""

    def __init__(
        self, first: float, longest: float, chance: random.Random | None = None, low: float = 0.5
    ) -> None:
        """`first`, `longest`: bounds in seconds. A pause is drawn between `low` of its bound and all of it."""
        self._first, self._longest, self._low = first, longest, low
        self._uniform = random.uniform if chance is None else chance.uniform
        self._bound = first

    def reset(self) -> None:
        """It succeeded: the next pause is the shortest again."""
        self._bound = self._first

    def next(self, least: float = 0.0) -> float:
        """Seconds until the next try. `least`: what the other side asked for, up to the longest pause."""
        bound = max(self._bound, min(least, self._longest))
        self._bound = min(2 * bound, self._longest)
        return self._uniform(self._low * bound, bound)
