"""Regular tasks of a server, every few seconds: keeping the time, ending what is overdue, and probing the engine."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from groupwise.core.errors import GroupwiseError
from groupwise.server.engine.engine_protocol import Probe
from groupwise.server.ledger.answers import forget_old_answers
from groupwise.server.ledger.uptime import TICK_SECONDS
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run import ledger_operations
from groupwise.server.run.active_run import Current

FORGET_EVERY = 600.0
"""Seconds between two looks for answers that are kept no longer."""
PROBE_EVERY = 2.0
"""Seconds between two questions to the engine how it is doing."""


class PeriodicTasks:
    """Two tasks beside the requests."""

    def __init__(self, current: Current, ledger: Ledger) -> None:
        self.probed: Probe | None = None
        """The engine's last report on itself."""
        self._current = current
        self._ledger = ledger
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        """Begin both."""
        self._tasks = tuple(
            asyncio.create_task(work, name="periodic tasks")
            for work in (self._tick(), self._probe())
        )

    async def stop(self) -> None:
        """End both."""
        for each in self._tasks:
            each.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tick(self) -> None:
        """Every few seconds: keep the uptime, end groups whose lease is over, and forget old answers."""
        forgotten = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            with suppress(GroupwiseError):  # a full disk is reported to those who write
                if await self._ledger.do(ledger_operations.tick):
                    self._current.changed.beat()
                    if self._current.conductor is not None:
                        self._current.conductor.nudge()
                        await self._current.conductor.recount()
                if time.monotonic() - forgotten > FORGET_EVERY:
                    await self._ledger.do(forget_old_answers)
                    forgotten = time.monotonic()

    async def _probe(self) -> None:
        """Probe the engine every few seconds, so that status requests need not wait for an engine that is computing."""
        while True:
            conductor, probed = self._current.conductor, None
            if conductor is not None and conductor.phase == "running":
                with suppress(GroupwiseError):  # its loss is noticed elsewhere
                    probed = await conductor.engine.probe()
            self.probed = probed
            await asyncio.sleep(PROBE_EVERY)
