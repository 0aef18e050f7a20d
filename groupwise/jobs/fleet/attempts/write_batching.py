"""Batching: concurrent requests of many controllers to the database become one transaction.

A transaction costs more than the few rows that a controller reads or writes in it: its start, its flush to disk, the statements that all of
them repeat. So while one transaction is in progress, further requests gather, and share the next. A single controller waits for no other; a
thousand that start at once share a few dozen transactions.

No request fails because of another: if one of the writes raises, or has to wait for another process's lock, the batch is rolled back, and
each write is repeated in its own transaction, concurrently.

A write that the database demands in an order is a generator that yields where a flush is needed (`in_steps`). A single write is sent step
by step. In a batch, one step of all writes is sent before the next step of any, so each table gets one statement for each step, no matter
how many writes there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from itertools import zip_longest
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, cast

from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import Update

from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.queue import requeue_pending
from groupwise.jobs.fleet.store import engine, events
from groupwise.jobs.fleet.store.database import (
    CommitUnknown,
    Database,
    DatabaseFailure,
    at_one_moment,
)

Step: TypeAlias = tuple[Update, Mapping[str, Any]] | None
"""A statement and its values, sent after the changed rows. The statement object is built once, and equal ones are combined."""
Steps: TypeAlias = Generator[Step]
P = ParamSpec("P")

_BEGUN = "groupwise_steps"


def in_steps(
    write: Callable[Concatenate[Session, P], Steps],
) -> Callable[Concatenate[Session, P], None]:
    """Decorator that makes a generator of steps a function that writes at once, or, within `side_by_side`, when that block ends."""

    @wraps(write)
    def run_or_defer(session: Session, *args: P.args, **kwargs: P.kwargs) -> None:
        steps = write(session, *args, **kwargs)
        if (deferred := session.info.get(_BEGUN)) is not None:
            deferred.append(steps)
        else:
            _drive(session, [steps])

    return run_or_defer


@contextmanager
def side_by_side(session: Session) -> Generator[None]:
    """Defer writes in steps that are called within the block; at its end they all run, step by step together."""
    deferred: list[Steps] = []
    session.info[_BEGUN] = deferred
    try:
        yield
    finally:
        del session.info[_BEGUN]
    _drive(session, deferred)


def _drive(session: Session, writes: Iterable[Steps]) -> None:
    for steps in zip_longest(*writes):
        session.flush()
        values_by_statement: dict[Update, list[Mapping[str, Any]]] = {}
        for statement, values in filter(None, steps):
            values_by_statement.setdefault(statement, []).append(values)
        for statement, values in values_by_statement.items():
            session.execute(statement, values)


One = TypeVar("One")
Result = TypeVar("Result")

MAX_BATCH = 64
"""Maximum requests in one transaction."""
LOCK_SECONDS = 0.2
"""Seconds that a batch waits for a lock of another process; a request on its own then waits as long as any transaction."""


@dataclass(frozen=True, slots=True)
class Later(Generic[Result]):
    """An answer that takes longer, for which the rest of the batch does not wait."""

    task: asyncio.Task[Result]


class Batcher(Generic[One, Result]):
    """Collects requests that arrive while others are being handled; `handle` answers many at once, in their order."""

    def __init__(
        self,
        handle: Callable[
            [Sequence[One]], Awaitable[Sequence[Result | BaseException | Later[Result]]]
        ],
    ) -> None:
        self._handle = handle
        self._waiting: list[tuple[One, asyncio.Future[Result]]] = []
        self._working: asyncio.Task[None] | None = None
        self._slow_tasks: set[asyncio.Task[Result]] = set()

    async def ask(self, one: One) -> Result:
        """Return the answer, or raise its error. If the caller is cancelled meanwhile, this returns only once the work is over."""
        entry = (one, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work_off())
        try:
            return await asyncio.shield(entry[1])
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                entry[1].cancel()
            future = entry[1]
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
            if not future.cancelled():
                future.exception()  # its caller is gone
            raise

    async def _work_off(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            try:
                results = await self._handle([one for one, _ in batch])
            # every error goes to the callers, which would otherwise wait for ever
            except BaseException as error:  # noqa: BLE001
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if isinstance(result, Later):
                    slow_task = cast("Later[Result]", result).task
                    self._slow_tasks.add(slow_task)
                    slow_task.add_done_callback(partial(self._pass_on, future))
                elif isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _pass_on(self, future: asyncio.Future[Result], task: asyncio.Task[Result]) -> None:
        self._slow_tasks.discard(task)
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


@dataclass(frozen=True, slots=True)
class Write:
    """A write about one attempt."""

    epoch: int
    fn: Callable[[Session], Any]
    ends: bool
    """True if it ends the attempt, and so writes the job as well."""


class BatchedWrites:
    """Combines the writes of many controllers into few transactions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._gathered = Batcher[Write, Any](self._write_batch)

    async def commit(self, epoch: int, fn: Callable[[Session], Any], *, ends: bool = False) -> Any:
        """Like `Database.in_thread`, for a write about this attempt. `ends`: it ends the attempt."""
        return await self._gathered.ask(Write(epoch, fn, ends))

    async def _write_batch(self, writes: Sequence[Write]) -> Sequence[Any]:
        if len(writes) > 1:
            try:
                return await self._database.in_thread(lambda session: _write_all(session, writes))
            except (CommitUnknown, DatabaseFailure) as error:
                return [error] * len(writes)
            except Exception:  # noqa: BLE001  # one of them failed, unknown which: each runs alone below
                pass
        alone = [asyncio.create_task(self._database.in_thread(write.fn)) for write in writes]
        # Later batches do not wait for a write that waits for another process's lock.
        await asyncio.wait(alone, timeout=LOCK_SECONDS)
        return [Later(task) for task in alone]


class BatchedReads(Generic[One, Result]):
    """Combines many reads into few: `fn` reads all requested keys at once; None for a key that does not exist."""

    def __init__(
        self, database: Database, fn: Callable[[Session, Sequence[One]], Mapping[One, Result]]
    ) -> None:
        self._database = database
        self._fn = fn
        self._gathered = Batcher[One, Result | None](self._read_batch)

    async def read(self, one: One) -> Result | None:
        """Like `Database.read_in_thread`, for one key."""
        return await self._gathered.ask(one)

    async def _read_batch(self, keys: Sequence[One]) -> Sequence[Result | BaseException | None]:
        try:
            results = await self._database.read_in_thread(lambda session: self._fn(session, keys))
            return [results.get(key) for key in keys]
        except DatabaseFailure as error:
            return [error] * len(keys)
        except Exception as error:  # noqa: BLE001  # an unknown one of them cannot be read
            if len(keys) == 1:
                return [error]
        return [result for key in keys for result in await self._read_batch([key])]


class _SeparateWrites(Exception):
    """The batch would have to wait for another process's lock."""


def _write_all(session: Session, writes: Sequence[Write]) -> list[Any]:
    try:
        _wait_for_locks(session, LOCK_SECONDS)
        ending = (write.epoch for write in writes if write.ends)
        records.lock(session, (write.epoch for write in writes), ending)
        with requeue_pending.woken_once(session):
            with events.batch(session), at_one_moment(session):
                with side_by_side(session):
                    results = [write.fn(session) for write in writes]
                session.flush()
            _wait_for_locks(session, engine.LOCK_SECONDS)  # waking waits for claims, which are many
        return results
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) == "55P03":
            raise _SeparateWrites from error
        raise


def _wait_for_locks(session: Session, seconds: float) -> None:
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text(f"SET LOCAL lock_timeout = '{seconds}s'"))
