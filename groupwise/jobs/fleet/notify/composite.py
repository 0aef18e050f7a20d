"""Several doorbells as one: rings all of them and hears whichever rings first. One that is dead changes nothing.

Each is listened to by a task of its own that puts what it hears on a common pile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from groupwise.jobs.fleet.notify.base import Doorbell
from groupwise.jobs.fleet.notify.pending_ids import Pile
from groupwise.jobs.fleet.tasks import ended

LISTENING = 60.0
"""Seconds for which one doorbell is listened to at a time."""
AFTER_AN_ERROR = 5.0
"""Seconds until a doorbell that raised is listened to again."""

logger = logging.getLogger(__name__)


class SeveralDoorbells:
    """All of `doorbells`; closing it closes them."""

    def __init__(
        self, doorbells: Sequence[Doorbell], after_an_error: float = AFTER_AN_ERROR
    ) -> None:
        self.doorbells = tuple(doorbells)
        self._after_an_error = after_an_error
        self._heard = Pile()
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
            except Exception as error:  # noqa: BLE001 — a ring is a hint; a broken doorbell must not fail what was submitted
                logger.warning("%s cannot ring: %s", type(doorbell).__name__, error)

    async def wait(self, timeout: float) -> frozenset[str]:
        """See `Doorbell`."""
        if not self._listeners:
            self._listeners = [asyncio.create_task(self._listen(d)) for d in self.doorbells]
        return await self._heard.wait(timeout)

    async def close(self) -> None:
        """See `Doorbell`."""
        await ended(*self._listeners)
        await asyncio.gather(*(d.close() for d in self.doorbells), return_exceptions=True)

    async def _listen(self, doorbell: Doorbell) -> None:
        said = False
        while True:
            try:
                self._heard.put(await doorbell.wait(LISTENING))
                said = False
            except Exception as error:  # noqa: BLE001 — the others ring on, and the sweep finds what this one would have told
                if not said:
                    logger.warning("%s cannot be heard: %s", type(doorbell).__name__, error)
                said = True
                await asyncio.sleep(self._after_an_error)
