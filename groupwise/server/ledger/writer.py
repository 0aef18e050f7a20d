"""One thread owns `server.db`; all others hand it operations and wait for its commits.

Callers run on an asyncio loop: `await ledger.do(operation, …)` queues the operation and waits. The thread takes all that are queued,
runs each within a savepoint of one transaction, commits once, and only then resolves the callers' futures: every result that a caller gets
is on the disk. So a flush to the disk, which takes milliseconds, is shared by all who came meanwhile (group commit), and reads see one
consistent state, because they are operations like any other.

- An operation that raises is rolled back alone; its caller gets the error, the others of the batch stand.
- A commit that fails (disk full, locked, input or output) fails every caller of its batch with a StoreError, and nothing of the batch
  is kept; the next batch is tried afresh.
- A batch that changed nothing commits nothing.
- A caller that goes away does not take its operation with it: what was queued is done.
- `close` refuses what comes later and finishes what came before.

Each commit is a crash point `commit:<names of the operations that changed something, sorted, joined by +>` (`groupwise.core.atomic_files`).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from groupwise.server.ledger import uptime
from groupwise.server.ledger.file import explained, explanation, open_file
from groupwise.server.ledger.transaction import Clock, Transaction

logger = logging.getLogger(__name__)

LARGEST_BATCH = 500
"""Operations of one commit: enough for the disk's flush to cost little, few enough that the first callers do not wait long."""

RETRY_SECONDS = 1.0
"""Between two attempts to write to a disk that refuses."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    """A queued operation, and what has become of it."""

    name: str
    work: Callable[[Transaction], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class Ledger:
    """The open `server.db`. `do` is called from asyncio; the thread that writes belongs to it."""

    def __init__(self, path: Path, connection: sqlite3.Connection, clock: Clock) -> None:
        """Use `open`."""
        self.path = path
        self._connection = connection
        self._clock = clock
        with explained(path):
            self._uptime_before = uptime.stored(connection) - clock.monotonic()
        self._queue: list[_Job] = []
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="ledger", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path, clock: Clock | None = None) -> Ledger:
        """Open or make the file and start its writer. StoreError if it cannot be used."""
        return cls(path, open_file(path), clock or Clock())

    async def do(
        self,
        operation: Callable[Concatenate[Transaction, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run an operation in the next transaction; returns what it returned once that is on the disk.

        Raises what the operation raised (nothing of it was kept), or StoreError (DiskFull among them) where the batch could not be
        committed.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        name = getattr(operation, "__name__", "operation")
        job = _Job(name, lambda transaction: operation(transaction, *args, **kwargs), future)
        with self._changed:
            if self._closing:
                raise StoreError(
                    f"the server's ledger {self.path} is closed; start the server again."
                )
            self._queue.append(job)
            self._changed.notify()
        return await future

    async def do_when_writable(
        self, operation: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Like `do`, but if the disk refuses, try again every second until it is written."""
        while True:
            try:
                return await self.do(operation, *args, **kwargs)
            except StoreError as error:
                logger.warning("what a client sent waits until it can be written: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        """Finish what is queued, keep the uptime, and close the file. Harmless when repeated."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                batch = self._queue[:LARGEST_BATCH]
                del self._queue[:LARGEST_BATCH]
            if not batch:  # the ledger is closed and all are done
                break
            self._settle(batch)
            _resolve(batch)
        self._leave()

    def _settle(self, batch: Sequence[_Job]) -> None:
        """Give each job its result or its error; never raises, because the thread must live."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            transaction = self._transaction()
            changed = {job.name for job in batch if self._perform(job, transaction)}
            if changed:
                atomic_files.commit(self._connection, "+".join(sorted(changed)))
            else:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._undo()
            for job in batch:
                # One each: an exception that several tasks raise collects the tracebacks of all.
                job.error = explanation(self.path, error)
        except BaseException as error:  # noqa: BLE001 — whatever it is, a caller waits for it
            self._undo()
            for job in batch:
                job.error = error

    def _transaction(self) -> Transaction:
        return Transaction(
            self._connection,
            now=self._clock.wall(),
            uptime=self._uptime_before + self._clock.monotonic(),
        )

    def _perform(self, job: _Job, transaction: Transaction) -> bool:
        """Run one operation, which alone is undone if it raises; True if it changed anything."""
        changes = self._connection.total_changes
        self._connection.execute("SAVEPOINT operation")
        try:
            job.result = job.work(transaction)
        except Exception as error:  # whatever it is, it is the caller's, who gets it
            if not self._connection.in_transaction:  # SQLite has given up the whole transaction
                raise
            self._connection.execute("ROLLBACK TO operation")
            # A constraint that an operation broke is a mistake of the code and stays what it is; the rest is the disk's.
            of_disk = isinstance(error, sqlite3.OperationalError)
            job.error = explanation(self.path, error) if of_disk else error
        self._connection.execute("RELEASE operation")
        return job.error is None and self._connection.total_changes > changes

    def _undo(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:  # SQLite was faster; if not, the next BEGIN fails and tells
            return

    def _leave(self) -> None:
        """Store the uptime if the disk allows it; a lost second of it is in the clients' favour."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            uptime.tick(self._transaction())
            atomic_files.commit(self._connection, "tick")
        except sqlite3.Error:
            self._undo()
        finally:
            self._connection.close()


def _resolve(batch: Sequence[_Job]) -> None:
    """Wake the callers, each loop once."""

    def resolve(jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if job.future.done():  # its caller went away
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.result)

    for loop in dict.fromkeys(job.future.get_loop() for job in batch):
        jobs = [job for job in batch if job.future.get_loop() is loop]
        with suppress(RuntimeError):  # the loop is closed, so no caller waits any more
            loop.call_soon_threadsafe(resolve, jobs)
