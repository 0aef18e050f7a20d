"""From a database URL as people type it to a SQLAlchemy engine that loses nothing that it has acknowledged.

`database.py` asks for the engine and makes transactions of it. Two databases are spoken: SQLite, for a fleet on one machine, where every
connection is in WAL mode with full flushes and a transaction that writes takes the write lock as it begins; and PostgreSQL through
psycopg, where a statement, a lock and a transaction that nobody goes on with have time limits, and a dead network is found out.

No password is ever shown: what people see of a URL is `shown`, and statements in errors come without their values.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.disk_full import told_in_words

CONNECTIONS = 8
"""Kept open by one process; transactions take milliseconds, so more of them would wait for the disk, not work."""
MORE_CONNECTIONS = 4
"""For a moment, on top of those."""
WAIT_FOR_CONNECTION = 30.0
"""Seconds for one of them to become free."""
BUSY_SECONDS = 5.0
"""How long SQLite waits for the transaction of another process before the transaction is begun anew."""
READS = "groupwise_reads"
"""Execution option of a connection whose transaction only reads."""

STATEMENT_SECONDS = 30
LOCK_SECONDS = 10
IDLE_SECONDS = 15
"""A process that was stopped within a transaction holds its locks no longer than this; half of the lease of an attempt."""

NETWORK_CONNECTION: Mapping[str, Any] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "application_name": "groupwise",
}
"""libpq's words. A peer that has vanished is found out within 25 seconds. What stands in the URL's query goes before these."""

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
    """The URL with the drivers that are used here; UsageError where it names no database that is spoken."""
    given = text.strip()
    scheme, separator, rest = given.partition("://")
    name = scheme.lower()
    if not separator:
        raise UsageError(
            f"The fleet's database is given as a URL: {_FORMS}. What was given has no '://'."
        )
    if name in _SQLITE_NAMES:
        return _sqlite_url(rest)
    if name not in _POSTGRESQL_NAMES:
        raise UsageError(
            f"A fleet keeps its state in SQLite or PostgreSQL: {_FORMS}. What was given begins with {scheme}://."
        )
    try:
        return make_url(f"postgresql+psycopg://{rest}")
    except (
        ArgumentError,
        ValueError,
    ):  # its message may hold parts of what was given, so it is not passed on
        raise UsageError(
            f"The database URL that begins with {scheme}:// cannot be read; expected is {_FORMS}. "
            "Characters like @ : / in a password are written as %40 %3A %2F."
        ) from None


def _sqlite_url(rest: str) -> URL:
    path = rest.removeprefix("/").partition("?")[0]
    if not rest.startswith("/") or not path or path == ":memory:":
        raise UsageError(
            "A fleet's SQLite database is a file, since several threads and commands use it: "
            "sqlite:///fleet.db in this folder, sqlite:////absolute/path, sqlite:///~/path."
        )
    return URL.create("sqlite+pysqlite", database=str(Path(path).expanduser().absolute()))


def shown(url: URL) -> str:
    """The URL as people may see it: without password and query."""
    if url.get_backend_name() == "sqlite":
        return f"sqlite:///{url.database}"
    return URL.create(
        "postgresql", url.username, None, url.host, url.port, url.database
    ).render_as_string()


def engine_for(url: URL) -> Engine:
    """Connects to nothing yet; makes the file of an SQLite database where it is not there."""
    return _sqlite_engine(url) if url.get_backend_name() == "sqlite" else _postgresql_engine(url)


def read_json(text: str) -> Any:
    """A document of a column. People write rows by hand, and one that no parser can descend into must not hide all others."""
    try:
        return json.loads(text)
    except RecursionError:
        return dict(TOO_DEEP)
    except (
        ValueError
    ):  # PostgreSQL keeps nothing else that Python does not read, while SQLite keeps anything
        return dict(UNREADABLE)


def strict_json(text: str) -> Any:
    """For admission, which tells what cannot be read and mends it: ValueError. What SQLite itself calls no JSON is none: a document that is
    too deep, or one with NaN in it."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


TOO_DEEP = {"nested": "too deep to be read"}
"""What is read where a document is nested in a thousand levels."""
UNREADABLE = {"unreadable": "no JSON, or a number of thousands of digits"}
"""And where it is none, or holds what Python does not read."""


# --- SQLite ---------------------------------------------------------------------------------------


def _sqlite_engine(url: URL) -> Engine:
    path = Path(str(url.database))
    _make_file(path)
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


def _make_file(path: Path) -> None:
    """Readable by its owner alone: it holds what users ask of models, and hashes of keys."""
    try:
        with told_in_words(path.parent):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise UsageError(
            f"The fleet's database {path} cannot be opened: {error.strerror}. Name a file in a folder that this user may write to."
        ) from error


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    assert isinstance(connection, sqlite3.Connection)
    connection.isolation_level = None  # `_begin_sqlite` begins transactions, not Python's guess
    connection.text_factory = _text_of_sqlite
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _text_of_sqlite(data: bytes) -> str:
    """SQLite keeps any bytes as text, and one row that somebody wrote in another encoding must not hide all others."""
    return data.decode("utf-8", "replace")


def _begin_sqlite(connection: Connection) -> None:
    """A transaction that reads first and writes later would fail where another has written in between: so it locks at once."""
    reads = connection.get_execution_options().get(READS, False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def refuse_network_file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """SQLite's WAL needs memory that all its users share, which a network file system does not give. Linux alone tells which it is."""
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
    best, kind = -1, ""
    for line in mount_lines:
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), before.split(" ")[4]))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split(" ")[0]
    return kind


# --- PostgreSQL -----------------------------------------------------------------------------------


def connection_arguments(url: URL) -> dict[str, Any]:
    """What psycopg is to be given for a connection of its own: a listener for notifications needs one. Holds the password."""
    given = url.translate_connect_args(username="user", database="dbname") | dict(url.query)
    return {**NETWORK_CONNECTION, **given}


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
    """A server that acknowledges commits before they are on its disk is told not to, for us."""
    driver: Any = getattr(connection, "driver_connection", connection)
    driver.autocommit = True
    try:
        driver.execute(_SESSION_SETTINGS.encode())
    finally:
        driver.autocommit = False


def _say_nothing_of_writing(connection: DBAPIConnection, *_: object) -> None:
    """After a look SQLAlchemy has the next transaction begin as one that may write, instead of as the server has it. A standby refuses
    that in other words than it refuses a write."""
    driver: Any = connection
    driver.read_only = None


READ_ONLY = "25006"
"""PostgreSQL's word for a transaction that may not write."""


def _doubt_read_only_server(context: ExceptionContext) -> None:
    """Who says so to one that may is not the server that is wanted, but a standby, perhaps that one of before: none of the connections that
    lead there is kept, and the next transaction asks anew where the server is."""
    connection = context.connection
    refused = getattr(context.original_exception, "sqlstate", None) == READ_ONLY
    if refused and connection and not connection.get_execution_options().get(READS, False):
        context.is_disconnect = True
