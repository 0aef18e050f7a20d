"""Turns a database URL as users type it into a SQLAlchemy engine that loses nothing it has acknowledged.

`database.py` makes transactions with the engine. Two databases are supported: SQLite, for a fleet on one machine, where every connection is
in WAL mode with full flushes and a writing transaction takes the write lock at its start; and PostgreSQL through psycopg, where statements,
locks and idle transactions have time limits, and a dead network is detected.

No password is ever shown: users see `shown(url)`, and statements in errors come without their values.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.disk_full import explain_disk_errors

CONNECTIONS = 8
"""Connections that one process keeps open; transactions take milliseconds, so more of them would only wait for the disk."""
MORE_CONNECTIONS = 4
"""Further connections, opened temporarily."""
WAIT_FOR_CONNECTION = 30.0
"""Seconds to wait for a free connection."""
BUSY_SECONDS = 5.0
"""Seconds that SQLite waits for another process's transaction before ours is retried."""
READS = "groupwise_reads"
"""Execution option of a connection whose transaction only reads."""

STATEMENT_SECONDS = 30
LOCK_SECONDS = 10
IDLE_SECONDS = 15
"""A process that was stopped within a transaction holds its locks for at most this many seconds: a little more than half a lease."""

NETWORK_CONNECTION: Mapping[str, Any] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "application_name": "groupwise",
}
"""Options of libpq. A vanished peer is detected within 25 seconds. The URL's query overrides these."""

_SQLITE_NAMES = ("sqlite", "sqlite+pysqlite", "sqlite+aiosqlite")
_POSTGRESQL_NAMES = (
    "postgresql",
    "postgres",
    "postgresql+psycopg",
    "postgresql+psycopg2",
    "postgresql+asyncpg",
)
_FORMS = (
    "sqlite:///PATH (sqlite:////absolute/path) or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
)
_NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs afs 9p ceph fuse.ceph fuse.sshfs fuse.glusterfs glusterfs fuse.s3fs "
    "fuse.gcsfuse fuse.rclone fuse.juicefs beegfs lustre gpfs".split()
)


def parse(text: str) -> URL:
    """The URL with the drivers used here; UsageError if it names no supported database."""
    stripped = text.strip()
    scheme, separator, remainder = stripped.partition("://")
    name = scheme.lower()
    if not separator:
        raise UsageError(
            f"The fleet's database is given as a URL: {_FORMS}. What was given has no '://'."
        )
    if name in _SQLITE_NAMES:
        path = remainder.removeprefix("/").partition("?")[0]
        if not remainder.startswith("/") or not path or path == ":memory:":
            raise UsageError(
                "A fleet's SQLite database is a file, since several threads and commands use it: "
                "sqlite:///fleet.db in this folder, sqlite:////absolute/path, sqlite:///~/path."
            )
        return URL.create("sqlite+pysqlite", database=str(Path(path).expanduser().absolute()))
    if name not in _POSTGRESQL_NAMES:
        raise UsageError(
            f"A fleet keeps its state in SQLite or PostgreSQL: {_FORMS}. What was given begins with {scheme}://."
        )
    try:
        return make_url(f"postgresql+psycopg://{remainder}")
    except (
        ArgumentError,
        ValueError,
    ):
        # The message of the error may hold parts of the URL, so it is not passed on.
        raise UsageError(
            f"The database URL that begins with {scheme}:// cannot be read; expected is {_FORMS}. "
            "Characters like @ : / in a password are written as %40 %3A %2F."
        ) from None


def shown(url: URL) -> str:
    """The URL for display: without password and query."""
    if url.get_backend_name() == "sqlite":
        return f"sqlite:///{url.database}"
    return URL.create(
        "postgresql", url.username, None, url.host, url.port, url.database
    ).render_as_string()


def engine_for(url: URL) -> Engine:
    """An engine that is not connected yet; creates the file of an SQLite database if there is none."""
    return _sqlite_engine(url) if url.get_backend_name() == "sqlite" else _postgresql_engine(url)


def upsert(session: Session, table: type[Any] | Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows ON CONFLICT."""
    is_sqlite = session.get_bind().dialect.name == "sqlite"
    return sqlite.insert(table) if is_sqlite else postgresql.insert(table)


def read_json(text: str) -> Any:
    """Read a JSON column. Users write rows by hand, and an unreadable document must not hide all others."""
    try:
        return json.loads(text)
    except RecursionError:
        return dict(TOO_DEEP)
    except ValueError:
        # PostgreSQL keeps nothing else that Python does not read, while SQLite keeps anything.
        return dict(UNREADABLE)


def strict_json(text: str) -> Any:
    """Read JSON for admission, which reports and repairs documents that raise ValueError. As in SQLite, a document that is too deep or
    holds NaN is not JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


TOO_DEEP = {"nested": "too deep to be read"}
"""The value used for a document that is nested a thousand levels deep."""
UNREADABLE = {"unreadable": "no JSON, or a number of thousands of digits"}
"""The value used for a document that is not JSON, or holds a value that Python cannot read."""


# --- SQLite ---------------------------------------------------------------------------------------


def _sqlite_engine(url: URL) -> Engine:
    path = Path(str(url.database))
    try:  # readable by its owner only: it holds users' prompts to models, and hashes of keys
        with explain_disk_errors(path.parent):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise UsageError(
            f"The fleet's database {path} cannot be opened: {error.strerror}. Name a file in a folder that this user may write to."
        ) from error
    refuse_network_file_system(path)
    engine = create_engine(
        url,
        hide_parameters=True,
        pool_size=CONNECTIONS,
        max_overflow=MORE_CONNECTIONS,
        pool_timeout=WAIT_FOR_CONNECTION,
        connect_args={"timeout": BUSY_SECONDS},
        json_deserializer=read_json,
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    assert isinstance(connection, sqlite3.Connection)
    connection.isolation_level = None  # `_begin_sqlite` starts transactions, instead of Python
    # SQLite stores any bytes as text: one row in another encoding must not hide all others
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: Connection) -> None:
    """Begin a writing transaction with its lock: one that reads first and writes later would fail if another has written in between."""
    reads = connection.get_execution_options().get(READS, False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def refuse_network_file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Refuse a network file system: SQLite's WAL needs memory shared by all processes, which such a file system does not provide. Only
    checked on Linux."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return
    kind = file_system(path.resolve(), lines)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise UsageError(
            f"{path} lies on a network file system ({kind}), where SQLite loses data. Name a file on a local disk "
            "(sqlite:////var/lib/…), or use PostgreSQL (postgresql://…)."
        )


def file_system(path: Path, mount_lines: Sequence[str]) -> str:
    """The type of the file system that holds an absolute path, by the lines of /proc/self/mountinfo; later mounts cover earlier ones."""
    longest, kind = -1, ""
    for line in mount_lines:
        mount_fields, _, source_fields = line.partition(" - ")
        point = Path(
            re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), mount_fields.split(" ")[4])
        )
        if path.is_relative_to(point) and len(point.parts) >= longest:
            longest, kind = len(point.parts), source_fields.split(" ")[0]
    return kind


# --- PostgreSQL -----------------------------------------------------------------------------------


def connection_arguments(url: URL) -> dict[str, Any]:
    """Arguments of a separate psycopg connection, which listens for notifications. Holds the password."""
    url_arguments = url.translate_connect_args(username="user", database="dbname") | dict(url.query)
    return {**NETWORK_CONNECTION, **url_arguments}


def _postgresql_engine(url: URL) -> Engine:
    engine = create_engine(
        url,
        hide_parameters=True,
        isolation_level="READ COMMITTED",
        pool_size=CONNECTIONS,
        max_overflow=MORE_CONNECTIONS,
        pool_timeout=WAIT_FOR_CONNECTION,
        connect_args={k: v for k, v in NETWORK_CONNECTION.items() if k not in url.query},
        json_deserializer=read_json,
    )
    event.listen(engine, "connect", _prepare_postgresql)
    event.listen(engine, "checkout", _say_nothing_of_writing)
    event.listen(engine, "handle_error", _doubt_read_only_server)
    return engine


_SESSION_SETTINGS = f"""
SELECT set_config('statement_timeout', '{STATEMENT_SECONDS}s', false),
       set_config('lock_timeout', '{LOCK_SECONDS}s', false),
       set_config('idle_in_transaction_session_timeout', '{IDLE_SECONDS}s', false),
       set_config('jit', 'off', false),
       set_config('timezone', 'UTC', false),
       set_config('synchronous_commit',
                  CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END,
                  false)
"""


def _prepare_postgresql(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    """Apply our session settings. On a server that acknowledges commits before they are on its disk, that is switched off for our
    sessions."""
    driver: Any = getattr(connection, "driver_connection", connection)
    driver.autocommit = True
    try:
        driver.execute(_SESSION_SETTINGS.encode())
    finally:
        driver.autocommit = False


def _say_nothing_of_writing(connection: DBAPIConnection, *_: object) -> None:
    """Reset read_only: after a read-only transaction SQLAlchemy would start the next one as READ WRITE instead of with the server's
    default, and a standby refuses that with another error than a write."""
    driver: Any = connection
    driver.read_only = None


READ_ONLY = "25006"
"""PostgreSQL's error code for a write in a read-only transaction."""


def _doubt_read_only_server(context: ExceptionContext) -> None:
    """Drop the connections to a server that refuses writes as read-only: it is a standby, perhaps the former primary. The next transaction
    resolves the server's address again."""
    connection = context.connection
    is_read_only = getattr(context.original_exception, "sqlstate", None) == READ_ONLY
    if is_read_only and connection and not connection.get_execution_options().get(READS, False):
        context.is_disconnect = True
