"""Opens `server.db`, and explains errors of the disk or of SQLite.

Only one process has it open for writing: the HTTP side. Others may read it at the same time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from groupwise.core.errors import StoreError
from groupwise.runs.sqlite_file import FREE_SPACE, Format, connect_writer, is_full, remedy
from groupwise.server.ledger.schema import APPLICATION_ID, MIGRATIONS

FORMAT = Format(
    "the ledger of a training server",
    APPLICATION_ID,
    MIGRATIONS,
    if_another="Choose another --output-dir.",
)
BUSY_SECONDS = 5.0
"""How long a commit waits for another connection's lock (e.g. a manual copy). Clients wait as well, so it is short."""


class DiskFull(StoreError):
    """Nothing was stored, because the disk is full. Acknowledged data is safe, and writing continues once there is room."""

    code = "disk_full"


class LedgerClosed(StoreError):
    """The server is shutting down and has closed its ledger: nothing more is read or stored. The next server answers the same request."""

    code = "shutting_down"


def open_file(path: Path) -> sqlite3.Connection:
    """Open or create the ledger; the connection starts no transactions by itself. StoreError if it cannot be used."""
    with explaining_sqlite(path):
        return connect_writer(path, FORMAT, "server migration", BUSY_SECONDS)


@contextmanager
def explaining_sqlite(path: Path) -> Generator[None, None, None]:
    """Convert errors of SQLite into a StoreError with a remedy."""
    try:
        yield
    except sqlite3.Error as error:
        raise explanation(path, error) from error


def explanation(path: Path, error: sqlite3.Error) -> StoreError:
    """The error as a DiskFull or other StoreError, with the cause and remedy for the operator."""
    if is_full(path, error):
        return DiskFull(
            f"cannot write the server's ledger {path}: {error}. {FREE_SPACE}; writing goes on by itself, and what was acknowledged stands."
        )
    return StoreError(f"cannot use the server's ledger {path}: {error}. {remedy(path, error)}.")
