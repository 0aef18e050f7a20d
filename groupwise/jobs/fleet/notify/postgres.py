"""PostgreSQL as a notifier: LISTEN and NOTIFY, on separate connections that are reopened when they break.

A dispatcher listens on one connection and sends on another; neither holds up the transactions of the fleet. The first id is sent at once,
those of the next moment together, because NOTIFY takes a lock of the whole server at commit. If more ids wait than fit into one message,
the rest is left out: a woken dispatcher reads the whole queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from groupwise.core.retry import Backoff
from groupwise.core.waiting import cancel_and_wait
from groupwise.jobs.fleet.notify.base import PendingIds, ids_in, messages

CHANNEL = "groupwise_jobs"
SENT = 7_900
"""Maximum bytes of one notification; PostgreSQL accepts less than 8000."""
GATHERED = 0.02
"""Seconds after a notification in which further ids are gathered for the next."""
CHECKED = 10.0
"""Seconds of silence after which the listening connection is checked, and time limit of that check."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts to connect; doubled each time."""
SENDING = 1.0
"""Seconds that closing waits for pending ids to be sent."""

logger = logging.getLogger(__name__)

Connection = psycopg.AsyncConnection[tuple[object, ...]]


class PostgresNotifier:
    """Sends ids as notifications of a database. `arguments`: the arguments of psycopg's `connect` (`Database.connection_arguments`)."""

    def __init__(self, arguments: Mapping[str, Any], channel: str = CHANNEL) -> None:
        self._arguments: dict[str, Any] = {**arguments, "application_name": "groupwise-notifier"}
        self._channel = channel
        self._received = PendingIds()
        self._unsent = PendingIds()
        self._listener: asyncio.Task[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._silent = False
        self._refusal_is_told = False
        self.is_listening = False
        """True while notifications are received."""

    def open(self) -> None:
        """See `Notifier`."""
        if self._sender is None:
            self._sender = asyncio.create_task(self._keep_connected(self._send_unsent))

    def notify(self, job_ids: Iterable[str]) -> None:
        """See `Notifier`."""
        ids = frozenset(job_ids)
        self._received.put(ids)
        self._unsent.put(ids)

    async def wait(self, timeout: float) -> frozenset[str]:
        """See `Notifier`."""
        self.open()
        if self._listener is None:
            self._listener = asyncio.create_task(self._keep_connected(self._listen))
        return await self._received.wait(timeout)

    async def close(self) -> None:
        """See `Notifier`."""
        await cancel_and_wait(self._sender, self._listener)
        if ids := self._unsent.take():
            with suppress(psycopg.Error, OSError, TimeoutError):
                async with asyncio.timeout(SENDING), await self._connect() as connection:
                    await self._notify(connection, ids)

    async def _keep_connected(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        """Do the work on a connection, and on a new one whenever that breaks."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            try:
                async with asyncio.timeout(CHECKED):
                    connection = await self._connect()
                backoff.reset()
                async with connection:
                    await work(connection)
            except (psycopg.Error, OSError, TimeoutError) as error:
                if not self._silent:
                    logger.warning(
                        "no notifications of PostgreSQL arrive (%s). The connection is tried again; until then "
                        "dispatchers find new jobs by looking every few seconds",
                        str(error).strip() or type(error).__name__,
                    )
                self._silent = True
            await asyncio.sleep(backoff.next())

    async def _connect(self) -> Connection:
        return await psycopg.AsyncConnection.connect(autocommit=True, **self._arguments)

    async def _listen(self, connection: Connection) -> None:
        await connection.execute(SQL("LISTEN {}").format(Identifier(self._channel)))
        self.is_listening = True
        if self._silent:
            logger.info("notifications of PostgreSQL arrive again")
            self._silent = False
        try:
            while True:
                async for notification in connection.notifies(timeout=CHECKED):
                    self._received.put(ids_in(notification.payload.encode("utf-8", "replace")))
                async with asyncio.timeout(CHECKED):
                    await connection.execute("SELECT 1")
        finally:
            self.is_listening = False

    async def _send_unsent(self, connection: Connection) -> None:
        while True:
            ids = await self._unsent.wait(None)
            try:
                async with asyncio.timeout(CHECKED):
                    await self._notify(connection, ids)
            except psycopg.Error as error:
                if connection.closed:
                    self._unsent.put(ids)
                    raise
                # Log the refusal once and drop the ids: sending them again would be refused too,
                # and would block all later ones.
                if not self._refusal_is_told:
                    logger.warning(
                        "PostgreSQL refuses notifications (%s): sweeps find their jobs", error
                    )
                self._refusal_is_told = True
            except BaseException:  # also if cancelled: no id is lost here
                self._unsent.put(ids)
                raise
            await asyncio.sleep(GATHERED)

    async def _notify(self, connection: Connection, ids: frozenset[str]) -> None:
        for text in islice(messages(sorted(ids), SENT), 1):
            await connection.execute("SELECT pg_notify(%s, %s)", (self._channel, text.decode()))
