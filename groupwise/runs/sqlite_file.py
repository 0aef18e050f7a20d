"""The common part of all SQLite files of the package: opening, format, and advice for errors of SQLite or the disk.

A run's record (`database.py`) is such a file, and so is the ledger of a training server. Each has one writer and any number of readers
(WAL). Its format is a list of migrations that only go forward. `PRAGMA user_version` counts the ones applied; all missing ones are
applied in one transaction, and a file of a newer version of the package is refused. Every commit is flushed to the disk before it
counts (`synchronous = FULL`).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError

BUSY_SECONDS = 30.0
"""Seconds to wait for another connection's transaction; a step's transaction takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Format:
    """The format of one kind of file."""

    name: str
    """Name of such a file in messages: `the record of a Groupwise run`."""
    application_id: int
    """SQLite's `application_id`, which marks a file as one of this kind."""
    migrations: tuple[str, ...]
    if_another: str = ""
    """Advice if another kind of file is in its place."""

    @property
    def newest(self) -> int:
        """The version after all migrations."""
        return len(self.migrations)


def connect(path: Path, mode: str, busy_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    """A connection in autocommit mode; `mode` as in SQLite's URIs."""
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(
        address, uri=True, timeout=busy_seconds, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def connect_writer(
    path: Path, kind: Format, action: str, busy_seconds: float = BUSY_SECONDS
) -> sqlite3.Connection:
    """Open or create the file, in its newest format; `action` names the migration at its crash points."""
    with closed_on_failure(connect(path, "rwc", busy_seconds)) as connection:
        check_format(path, connection, kind)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        if version(connection) < kind.newest:
            begin_migration(connection, kind)
            atomic_files.commit(connection, action)
        return connection


@contextmanager
def closed_on_failure(connection: sqlite3.Connection) -> Generator[sqlite3.Connection, None, None]:
    """Close the connection if anything inside raises."""
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


# --- format ---------------------------------------------------------------------------------------


def version(connection: sqlite3.Connection) -> int:
    """The number of migrations that were applied to the file; 0: it is empty."""
    return connection.execute("PRAGMA user_version").fetchone()[0]


def check_format(path: Path, connection: sqlite3.Connection, kind: Format) -> None:
    """Refuse a file of another kind, and one of a newer version of the package, with a StoreError."""
    # The file may be from another user: its schema must not run unsafe functions.
    connection.execute("PRAGMA trusted_schema = OFF")
    mark = connection.execute("PRAGMA application_id").fetchone()[0]
    is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if mark != kind.application_id and not is_empty:
        refusal = f"{path} is an SQLite database, but not {kind.name}."
        raise StoreError(" ".join(part for part in (refusal, kind.if_another) if part))
    if version(connection) > kind.newest:
        raise StoreError(
            f"{path} has format {version(connection)}; this version of Groupwise knows formats up to {kind.newest}. "
            "It was written by a newer version: upgrade Groupwise to use it."
        )
    for name, sql in connection.execute(_COMPUTED):
        if sql not in _views_of(kind, version(connection)):
            raise StoreError(
                f"{path}: {str(name)[:40]!r} in it is computed, and not by a version of Groupwise, so that reading it may have no end. "
                "Somebody else has made or changed the file; do not use it."
            )


_COMPUTED = """
    SELECT name, sql FROM sqlite_master WHERE type = 'view'
    UNION ALL SELECT m.name, NULL FROM sqlite_master m, pragma_table_xinfo(m.name) x WHERE m.type = 'table' AND x.hidden IN (2, 3)
"""
"""SQL for the views, and the tables with generated columns, in a file."""


@cache
def _views_of(kind: Format, number: int) -> frozenset[str]:
    """The SQL of the views that a file has after the first `number` migrations."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for migration in kind.migrations[:number]:
            connection.executescript(migration)
        views = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'view'")
        return frozenset(sql for (sql,) in views)


def begin_migration(connection: sqlite3.Connection, kind: Format) -> None:
    """Apply all missing migrations, in one transaction that is left open."""
    missing = range(version(connection), kind.newest)
    scripts = (f"{kind.migrations[index]} PRAGMA user_version = {index + 1};" for index in missing)
    connection.executescript(
        f"BEGIN IMMEDIATE; PRAGMA application_id = {kind.application_id}; {' '.join(scripts)}"
    )


# --- messages -------------------------------------------------------------------------------------

FREE_SPACE = "Free space on that disk"
_REMEDIES: Mapping[int, str] = {
    sqlite3.SQLITE_BUSY: "Another process is writing to it; end that one",
    sqlite3.SQLITE_LOCKED: "Another process is writing to it; end that one",
    sqlite3.SQLITE_READONLY: "Give this user the right to write there",
    sqlite3.SQLITE_CANTOPEN: "See that the folder is there and may be read and written",
    sqlite3.SQLITE_CORRUPT: "The file is damaged: restore it from a copy",
    sqlite3.SQLITE_NOTADB: "The file is damaged: restore it from a copy",
    sqlite3.SQLITE_IOERR: "The disk fails to read or write; see the system's log",
}
"""Remedies by SQLite's primary code."""


def remedy(path: Path, error: sqlite3.Error) -> str:
    """Advice about the error: a sentence without its full stop."""
    if is_full(path, error):
        return FREE_SPACE
    return _REMEDIES.get(_primary_code(error), "Fix what it names")


def is_full(path: Path, error: sqlite3.Error) -> bool:
    """True if SQLite reports a full disk, or a write failed and the disk has no room (SQLite's shared-memory file fails that way)."""
    if _primary_code(error) == sqlite3.SQLITE_FULL:
        return True
    if _primary_code(error) not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return False
    try:
        return os.statvfs(path.parent).f_bavail == 0
    except OSError:  # the folder does not exist
        return False


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary error code, the lowest byte of its extended codes; 0 for errors raised by Python's module."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
