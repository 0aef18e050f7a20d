"""All notifiers of a fleet as one: the one of its folder, PostgreSQL's if it has that, NATS if its settings name it.

It sends through all of them, and `wait` returns as soon as one of them receives ids; one that fails changes nothing. A separate task
listens to each, and puts the ids that it receives into one set of pending ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from groupwise.core.waiting import cancel_and_wait
from groupwise.jobs.fleet.notify.base import Notifier, PendingIds
from groupwise.jobs.fleet.notify.local import LocalNotifier
from groupwise.jobs.fleet.store.database import Database

LISTENING = 60.0
"""Seconds that one wait for a notification lasts at most."""
AFTER_AN_ERROR = 5.0
"""Seconds until a notifier that raised is listened to again."""

logger = logging.getLogger(__name__)


class SeveralNotifiers:
    """Combines `notifiers`; closing this closes them."""

    def __init__(
        self, notifiers: Sequence[Notifier], after_an_error: float = AFTER_AN_ERROR
    ) -> None:
        self.notifiers = tuple(notifiers)
        self._after_an_error = after_an_error
        self._received = PendingIds()
        self._listeners: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """See `Notifier`."""
        for notifier in self.notifiers:
            notifier.open()

    def notify(self, job_ids: Iterable[str]) -> None:
        """See `Notifier`."""
        ids = frozenset(job_ids)
        for notifier in self.notifiers:
            try:
                notifier.notify(ids)
            except Exception as error:  # noqa: BLE001 — a notification is a hint; a broken notifier must not fail a submission
                logger.warning("%s cannot send: %s", type(notifier).__name__, error)

    async def wait(self, timeout: float) -> frozenset[str]:
        """See `Notifier`."""
        if not self._listeners:
            self._listeners = [asyncio.create_task(self._listen(d)) for d in self.notifiers]
        return await self._received.wait(timeout)

    async def close(self) -> None:
        """See `Notifier`."""
        await cancel_and_wait(*self._listeners)
        await asyncio.gather(*(d.close() for d in self.notifiers), return_exceptions=True)

    async def _listen(self, notifier: Notifier) -> None:
        reported = False
        while True:
            try:
                self._received.put(await notifier.wait(LISTENING))
                reported = False
            except Exception as error:  # noqa: BLE001 — the others still receive, and the sweep finds the jobs that this one misses
                if not reported:
                    logger.warning("%s receives nothing: %s", type(notifier).__name__, error)
                reported = True
                await asyncio.sleep(self._after_an_error)


class LazyNotifiers(SeveralNotifiers):
    """Connects at the first notification, so that commands that only read make no connection. Routes call it, on the event loop."""

    def notify(self, job_ids: Iterable[str]) -> None:
        """See `Notifier`."""
        self.open()
        super().notify(job_ids)


def notifier_of(
    folder: Path, database: Database, nats_url: str | None, environment: Mapping[str, str]
) -> SeveralNotifiers:
    """The notifiers that the fleet needs; only their libraries are loaded. NATS secrets come from the environment (`access_from`)."""
    notifiers: list[Notifier] = [LocalNotifier(folder)]
    if database.dialect == "postgresql":
        from groupwise.jobs.fleet.notify.postgres import PostgresNotifier

        notifiers.append(PostgresNotifier(database.connection_arguments()))
    if nats_url is not None:
        from groupwise.jobs.fleet.notify.nats import NatsNotifier, access_from

        notifiers.append(NatsNotifier(access_from(nats_url, environment)))
    return SeveralNotifiers(notifiers)
