"""The record of a run: one SQLite file, opened and written safely.

One writer, any number of readers (WAL). Every write is a transaction that takes the write lock when it starts and is
flushed to the disk when it ends (`synchronous = FULL`): a committed step survives a power cut. Every SQLite error
becomes a StoreError that names the file and says what to do.
"""

from __future__ import annotations

import sqlite3
import struct
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from groupwise.runs import text_index
from groupwise.runs.schema import (
    APPLICATION_ID,
    LENGTHS_SINCE,
    MIGRATIONS,
    SINCE,
    TABLES_SINCE,
    TASKS_SINCE,
)
from groupwise.runs.sqlite_file import (
    Format,
    check_format,
    closed_on_failure,
    connect,
    connect_writer,
    remedy,
    version,
)

FORMAT = Format("the record of a Groupwise run", APPLICATION_ID, MIGRATIONS)

Row = tuple[Any, ...]

WRITER_CACHE_KIB = 65_536
"""Most memory for pages of the file, in KiB. With SQLite's 2 MB a rollout costs a fifth more once there are 100,000: each changes pages of
all indexes."""
WRITER_LOG_PAGES = 8000
"""Pages of SQLite's write-ahead log (32 MB) after which they are copied into the file. With SQLite's 1000 this happens after every second
step of a record with 1,000,000 rollouts, and copies most pages of the indexes each time."""


class Database:
    """An open run record. One connection; a lock allows one thread at a time to use it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.indexed = text_index.is_usable(connection)
        """True if the full-text index can be used and must be kept up to date."""
        self.tasks_indexed = version(connection) >= TASKS_SINCE
        """True if `rollouts` and `groups` have an indexed column `task`; otherwise a group's task is read from its example's columns."""
        self.lengths_indexed = version(connection) >= LENGTHS_SINCE
        """True if indexes of lengths and of truncated rollouts exist."""
        connection.create_function("lowered", 1, text_index.sql_lower, deterministic=True)
        self._connection = connection
        self._lock = threading.RLock()

    @classmethod
    def open_for_writing(cls, path: Path) -> Database:
        """Open or create the file, and migrate it to the newest format."""
        with (
            explaining_sqlite(path),
            closed_on_failure(connect_writer(path, FORMAT, "migration")) as connection,
        ):
            connection.execute(f"PRAGMA cache_size = -{WRITER_CACHE_KIB}")
            connection.execute(f"PRAGMA wal_autocheckpoint = {WRITER_LOG_PAGES}")
            text_index.prepare(connection)
            return cls(path, connection)

    @classmethod
    def open_for_reading(cls, path: Path) -> Database:
        """Open an existing file without changing its data. One of an older format is read through views of the newest format.

        The mode is `rw` because SQLite deletes the WAL files only when the last connection closes and may write; with `ro` they would stay.
        """
        with explaining_sqlite(path):
            connection = connect(path, "rw")
            try:
                connection.execute("SELECT 1 FROM sqlite_master").fetchone()
            except sqlite3.OperationalError:
                # In a read-only folder the writer's WAL files cannot be shared; `immutable` reads only the checkpointed data.
                connection.close()
                connection = connect(path, "ro&immutable=1")
        with explaining_sqlite(path), closed_on_failure(connection):
            check_format(path, connection, FORMAT)
            if version(connection) == 0:
                raise StoreError(f"{path} is empty: nothing was recorded in it.")
            if version(connection) < FORMAT.newest:
                # The tables of an older format stay as they are, behind temporary views that add the
                # missing columns. So a page of a large old record costs only the rows that it reads,
                # and rows that a writer of the older format adds are visible.
                file_version = version(connection)
                missing: dict[str, dict[str, str]] = {}
                for since, table, columns in SINCE:
                    if file_version < since:
                        missing.setdefault(table, {}).update(columns)
                connection.execute("PRAGMA temp_store = MEMORY")
                for table, columns in missing.items():
                    added_columns = ", ".join(f"{sql} AS {name}" for name, sql in columns.items())
                    connection.execute(
                        f"CREATE TEMP VIEW {table} AS SELECT {table}.*, {added_columns} FROM main.{table}"
                    )
                for since, table, names in TABLES_SINCE:
                    if file_version < since:
                        null_columns = ", ".join(f"NULL AS {name}" for name in names)
                        connection.execute(
                            f"CREATE TEMP VIEW {table} AS SELECT {null_columns} WHERE FALSE"
                        )
            connection.execute("PRAGMA query_only = ON")
            return cls(path, connection)

    def close(self) -> None:
        """Close the connection; committed data stays."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self, action: str) -> Generator[None, None, None]:
        """Everything executed inside is committed as one transaction, or not at all; `action` names it at its crash points."""
        with self._lock, explaining_sqlite(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                atomic_files.commit(self._connection, action)
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def execute(self, statement: str, values: Row = ()) -> sqlite3.Cursor:
        """Run one statement inside a transaction."""
        return self._connection.execute(statement, values)

    def insert(self, table: str, **columns: Any) -> int:
        """Add one row inside a transaction; returns its row id."""
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        row_id = self.execute(
            f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(columns.values())
        ).lastrowid
        assert row_id is not None
        return row_id

    def insert_many(self, table: str, columns: Iterable[str], rows: Iterable[Row]) -> None:
        """Add rows inside a transaction."""
        names = tuple(columns)
        marks = ", ".join("?" * len(names))
        self._connection.executemany(
            f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", rows
        )

    def all(self, query: str, values: Row = ()) -> list[Row]:
        """All rows of a query."""
        with self._lock, explaining_sqlite(self.path):
            return self._connection.execute(query, values).fetchall()

    def query_within(self, query: str, values: Row, instructions: int) -> list[Row] | None:
        """All rows of a query, or None if SQLite's virtual machine would need more than `instructions` instructions to find them."""
        with self._lock, explaining_sqlite(self.path):
            self._connection.set_progress_handler(lambda: 1, instructions)
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                    raise
                return None
            finally:
                self._connection.set_progress_handler(None, 0)

    def stream(self, query: str, values: Row, at_once: int) -> Generator[list[Row]]:
        """All rows of a query, `at_once` at a time, all from the same state; each batch may be fetched in another thread.

        Until it ends, this connection sees only that state, and the WAL file keeps what a writer commits meanwhile.
        """
        with explaining_sqlite(self.path):
            with self._lock:
                self._connection.execute("BEGIN")
                cursor = self._connection.execute(query, values)
            try:
                while True:
                    with self._lock:
                        rows = cursor.fetchmany(at_once)
                    if not rows:
                        return
                    yield rows
            finally:
                with self._lock:
                    self._connection.execute("ROLLBACK")

    def one(self, query: str, values: Row = ()) -> Row:
        """The first row of a query."""
        return self.all(query, values)[0]

    @contextmanager
    def snapshot(self) -> Generator[None, None, None]:
        """All reads inside see the same state, even if the writer commits meanwhile."""
        with self._lock, explaining_sqlite(self.path):
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("ROLLBACK")

    def rebuild_text_index(self) -> None:
        """Rebuild the full-text index from the tables; do nothing if SQLite lacks FTS5."""
        with self._lock, explaining_sqlite(self.path):
            text_index.prepare(self._connection, force=True)
            self.indexed = text_index.is_usable(self._connection)


@contextmanager
def explaining_sqlite(path: Path) -> Generator[None, None, None]:
    """Turn SQLite's errors into a StoreError that says what to do."""
    try:
        yield
    except (OverflowError, struct.error) as error:
        raise StoreError(
            f"{path}: a number does not fit ({error}); token ids have 32 bits, seeds 64 and no sign."
        ) from error
    except sqlite3.Error as error:
        raise StoreError(
            f"cannot use the run's record {path}: {error}. {remedy(path, error)}, then go on with --resume: "
            "every committed step still stands."
        ) from error
