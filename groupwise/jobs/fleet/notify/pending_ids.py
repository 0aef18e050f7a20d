"""Ids that wait for the one who fetches them: what was heard, for a dispatcher; what was rung, for the task that sends it.

They are put there from the loop's thread or another; one waiter takes them all at once. What is kept is bounded: more ids than that are
forgotten, for the waiter is awake anyway, and whoever is woken looks at the whole queue.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from contextlib import suppress

MOST = 10_000
"""Ids that are kept for a waiter that does not come."""


class Pile:
    """A bounded set of ids, and an event that says that there are some."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._lock = threading.Lock()
        self._some = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, job_ids: Iterable[str]) -> None:
        """Keep the ids and wake the waiter; from any thread."""
        with self._lock:
            for name in job_ids:
                if len(self._ids) >= MOST:
                    break
                self._ids.add(name)
            anything = bool(self._ids)
        if anything:
            self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if loop is None:
            self._some.set()  # nobody waits yet; the event only remembers
            return
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            self._some.set()
        else:
            with suppress(RuntimeError):  # the loop has ended, and the waiter with it
                loop.call_soon_threadsafe(self._some.set)

    async def wait(self, timeout: float | None) -> frozenset[str]:
        """All ids, as soon as there are any; empty after `timeout` seconds without. None: for as long as it takes."""
        self._loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while True:
                    await self._some.wait()
                    if ids := self.take():
                        return ids
        return self.take()

    def take(self) -> frozenset[str]:
        """All ids, now."""
        with self._lock:
            self._some.clear()
            ids, self._ids = frozenset(self._ids), set()
        return ids
