"""Pauses between attempts at something that may succeed later, such as connecting to a server that restarts."""

from __future__ import annotations

import random


class Backoff:
    """Each pause is at most twice as long as the one before, and random: clients that lost the same server do not all return at once."""

    def __init__(
        self, first: float, longest: float, chance: random.Random | None = None, low: float = 0.5
    ) -> None:
        """`first`, `longest`: bounds in seconds. A pause is random between `low` times its bound and the bound."""
        self._first, self._longest, self._low = first, longest, low
        self._uniform = random.uniform if chance is None else chance.uniform
        self._bound = first

    def reset(self) -> None:
        """Call after a success: the next pause is the shortest again."""
        self._bound = self._first

    def next(self, least: float = 0.0) -> float:
        """Seconds until the next attempt. `least`: the pause that the other side asked for, used up to the longest pause."""
        bound = max(self._bound, min(least, self._longest))
        self._bound = min(2 * bound, self._longest)
        return self._uniform(self._low * bound, bound)
