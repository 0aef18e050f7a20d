"""Whether a database has the tables that this version works with, and how it gets them.

`migrations/` holds the way from each released version to the next. Triggers and views are no part of that way: they follow from
`states.py`, so they are dropped before it and made anew after it. All of it is one transaction under a lock: a process that dies on the
way leaves what was there, and of two that begin at once the second finds the work done.

Both only ever go forward: an older version refuses what a newer one has made. And where all is current nothing is touched, since to make a
trigger keeps everybody else waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.store import triggers, views
from groupwise.jobs.fleet.store.engine import READS
from groupwise.jobs.fleet.store.tables import Base

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

VERSION_TABLE = "fleet_version"
RULES = 1
"""The number of these triggers and views. It goes up when they change after a release: an older version then leaves them alone."""
FINGERPRINT = "fleet_fingerprint"
"""A view with one value: the number of triggers and views, and the hash of the statements that made them."""
_LOCK = 0x67726F7570776973
"""For `pg_advisory_xact_lock`; any number that nobody else uses."""
_LOCK_MILLISECONDS = 1500
"""For a lock on one of the tables. Who waits for it has everybody else wait behind, so that it is given up soon, and tried again; but not
before PostgreSQL has ended a vacuum of its own that is in the way, which it does after a second (`deadlock_timeout`)."""


def is_current(connection: Connection) -> bool:
    """Whether tables, triggers and views are those of this version; UsageError where they are those of a newer one."""
    return _is_current(connection.execution_options(**{READS: True}))


def _is_current(connection: Connection) -> bool:
    there = _fingerprint_there(connection)
    # Read without alembic: every command asks this first, and to load that takes longer than what most of them do.
    made = there == _fingerprint(connection.dialect.name)
    if made and _version_there(connection) == newest_revision():
        return True
    _refuse_newer_rules(there)
    _refuse_newer_tables(_revision(connection))
    return False


def bring_up_to_date(connection: Connection, used_by: Callable[[], str | None]) -> None:
    """UsageError where the database belongs to a newer version, or to something else, or is used as it is: by whom `used_by` says."""
    with _exclusively(connection):
        if _is_current(connection):
            return
        if _revision(connection) is None:
            _refuse_foreign_tables(connection)
        elif (who := used_by()) is not None:
            raise UsageError(
                f"The fleet's database was made by another version of Groupwise, and {who} works with it as it is. Restart that with this "
                "version (`groupwise fleet up`), which brings the database up to date on its way. Nothing was changed."
            )
        _drop_derived(connection)
        _upgrade(connection)
        _make_derived(connection)
        if connection.dialect.name == "sqlite":
            _refuse_broken_references(connection)


def newest_revision() -> str:
    """Files of migrations are named after their revisions, which are numbered."""
    files = (Path(__file__).parent / "migrations" / "versions").glob("[0-9]*_*.py")
    return max(file.name.partition("_")[0] for file in files)


@contextmanager
def _exclusively(connection: Connection) -> Generator[None, None, None]:
    if connection.dialect.name == "sqlite":
        with _unchecked_references(connection), connection.begin():
            yield
        return
    with connection.begin():
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        connection.execute(text(f"SET LOCAL lock_timeout = {_LOCK_MILLISECONDS}"))
        yield


@contextmanager
def _unchecked_references(connection: Connection) -> Generator[None, None, None]:
    """SQLite changes a table by making another in its place, at which references to it would break; within a transaction it
    takes no such order."""
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("PRAGMA foreign_keys = OFF")
    try:
        yield
    finally:
        driver.execute("PRAGMA foreign_keys = ON")


def _refuse_broken_references(connection: Connection) -> None:
    if (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first()) is not None:
        table, row, parent, _ = broken
        raise UsageError(
            f"Row {row} of {table} in the fleet's database names one of {parent} that is not there: somebody has deleted that by hand. "
            f"Delete that row too (`DELETE FROM {table} WHERE rowid = {row}`), or put a copy of the database in its place. Nothing was "
            "changed."
        )


def _refuse_newer_rules(found: str | None) -> None:
    """`found`: the fingerprint."""
    number = int((found or "").rpartition(":")[0] or 0)
    if number > RULES:
        raise UsageError(
            f"The fleet's database was made by a newer version of Groupwise (its rules are number {number}, this version knows up to "
            f"{RULES}). Upgrade Groupwise here."
        )


def _refuse_newer_tables(found: str | None) -> None:
    known = {each.revision for each in _scripts().walk_revisions()}
    if found is not None and found not in known:
        raise UsageError(
            f"The fleet's database was made by a newer version of Groupwise (its revision is {found}, this version knows up to "
            f"{_scripts().get_current_head()}). Upgrade Groupwise here."
        )


def _refuse_foreign_tables(connection: Connection) -> None:
    taken = sorted(set(inspect(connection).get_table_names()) & set(Base.metadata.tables))
    if taken:
        raise UsageError(
            f"The database holds tables of something else: {', '.join(taken)}. Give the fleet a database of its own."
        )


def _revision(connection: Connection) -> str | None:
    from alembic.runtime.migration import MigrationContext

    options = {"version_table": VERSION_TABLE}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _upgrade(connection: Connection) -> None:
    from alembic import command

    command.upgrade(_config(connection), "head")


def _config(connection: Connection | None = None) -> Config:
    from alembic.config import Config

    config = Config(attributes={"connection": connection} if connection else {})
    config.set_main_option("script_location", "groupwise.jobs.fleet.store:migrations")
    config.set_main_option("path_separator", "os")
    return config


def _scripts() -> ScriptDirectory:
    from alembic.script import ScriptDirectory

    return ScriptDirectory.from_config(_config())


# --- triggers and views ---------------------------------------------------------------------------


def _make_derived(connection: Connection) -> None:
    dialect = connection.dialect.name
    for statement in _derived(dialect):
        connection.exec_driver_sql(statement)
    connection.exec_driver_sql(
        f"CREATE VIEW {FINGERPRINT} AS SELECT '{_fingerprint(dialect)}' AS fingerprint"
    )


def _derived(dialect: str) -> Iterator[str]:
    yield from triggers.statements(dialect)
    yield from views.statements()


def _fingerprint(dialect: str) -> str:
    made = hashlib.sha256("\n".join(_derived(dialect)).encode()).hexdigest()
    return f"{RULES}:{made}"


def _fingerprint_there(connection: Connection) -> str | None:
    if FINGERPRINT not in inspect(connection).get_view_names():
        return None
    return connection.exec_driver_sql(f"SELECT fingerprint FROM {FINGERPRINT}").scalar_one()


def _version_there(connection: Connection) -> str:
    """Where there is a fingerprint there is one."""
    return connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar_one()


def _drop_derived(connection: Connection) -> None:
    """Those of any version: triggers go by their prefix. Views that somebody else has made stay, and hold up the migration of
    PostgreSQL where they look at ours."""
    for name in (FINGERPRINT, *views.NAMES):
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
    if connection.dialect.name == "sqlite":
        _drop_sqlite_triggers(connection)
    else:
        _drop_postgresql_functions(connection)


def _drop_sqlite_triggers(connection: Connection) -> None:
    found = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'trigger'")
    for name in found.scalars().all():
        if name.startswith(triggers.PREFIX):
            connection.exec_driver_sql(f'DROP TRIGGER "{name}"')


def _drop_postgresql_functions(connection: Connection) -> None:
    """A trigger goes with its function."""
    found = connection.exec_driver_sql(
        "SELECT proname FROM pg_proc WHERE pronamespace = current_schema()::regnamespace "
        "AND prorettype = 'trigger'::regtype"
    )
    for name in found.scalars().all():
        if name.startswith(triggers.PREFIX):
            connection.exec_driver_sql(f'DROP FUNCTION "{name}"() CASCADE')
