"""Periodic tasks of a server: storing the uptime, ending expired groups, deleting old answers, logging what holds up requests, and probing
the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress

from groupwise.core.errors import GroupwiseError
from groupwise.core.waiting import cancel_and_wait
from groupwise.server.engine.engine_protocol import Probe
from groupwise.server.ledger import idempotency
from groupwise.server.ledger.transaction import TICK_SECONDS
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run import ledger_operations
from groupwise.server.run.active_run import ActiveRun
from groupwise.server.run.admission import QueuedRequest

logger = logging.getLogger(__name__)

FORGET_EVERY = 600.0
"""Seconds between two deletions of expired answers."""
PROBE_EVERY = 2.0
"""Seconds between two probes of the engine."""
WAIT_REPORTED = 10.0
"""Seconds for which a request is the first of those that wait for room before the log says which group has the room."""


class PeriodicTasks:
    """Two background tasks, independent of requests."""

    def __init__(self, active_run: ActiveRun, ledger: Ledger) -> None:
        self.probed: Probe | None = None
        """The engine's latest probe; None if there is none."""
        self._active_run = active_run
        self._ledger = ledger
        self._first_waiting: tuple[QueuedRequest | None, float] = (None, 0.0)
        """The first of the requests that wait for room, and when it is reported (monotonic clock)."""
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        """Start both tasks."""
        self._tasks = tuple(
            asyncio.create_task(work, name="periodic tasks")
            for work in (self._tick(), self._probe())
        )

    async def stop(self) -> None:
        """Stop both tasks."""
        await cancel_and_wait(*self._tasks)

    async def _tick(self) -> None:
        """Every few seconds store the uptime and end groups whose lease has expired; from time to time delete old answers and
        responses."""
        forgotten = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            with suppress(GroupwiseError):  # a full disk is reported to callers that write
                if await self._ledger.do(ledger_operations.tick):
                    self._active_run.changed.notify()
                    if self._active_run.conductor is not None:
                        self._active_run.conductor.nudge()
                        await self._active_run.conductor.recount()
                await self._report_waiting()
                if time.monotonic() - forgotten > FORGET_EVERY:
                    await self._ledger.do(idempotency.delete_expired)
                    forgotten = time.monotonic()

    async def _report_waiting(self) -> None:
        """Log which group the first waiting request waits for, once for each request that does not move up."""
        conductor, now = self._active_run.conductor, time.monotonic()
        admission = None if conductor is None else conductor.admission_if_open
        queue = () if admission is None else admission.queued_requests()
        first = next((request for request in queue if None in request.draws), None)
        if first is not self._first_waiting[0]:
            self._first_waiting = (first, now + WAIT_REPORTED)
        if conductor is None or first is None or now < self._first_waiting[1]:
            return
        holder = await self._ledger.do(ledger_operations.holder_of_room, conductor.run)
        if holder is not None:  # else it waits for a step
            self._first_waiting = (first, math.inf)
            logger.info("a call has waited %.0f s for room: %s", now - first.since, holder)

    async def _probe(self) -> None:
        """Probe the engine every few seconds, so that status requests need not wait for a busy engine."""
        while True:
            conductor, probed = self._active_run.conductor, None
            if conductor is not None and conductor.phase == "running":
                with suppress(GroupwiseError):  # its loss is handled by the conductor
                    probed = await conductor.engine.probe()
            self.probed = probed
            await asyncio.sleep(PROBE_EVERY)
