"""The only access to the fleet's database: short transactions that are retried if that is safe, and raise CommitUnknown if it is not.

Callers write a plain function of a `Session` and pass it in: `database.run(fn)` is one transaction, `await database.in_thread(fn)` the same
from asynchronous code, `database.read(fn)` a short read that takes no write lock. The function may be called several times (deadlock,
serialization failure, a restarting server), so it does nothing but read and write rows. Actions that must happen once, after the commit,
are passed to `on_commit`.

One thing is never repeated: a COMMIT that got no answer. It may have succeeded, so it raises `CommitUnknown`, and the caller reads the rows
to find out.

SQLite has one writer at a time: threads of this process take turns by a lock, other processes wait for SQLite's own lock.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from sqlalchemy import URL, Connection, Float, select
from sqlalchemy import exc as sql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import FunctionElement

from groupwise.core.errors import UsageError
from groupwise.core.retry import Backoff
from groupwise.jobs.fleet import disk_full
from groupwise.jobs.fleet.retry import AwayError
from groupwise.jobs.fleet.store import engine as engines
from groupwise.jobs.fleet.store import schema

T = TypeVar("T")
log = logging.getLogger(__name__)

THREADS = 8
"""Transactions of asynchronous code that run at once; as many as there are connections."""
RETRY_TIMEOUT = 15.0
"""Seconds after which a failed transaction is not retried. A PostgreSQL that was killed is back within one or two. More than
`engine.LOCK_SECONDS`, so that a wait for a lock is repeated, and with it longer than `engine.IDLE_SECONDS`."""
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 1.0
"""Seconds between attempts: the bound doubles, and the pause is drawn at random below it, to separate transactions that collided."""

_REPEATABLE = frozenset(
    {
        "40001",  # serialization failure
        "40P01",  # deadlock
        "55P03",  # lock not available in time
        "53300",  # too many connections
    }
)
_HOOKS, _MOMENT = "groupwise_on_commit", "groupwise_moment"


class DatabaseFailure(AwayError):
    """The database cannot be reached, or refuses to work (disk full, time limit). Nothing was committed."""

    code = "database"


class CommitUnknown(AwayError):
    """The connection was lost during COMMIT: the rows may be written or not. Read them before doing anything else."""

    code = "commit_unknown"


class Database:
    """A fleet's database; use it from any thread. Made by `connect`."""

    def __init__(self, url: URL, sleep: Callable[[float], None] = time.sleep) -> None:
        self.name = engines.shown(url)
        """Its URL for display, without password."""
        self.dialect: str = url.get_backend_name()
        """`sqlite` or `postgresql`."""
        self.engine = engines.engine_for(url)
        self._url = url
        self._sleep = sleep
        self._writer = threading.Lock() if self.dialect == "sqlite" else nullcontext()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fleet-database")
        self._inside = threading.local()
        self._was_reached = False

    def __repr__(self) -> str:
        return f"Database({self.name})"

    def connection_arguments(self) -> dict[str, Any]:
        """Arguments of a separate psycopg connection, which listens for notifications. Holds the password: neither show nor log it."""
        return engines.connection_arguments(self._url)

    def run(self, fn: Callable[[Session], T]) -> T:
        """Run one transaction: all writes of `fn` are committed when this returns. `fn` may be called several times.

        Raises CommitUnknown if the connection was lost during COMMIT, and DatabaseFailure if nothing was committed. Errors of `fn` and
        violated constraints are raised unchanged, after a rollback.
        """
        result, hooks = self._retry(lambda: self._write_once(fn))
        for hook in hooks:
            try:
                hook()
            except Exception:  # the rows are committed, and the caller must learn that
                log.exception("what was to follow a commit failed")
        return result

    def read(self, fn: Callable[[Session], T]) -> T:
        """Call `fn` with a snapshot of one moment; it can change nothing. Keep it short: the database keeps old rows for it meanwhile."""
        return self._retry(lambda: self._read_once(fn))

    def at_rest(self, work: Callable[[Connection], T]) -> T:
        """Work on the schema, which makes its own transactions, while no thread of this process writes. Failures become readable errors."""

        def run_alone() -> T:
            with self._writer, self._connection() as connection:
                return work(connection)

        return self._retry(run_alone)

    async def in_thread(self, fn: Callable[[Session], T]) -> T:
        """`run` in a thread. If the caller is cancelled meanwhile, this returns only once the transaction has ended."""
        return await self._in_thread(lambda: self.run(fn))

    async def read_in_thread(self, fn: Callable[[Session], T]) -> T:
        """`read` in a thread."""
        return await self._in_thread(lambda: self.read(fn))

    def close(self) -> None:
        """Wait for work in threads, then close all connections; a second call does nothing."""
        self._threads.shutdown(wait=True)
        self.engine.dispose()

    # --- one transaction --------------------------------------------------------------------------

    def _write_once(self, fn: Callable[[Session], T]) -> tuple[T, list[Callable[[], None]]]:
        with self._writer, self._connection() as connection, _session(connection) as session:
            result = fn(session)
            session.flush()
            # PostgreSQL answers the COMMIT of a transaction in which a statement failed with a silent ROLLBACK.
            if connection.dialect.name == "postgresql":
                import psycopg

                driver = _driver(connection)
                assert driver.info.transaction_status != psycopg.pq.TransactionStatus.INERROR, (
                    "a statement of this transaction failed and its error was caught: wrap it in session.begin_nested()"
                )
            _commit(session, connection)
            return result, list(session.info.get(_HOOKS, ()))

    def _read_once(self, fn: Callable[[Session], T]) -> T:
        with (
            self._connection() as connection,
            _read_only(connection, self.dialect) as reader,
            _session(reader) as session,
        ):
            return fn(session)

    @contextmanager
    def _connection(self) -> Generator[Connection, None, None]:
        try:
            connection = self.engine.connect()
        except sql.DBAPIError as error:
            # A wrong address is an error at once; a server that was reached before is given time to come back.
            if self._was_reached or isinstance(error.orig, sqlite3.Error):
                raise
            self._raise_explained(error, temporary=False)
        self._was_reached = True
        self._inside.busy = True
        try:
            yield connection
        finally:
            self._inside.busy = False
            connection.close()

    def _retry(self, once: Callable[[], T]) -> T:
        assert not getattr(self._inside, "busy", False), (
            "a transaction was begun within another one of the same thread: pass the session on instead"
        )
        end = time.monotonic() + RETRY_TIMEOUT
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, low=0.0)
        while True:
            try:
                return once()
            except sql.DBAPIError as error:
                temporary = _is_safe_to_repeat(error)
                if not temporary or time.monotonic() >= end:
                    self._raise_explained(error, temporary=temporary)
            except sql.TimeoutError as error:
                raise DatabaseFailure(
                    f"{self.name}: all {engines.CONNECTIONS + engines.MORE_CONNECTIONS} connections of this process stayed in "
                    f"use for {engines.WAIT_FOR_CONNECTION:.0f} seconds. The database is overloaded, or a transaction hangs."
                ) from error
            self._sleep(backoff.next())

    def _raise_explained(self, error: sql.DBAPIError, *, temporary: bool) -> NoReturn:
        """Raise constraint violations and faulty statements unchanged, and failures of the database itself as DatabaseFailure."""
        of_database = type(error) in (sql.OperationalError, sql.DatabaseError)
        if not of_database and not _is_safe_to_repeat(error):
            raise error
        reason = str(error.orig).strip().partition("\n")[0].rstrip(".")
        if isinstance(error.orig, sqlite3.Error):
            code = _sqlite_code(error.orig)
            folder = Path(str(self._url.database)).parent
            is_probably_full = code in _FULL_DISK_ERRORS and disk_full.is_full(folder)
            if code == sqlite3.SQLITE_FULL or is_probably_full:
                message = disk_full.words(folder)
                remedy = message[0].upper() + message[1:]
            else:
                remedy = _SQLITE_REMEDIES.get(code, "Fix what it names.")
        else:
            remedy = _POSTGRESQL_REMEDIES.get(
                getattr(error.orig, "sqlstate", None) or "",
                "See that the server runs, and that host, port, user, password and database name are right.",
            )
        raise DatabaseFailure(
            f"{self.name} does not do its work: {reason}. {remedy}",
            temporary=temporary,
        ) from error

    # --- threads ----------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        future: Future[T] = self._threads.submit(work)
        wrapped = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            if not future.cancel():
                while not wrapped.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait({wrapped})
                if not wrapped.cancelled() and (error := wrapped.exception()):
                    log.warning("a transaction failed whose caller had been cancelled: %s", error)
            raise


def connect(url: str) -> Database:
    """The database of this URL: `sqlite:///path` or `postgresql://user:password@host:port/name`. UsageError for any other URL.

    PostgreSQL is first contacted by the first transaction. `check_schema` checks whether the tables exist.
    """
    return Database(engines.parse(url))


def unused() -> None:
    """The default of `used_by`: no process uses the database."""


def check_schema(database: Database, used_by: Callable[[], str | None] = unused) -> None:
    """Return if the tables are those of this version. An SQLite database is upgraded here, unless `used_by` names a process that uses it.
    PostgreSQL is shared by several programs, so there a UsageError explains how to upgrade. UsageError too if the tables are newer."""
    if database.at_rest(schema.is_current):
        return
    if database.dialect == "postgresql":
        raise UsageError(
            f"{database.name} does not have the tables of this version of Groupwise. "
            "Stop the fleet's processes, run `groupwise fleet migrate`, and start them again."
        )
    migrate(database, used_by)


def migrate(database: Database, used_by: Callable[[], str | None] = unused) -> None:
    """Create or upgrade the tables, completely or not at all; any number of processes may do so at once. `used_by` is called while the lock
    is held, and only if something must change."""
    database.at_rest(lambda connection: schema.bring_up_to_date(connection, used_by))


def on_commit(session: Session, hook: Callable[[], None]) -> None:
    """Call the hook once the session's transaction is committed, in the same thread. Its errors are only logged, since the rows are
    written."""
    session.info.setdefault(_HOOKS, []).append(hook)


# --- the clock ------------------------------------------------------------------------------------


class clock(FunctionElement[float]):
    """Seconds since 1970 by the database's clock, in a statement: the only clock for leases, `not_before` and ranks."""

    type = Float()
    inherit_cache = True


@compiles(clock, "postgresql")
def _postgresql_clock(*_: Any, **__: Any) -> str:
    return "extract(epoch FROM clock_timestamp())::float8"


@compiles(clock, "sqlite")
def _sqlite_clock(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


def database_time(session: Session) -> float:
    """Seconds since 1970 by the database's clock."""
    moment: float | None = session.info.get(_MOMENT)
    return session.execute(_NOW).scalar_one() if moment is None else moment


@contextmanager
def at_one_moment(session: Session) -> Generator[None, None, None]:
    """Freeze `seconds` at its value on entry: for short writes of many rows that take no locks of others."""
    session.info[_MOMENT] = database_time(session)
    try:
        yield
    finally:
        del session.info[_MOMENT]


_NOW = select(clock())


# --- the pieces of a transaction ------------------------------------------------------------------


@contextmanager
def _session(connection: Connection) -> Generator[Session, None, None]:
    """A session that is rolled back unless committed. If the connection is dead, the server has rolled back already."""
    session = Session(connection, expire_on_commit=False)
    try:
        yield session
    finally:
        with suppress(sql.DBAPIError):
            session.rollback()
        session.close()


@contextmanager
def _read_only(connection: Connection, dialect: str) -> Generator[Connection, None, None]:
    if dialect == "postgresql":
        yield connection.execution_options(
            **{engines.READS: True}, isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        return
    driver = _driver(connection)
    driver.execute("PRAGMA query_only = ON")
    try:
        yield connection.execution_options(**{engines.READS: True})
    finally:
        driver.execute("PRAGMA query_only = OFF")


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection


def _commit(session: Session, connection: Connection) -> None:
    try:
        session.commit()
    except sql.DBAPIError as error:
        if _answer_is_missing(error):
            raise CommitUnknown(
                "The connection to the database was lost during COMMIT: what was written may be there or not. "
                "Read it before doing it again."
            ) from error
        raise


def _answer_is_missing(error: sql.DBAPIError) -> bool:
    """True if it is unknown whether a COMMIT succeeded. It has certainly failed only if the server stays connected after refusing it; a
    failed write to SQLite's file proves nothing."""
    if isinstance(error.orig, sqlite3.Error):
        return _sqlite_code(error.orig) == sqlite3.SQLITE_IOERR
    return _connection_is_lost(error)


def _is_safe_to_repeat(error: sql.DBAPIError) -> bool:
    """True if the transaction may be repeated. Only valid for errors before, or instead of, a commit."""
    if isinstance(error.orig, sqlite3.Error):
        return _sqlite_code(error.orig) == sqlite3.SQLITE_BUSY
    return _connection_is_lost(error) or getattr(error.orig, "sqlstate", None) in _REPEATABLE


def _connection_is_lost(error: sql.DBAPIError) -> bool:
    """Errors without a state come from the network, unless a value was never sent; those worse than ERROR end the connection."""
    import psycopg

    driver_error = error.orig
    if error.connection_invalidated or not isinstance(driver_error, psycopg.Error):
        return error.connection_invalidated
    if isinstance(driver_error, psycopg.DataError | psycopg.ProgrammingError):
        return False
    return driver_error.sqlstate is None or driver_error.diag.severity_nonlocalized in (
        "FATAL",
        "PANIC",
    )


def _sqlite_code(error: sqlite3.Error) -> int:
    """The primary result code, which is the lowest byte of extended codes."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


# --- messages for users ---------------------------------------------------------------------------

_SQLITE_REMEDIES = {
    sqlite3.SQLITE_BUSY: "Another process has been writing for long; end that one.",
    sqlite3.SQLITE_READONLY: "Give this user the right to write to the file and its folder.",
    sqlite3.SQLITE_CANTOPEN: "See that its folder is there and may be written to.",
    sqlite3.SQLITE_CORRUPT: "The file is damaged: restore it from a copy.",
    sqlite3.SQLITE_NOTADB: "The file is not an SQLite database: name another, or restore it from a copy.",
    sqlite3.SQLITE_IOERR: "Its disk fails to read or write; see the system's log.",
}
_FULL_DISK_ERRORS = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""SQLite reports these when the disk is full, but also for other causes."""
_POSTGRESQL_REMEDIES = {
    engines.READ_ONLY: "This server is read-only, as a standby is: see that host and port lead to the one that takes writes.",
    "57014": "A statement took too long: see what else the server does.",
    "55P03": "Another transaction, of a backup perhaps, holds what this one needs: see what else the server does.",
    "40P01": "Transactions keep waiting for each other: see what else the server does.",
    "40001": "Transactions keep getting in each other's way: see what else the server does.",
    "53100": "Free space on its disk.",
    "53300": "Raise its max_connections, or run fewer processes of the fleet.",
}
