"""All doorbells of a fleet as one: the one of its folder, PostgreSQL's if it has that, NATS if its settings name it.

It rings all of them and returns from the first one that rings; one that fails changes nothing. A separate task listens to each, and puts
the ids that it hears into one set of pending ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from groupwise.core.waiting import cancel_and_wait
from groupwise.jobs.fleet.notify.base import Doorbell, PendingIds
from groupwise.jobs.fleet.notify.local import LocalDoorbell
from groupwise.jobs.fleet.store.database import Database

LISTENING = 60.0
"""Timeout in seconds of one wait on a doorbell."""
AFTER_AN_ERROR = 5.0
"""Seconds until a doorbell that raised is listened to again."""

logger = logging.getLogger(__name__)


class SeveralDoorbells:
    """Combines `doorbells`; closing this closes them."""

    def __init__(
        self, doorbells: Sequence[Doorbell], after_an_error: float = AFTER_AN_ERROR
    ) -> None:
        self.doorbells = tuple(doorbells)
        self._after_an_error = after_an_error
        self._received = PendingIds()
        self._listeners: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """See `Doorbell`."""
        for doorbell in self.doorbells:
            doorbell.open()

    def ring(self, job_ids: Iterable[str]) -> None:
        """See `Doorbell`."""
        rung = frozenset(job_ids)
        for doorbell in self.doorbells:
            try:
                doorbell.ring(rung)
            except Exception as error:  # noqa: BLE001 — a ring is a hint; a broken doorbell must not fail a submission
                logger.warning("%s cannot ring: %s", type(doorbell).__name__, error)

    async def wait(self, timeout: float) -> frozenset[str]:
        """See `Doorbell`."""
        if not self._listeners:
            self._listeners = [asyncio.create_task(self._listen(d)) for d in self.doorbells]
        return await self._received.wait(timeout)

    async def close(self) -> None:
        """See `Doorbell`."""
        await cancel_and_wait(*self._listeners)
        await asyncio.gather(*(d.close() for d in self.doorbells), return_exceptions=True)

    async def _listen(self, doorbell: Doorbell) -> None:
        reported = False
        while True:
            try:
                self._received.put(await doorbell.wait(LISTENING))
                reported = False
            except Exception as error:  # noqa: BLE001 — the others still ring, and the sweep finds the jobs that this one misses
                if not reported:
                    logger.warning("%s receives nothing: %s", type(doorbell).__name__, error)
                reported = True
                await asyncio.sleep(self._after_an_error)


class LazyDoorbells(SeveralDoorbells):
    """Connects at the first ring, so that commands that only read make no connection. It is rung by routes, on the event loop."""

    def ring(self, job_ids: Iterable[str]) -> None:
        """See `Doorbell`."""
        self.open()
        super().ring(job_ids)


def doorbell_of(
    folder: Path, database: Database, nats_url: str | None, environment: Mapping[str, str]
) -> SeveralDoorbells:
    """The doorbells that the fleet needs; only their libraries are loaded. NATS secrets come from the environment (`access_from`)."""
    doorbells: list[Doorbell] = [LocalDoorbell(folder)]
    if database.dialect == "postgresql":
        from groupwise.jobs.fleet.notify.postgres import PostgresDoorbell

        doorbells.append(PostgresDoorbell(database.connection_arguments()))
    if nats_url is not None:
        from groupwise.jobs.fleet.notify.nats import NatsDoorbell, access_from

        doorbells.append(NatsDoorbell(access_from(nats_url, environment)))
    return SeveralDoorbells(doorbells)
