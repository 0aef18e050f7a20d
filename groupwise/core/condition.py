"""Wakes all tasks of one event loop that wait for something to change."""

from __future__ import annotations

import asyncio


class Pulse:
    """Beats whenever something has changed; a waiting task looks again after each beat."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def beat(self) -> None:
        """Something has changed."""
        before, self._next = self._next, asyncio.Event()
        before.set()

    @property
    def next(self) -> asyncio.Event:
        """Set by the next beat; to be taken before one looks, so that no change is missed."""
        return self._next
