"""One thread owns `server.db`; all other code passes it operations and waits for its commits.

Callers run on an asyncio loop: `await ledger.do(operation, …)` queues the operation and waits. The thread takes all queued operations, runs
each within a savepoint of one transaction, commits once, and only then resolves the callers' futures: every result that a caller gets is on
disk. A disk flush, which takes milliseconds, is thus shared by all operations that were queued meanwhile (group commit), and reads see one
consistent state, because they are operations like any other.
- An operation that raises is rolled back alone; its caller gets the error, the others of the batch are kept.
- A commit that fails (disk full, locked, I/O error) fails every caller of its batch with a StoreError, and nothing of the batch is kept;
the next batch starts from scratch.
- A batch that changed nothing commits nothing.
- If a caller is cancelled, its queued operation is still done.
- `close` refuses later operations and finishes earlier ones.

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
from groupwise.core.retry import Timing
from groupwise.server.ledger.file import LedgerClosed, explaining_sqlite, explanation, open_file
from groupwise.server.ledger.transaction import Transaction, store_uptime, stored_uptime

logger = logging.getLogger(__name__)

LARGEST_BATCH = 500
"""Maximum number of operations per commit: enough to spread the cost of the disk flush, few enough that the first callers do not wait long.
"""

RETRY_SECONDS = 1.0
"""Seconds between two attempts to write to a failing disk."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    """A queued operation and its outcome."""

    name: str
    work: Callable[[Transaction], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class Ledger:
    """The open `server.db`. `do` is called from asyncio; the Ledger owns the writing thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection, timing: Timing) -> None:
        """Use `open`."""
        self.path = path
        self._connection = connection
        self._timing = timing
        with explaining_sqlite(path):
            self._uptime_before = stored_uptime(connection) - timing.clock()
        self._queue: list[_Job] = []
        self._closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run_batches, name="ledger", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path, timing: Timing | None = None) -> Ledger:
        """Open or create the file and start its writer thread. StoreError if it cannot be used."""
        return cls(path, open_file(path), timing or Timing())

    async def do(
        self, operation: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation in the next transaction; returns its result once it is on disk.

        Raises the operation's error (none of its changes are kept), StoreError (including DiskFull) if the batch could not be committed, or
        LedgerClosed after `close`.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        name = getattr(operation, "__name__", "operation")
        job = _Job(name, lambda transaction: operation(transaction, *args, **kwargs), future)
        with self._condition:
            if self._closing:
                raise LedgerClosed(
                    f"the server's ledger {self.path} is closed; start the server again."
                )
            self._queue.append(job)
            self._condition.notify()
        return await future

    async def do_when_writable(
        self, operation: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Like `do`, but if the write fails, try again every `RETRY_SECONDS` until it succeeds."""
        while True:
            try:
                return await self.do(operation, *args, **kwargs)
            except StoreError as error:
                logger.warning("what a client sent waits until it can be written: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        """Finish the queued operations, store the uptime, and close the file. Repeating it is harmless."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)

    def _run_batches(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._closing)
                batch = self._queue[:LARGEST_BATCH]
                del self._queue[:LARGEST_BATCH]
            if not batch:  # closed, and all operations are done
                break
            self._run_batch(batch)
            _resolve(batch)
        # Store the uptime if the disk allows it; otherwise leases last slightly longer.
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            store_uptime(self._transaction())
            atomic_files.commit(self._connection, "tick")
        except sqlite3.Error:
            self._rollback()
        finally:
            self._connection.close()

    def _run_batch(self, batch: Sequence[_Job]) -> None:
        """Set the result or error of each job; never raises, because the thread must survive."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            transaction = self._transaction()
            changed_names = {job.name for job in batch if self._run_operation(job, transaction)}
            if changed_names:
                atomic_files.commit(self._connection, "+".join(sorted(changed_names)))
            else:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._rollback()
            for job in batch:
                # One exception per job: an exception raised in several tasks would collect the tracebacks of all.
                job.error = explanation(self.path, error)
        except BaseException as error:  # noqa: BLE001 — the callers wait for any error
            self._rollback()
            for job in batch:
                job.error = error

    def _transaction(self) -> Transaction:
        return Transaction(
            self._connection,
            now=self._timing.today(),
            uptime=self._uptime_before + self._timing.clock(),
        )

    def _run_operation(self, job: _Job, transaction: Transaction) -> bool:
        """Run one operation, undoing only its changes if it raises; True if it changed anything."""
        changes = self._connection.total_changes
        self._connection.execute("SAVEPOINT operation")
        try:
            job.result = job.work(transaction)
        except Exception as error:  # any error belongs to the caller
            if not self._connection.in_transaction:  # SQLite rolled back the whole transaction
                raise
            self._connection.execute("ROLLBACK TO operation")
            # A violated constraint is a bug in the code and is raised as it is; operational errors come from the disk.
            of_disk = isinstance(error, sqlite3.OperationalError)
            job.error = explanation(self.path, error) if of_disk else error
        self._connection.execute("RELEASE operation")
        return job.error is None and self._connection.total_changes > changes

    def _rollback(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:  # already rolled back; if not, the next BEGIN fails and reports it
            return


def _resolve(batch: Sequence[_Job]) -> None:
    """Resolve the callers' futures, with one call per event loop."""

    def resolve(jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if job.future.done():  # its caller was cancelled
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.result)

    for loop in dict.fromkeys(job.future.get_loop() for job in batch):
        jobs = [job for job in batch if job.future.get_loop() is loop]
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(resolve, jobs)
