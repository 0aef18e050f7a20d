"""Wakes all tasks of one event loop that wait for a change."""

from __future__ import annotations

import asyncio


class ChangeNotifier:
    """Beats after every change; a waiting task checks its condition again after each beat."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiting tasks: something has changed."""
        event, self._next = self._next, asyncio.Event()
        event.set()

    @property
    def next_event(self) -> asyncio.Event:
        """Event that the next beat sets. Read it before checking the condition, or a change in between is missed."""
        return self._next
