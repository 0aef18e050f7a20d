"""How `server.db` is opened, brought to the newest format, and what is said where the disk or SQLite refuses it.

One process has it open for writing: the HTTP side. Every commit is flushed to the disk before it counts (`synchronous = FULL`), in a
write-ahead log, so that others may read the file meanwhile.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from groupwise.errors import StoreError
from groupwise.runs import durable
from groupwise.runs.database import connect
from groupwise.server.ledger.schema import APPLICATION_ID, MIGRATIONS

BUSY_MILLISECONDS = 5000
"""How long a commit waits for a foreign connection (a copy being made by hand). Clients wait with it, so it is short."""


class DiskFull(StoreError):
    """Nothing was kept, because the disk has no room. Free some; what was acknowledged stands, and writing goes on by itself."""

    code = "disk_full"


def open_file(path: Path) -> sqlite3.Connection:
    """Open or make the ledger; a connection without transactions of its own. StoreError where it cannot be used."""
    with explained(path):
        connection = connect(path, "rwc")
        try:
            _check_format(path, connection)
            connection.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            _migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection


@contextmanager
def explained(path: Path) -> Generator[None, None, None]:
    """Turn what SQLite says into a StoreError that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise explanation(path, error) from error


def explanation(path: Path, error: sqlite3.Error) -> StoreError:
    """What a client's operator should know and do: DiskFull, or another StoreError."""
    if _is_full(path, error):
        return DiskFull(
            f"cannot write the server's ledger {path}: {error}. Free space on that disk; writing goes on by itself, "
            "and what was acknowledged stands."
        )
    return StoreError(f"cannot use the server's ledger {path}: {error}. {_remedy(error)}")


def _is_full(path: Path, error: sqlite3.Error) -> bool:
    """SQLite's word for it, or a failed write where the disk has no room: its shared-memory file fails so."""
    if _primary_code(error) == sqlite3.SQLITE_FULL:
        return True
    if _primary_code(error) not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return False
    try:
        return os.statvfs(path.parent).f_bavail == 0
    except OSError:  # the folder is not there
        return False


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's extended codes carry the primary one in their lowest byte."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


_REMEDIES = {
    sqlite3.SQLITE_BUSY: "Another process is writing to it; end that one.",
    sqlite3.SQLITE_READONLY: "Give this user the right to write there.",
    sqlite3.SQLITE_CANTOPEN: "See that the folder is there and may be read and written.",
    sqlite3.SQLITE_CORRUPT: "The file is damaged: restore it from a copy.",
    sqlite3.SQLITE_NOTADB: "The file is damaged: restore it from a copy.",
    sqlite3.SQLITE_IOERR: "The disk fails to read or write; see the system's log.",
}


def _remedy(error: sqlite3.Error) -> str:
    return _REMEDIES.get(_primary_code(error), "Mend what it names.")


def _version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _check_format(path: Path, connection: sqlite3.Connection) -> None:
    mark = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if mark != APPLICATION_ID and not empty:
        raise StoreError(
            f"{path} is an SQLite database, but not the ledger of a training server. Choose another --output-dir."
        )
    if _version(connection) > len(MIGRATIONS):
        raise StoreError(
            f"{path} has format {_version(connection)}; this version of Groupwise knows formats up to {len(MIGRATIONS)}. "
            "It was written by a newer version: upgrade Groupwise to use it."
        )


def _migrate(connection: sqlite3.Connection) -> None:
    """All migrations that the file lacks, or none of them."""
    missing = range(_version(connection), len(MIGRATIONS))
    if not missing:
        return
    scripts = (f"{MIGRATIONS[each]} PRAGMA user_version = {each + 1};" for each in missing)
    connection.executescript(
        f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID};{' '.join(scripts)}"
    )
    durable.commit(connection, "server migration")
