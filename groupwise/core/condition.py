"""Wakes all tasks of one event loop that wait for a change."""

from __future__ import annotations

import asyncio


class ChangeNotifier:
    """Wakes waiting tasks after every change; each then checks its condition again."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiting tasks: something has changed."""
        event, self._next = self._next, asyncio.Event()
        event.set()

    @property
    def next_event(self) -> asyncio.Event:
        """The event that the next `notify` sets. Read it before checking the condition, or a change in between is missed."""
        return self._next
