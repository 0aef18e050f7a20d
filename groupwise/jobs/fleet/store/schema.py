"""The schema: whether a database has the tables of this version, and how it gets them.

`migrations/` leads from each released version to the next. Triggers and views are not migrated: they are generated from `states.py`,
dropped before a migration and created again after it. All of it is one transaction under a lock: a process that dies half-way leaves the
old state, and of two that start at once the second finds the work done.

Migrations only go forward: an older version refuses a database of a newer one. If all is current nothing is touched, since creating a
trigger blocks all other processes.

The views are for users and dashboards: `gpu_free` has a line for each GPU, `vm` one for each machine, `job` one for each job. `vm` and
`job` are the tables `vms` and `jobs` under the names that users of this kind of system know, for reading and writing: their INSERT,
UPDATE and DELETE reach the table. `vm` also has `total_gpus` and `available_gpus`, which are counted: from reservations, which are
authoritative, and from observations, which only subtract. An INSERT may give them, as programs do that write such rows; only what the
poller finds counts. Placement reads the rows themselves, and also checks the age of an observation. Capacity that an untracked attempt
holds (`queue/untracked_processes.py`) counts as free here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Dialect,
    Integer,
    MetaData,
    Table,
    Text,
    inspect,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateTable

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.states import Contact, Observed
from groupwise.jobs.fleet.store import triggers
from groupwise.jobs.fleet.store.engine import READS
from groupwise.jobs.fleet.store.tables import VM, Base

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

VERSION_TABLE = "fleet_version"
RULES = 1
"""Version number of these triggers and views. It rises when they change after a release: an older version then leaves them alone."""
FINGERPRINT = "fleet_fingerprint"
"""A view with one value: the version number of triggers and views, and the hash of the statements that made them."""
_LOCK = 0x67726F7570776973
"""Key for `pg_advisory_xact_lock`; an arbitrary number that is used for nothing else."""
_LOCK_MILLISECONDS = 1500
"""Time limit for a lock on a table. All others queue after a process that waits for one, so it gives up soon and tries again; but not
before PostgreSQL has ended an autovacuum that holds the lock, which takes a second (`deadlock_timeout`)."""
_GPU_FREE = f"""
CREATE VIEW gpu_free AS
SELECT gpus.gpu_id, gpus.vm_id, gpus."index", gpus.uuid, gpus.model, gpus.memory_mb,
       COALESCE(held.whole, 0) > 0 AS reserved,
       COALESCE(held.share_mb, 0) AS shared_mb,
       (vms.active AND NOT vms.draining AND NOT vms.degraded AND vms.drain_reason IS NULL AND vms.lost_at IS NULL
           AND vms.contact = '{Contact.OK}' AND gpus.observed = '{Observed.OK}' AND gpus.quarantine_reason IS NULL) AS usable,
       (vms.active AND NOT vms.draining AND NOT vms.degraded AND vms.drain_reason IS NULL AND vms.lost_at IS NULL
           AND vms.contact = '{Contact.OK}' AND gpus.observed = '{Observed.OK}' AND gpus.quarantine_reason IS NULL
           AND held.gpu_id IS NULL) AS available
FROM gpus
JOIN vms ON vms.vm_id = gpus.vm_id
LEFT JOIN (
    SELECT gpu_id, sum(CASE WHEN share_mb IS NULL THEN 1 ELSE 0 END) AS whole, sum(share_mb) AS share_mb
    FROM reservations WHERE released_at IS NULL AND gpu_id IS NOT NULL GROUP BY gpu_id
) AS held ON held.gpu_id = gpus.gpu_id
"""

_VM = """
CREATE VIEW vm AS
SELECT vms.*, (SELECT count(*) FROM gpu_free WHERE gpu_free.vm_id = vms.vm_id) AS total_gpus,
       (SELECT count(*) FROM gpu_free WHERE gpu_free.vm_id = vms.vm_id AND available) AS available_gpus
FROM vms
"""

VIEW_NAMES = ("vm", "job", "vm_overview", "gpu_free")
"""The views, and an earlier one, in the order in which they can be dropped: those that depend on others first."""


def is_current(connection: Connection) -> bool:
    """True if tables, triggers and views are those of this version; UsageError if they are those of a newer one."""
    return _is_current(connection.execution_options(**{READS: True}))


def _is_current(connection: Connection) -> bool:
    if FINGERPRINT not in inspect(connection).get_view_names():
        stored_fingerprint = None
    else:
        stored_fingerprint = connection.exec_driver_sql(
            f"SELECT fingerprint FROM {FINGERPRINT}"
        ).scalar_one()
    # Compared without alembic: every command checks this first, and loading alembic takes longer than most commands.
    if stored_fingerprint == _own_fingerprint(connection.dialect.name):
        version = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}")
        if version.scalar_one() == newest_revision():
            return True
    number = int((stored_fingerprint or "").rpartition(":")[0] or 0)
    if number > RULES:
        raise UsageError(
            f"The fleet's database was made by a newer version of Groupwise (its rules are number {number}, this version knows up to "
            f"{RULES}). Upgrade Groupwise here."
        )
    revision = _revision(connection)
    known_revisions = {script.revision for script in _scripts().walk_revisions()}
    if revision is not None and revision not in known_revisions:
        raise UsageError(
            f"The fleet's database was made by a newer version of Groupwise (its revision is {revision}, this version knows up to "
            f"{_scripts().get_current_head()}). Upgrade Groupwise here."
        )
    return False


def bring_up_to_date(connection: Connection, used_by: Callable[[], str | None]) -> None:
    """Create or upgrade everything. UsageError if the database belongs to a newer version or to something else, or is in use by
    `used_by()`."""
    from alembic import command

    with _exclusively(connection):
        if _is_current(connection):
            return
        if _revision(connection) is None:
            found = inspect(connection)
            existing = sorted(
                {*found.get_table_names(), *found.get_view_names()}
                & {*Base.metadata.tables, *VIEW_NAMES}
            )
            if existing:
                raise UsageError(
                    f"The database holds tables of something else: {', '.join(existing)}. Give the fleet a database of its own."
                )
        elif (user := used_by()) is not None:
            raise UsageError(
                f"The fleet's database was made by another version of Groupwise, and {user} works with it as it is. Restart that with this "
                "version (`groupwise fleet up`), which brings the database up to date on its way. Nothing was changed."
            )
        _drop_derived(connection)
        command.upgrade(_config(connection), "head")
        dialect = connection.dialect.name
        for statement in _derived_statements(dialect):
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql(
            f"CREATE VIEW {FINGERPRINT} AS SELECT '{_own_fingerprint(dialect)}' AS fingerprint"
        )
        broken_reference = None
        if dialect == "sqlite":
            broken_reference = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        if broken_reference is not None:
            table, row, parent, _ = broken_reference
            raise UsageError(
                f"Row {row} of {table} in the fleet's database names one of {parent} that is not there: it was deleted by "
                f"hand. Delete that row too (`DELETE FROM {table} WHERE rowid = {row}`), or put a copy of the database in its place. "
                "Nothing was changed."
            )


def newest_revision() -> str:
    """The number of the newest migration. Files of migrations are named after their revisions, which are numbered."""
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
    """Turn reference checks off: SQLite changes a table by replacing it, which would break references to it. Within a transaction the
    pragma has no effect."""
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("PRAGMA foreign_keys = OFF")
    try:
        yield
    finally:
        driver.execute("PRAGMA foreign_keys = ON")


def _revision(connection: Connection) -> str | None:
    from alembic.runtime.migration import MigrationContext

    options = {"version_table": VERSION_TABLE}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


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


def _derived_statements(dialect: str) -> Iterator[str]:
    """The CREATE statements of triggers, of views, and of the triggers by which rows are written through views."""
    yield from triggers.statements(dialect)
    yield _GPU_FREE
    yield _VM
    yield "CREATE VIEW job AS SELECT * FROM jobs"
    if dialect == "sqlite":
        yield from _sqlite_writes("vm", Base.metadata.tables["vms"])
        yield from _sqlite_writes("job", Base.metadata.tables["jobs"])
    else:  # PostgreSQL writes through such views by itself, but not if an INSERT gives a counted column
        yield (
            "CREATE FUNCTION fleet_vm_insert() RETURNS trigger LANGUAGE plpgsql AS $rule$ "
            f"BEGIN {_insert(Base.metadata.tables['vms'], postgresql.dialect())}; "
            "SELECT * INTO NEW FROM vm WHERE vm_id = NEW.vm_id; RETURN NEW; END $rule$"
        )
        yield "CREATE TRIGGER fleet_vm_insert INSTEAD OF INSERT ON vm FOR EACH ROW EXECUTE FUNCTION fleet_vm_insert()"


def _own_fingerprint(dialect: str) -> str:
    digest = hashlib.sha256("\n".join(_derived_statements(dialect)).encode()).hexdigest()
    return f"{RULES}:{digest}"


def _drop_derived(connection: Connection) -> None:
    """Drop triggers and views of any version; triggers are found by their prefix. Views of users stay, and block the migration of
    PostgreSQL if they depend on ours."""
    for name in (FINGERPRINT, *VIEW_NAMES):
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
    if connection.dialect.name == "sqlite":
        rows = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'trigger'")
        for name in rows.scalars().all():
            if name.startswith(triggers.PREFIX):
                connection.exec_driver_sql(f'DROP TRIGGER "{name}"')
    else:  # a trigger goes with its function
        rows = connection.exec_driver_sql(
            "SELECT proname FROM pg_proc WHERE pronamespace = current_schema()::regnamespace "
            "AND prorettype = 'trigger'::regtype"
        )
        for name in rows.scalars().all():
            if name.startswith(triggers.PREFIX):
                connection.exec_driver_sql(f'DROP FUNCTION "{name}"() CASCADE')


def _insert(table: Table, dialect: Dialect) -> str:
    """An INSERT of the row NEW of a view, in which columns that were not given are NULL: those get the table's defaults."""
    compiler = dialect.ddl_compiler(dialect, CreateTable(table))
    values: list[str] = []
    for column in table.columns:
        default = compiler.get_column_default_string(column)
        value = f'NEW."{column.name}"'
        values.append(f"COALESCE({value}, {default})" if default else value)
    names = ", ".join(f'"{column.name}"' for column in table.columns)
    return f"INSERT INTO {table} ({names}) VALUES ({', '.join(values)})"


def _sqlite_writes(view: str, table: Table) -> Iterator[str]:
    """Triggers that write to the table, since SQLite writes to no view by itself."""
    key, changes = f"{view}_id", (f'"{c.name}" = NEW."{c.name}"' for c in table.columns)
    this_row = f"WHERE {key} = OLD.{key}"
    actions = {
        "INSERT": _insert(table, sqlite.dialect()),
        "UPDATE": f"UPDATE {table} SET {', '.join(changes)} {this_row}",
        "DELETE": f"DELETE FROM {table} {this_row}",
    }
    if view == "vm":
        is_changed = (
            "NEW.total_gpus IS NOT OLD.total_gpus OR NEW.available_gpus IS NOT OLD.available_gpus"
        )
        message = "total_gpus and available_gpus are counted and cannot be set"
        actions["UPDATE"] = (
            f"SELECT RAISE(ABORT, '{message}') WHERE {is_changed}; {actions['UPDATE']}"
        )
    for operation, action in actions.items():
        yield (
            f"CREATE TRIGGER fleet_{view}_{operation.lower()} INSTEAD OF {operation} ON {view} BEGIN {action}; END"
        )


_views = MetaData()

gpu_free = Table(
    "gpu_free",
    _views,
    Column("gpu_id", Integer, primary_key=True),
    Column("vm_id", Text),
    Column("index", Integer),
    Column("uuid", Text),
    Column("model", Text),
    Column("memory_mb", Integer),
    Column("reserved", Boolean),
    Column("shared_mb", Integer),
    Column("usable", Boolean),
    Column("available", Boolean),
)
"""`reserved`: as a whole; `shared_mb`: held by shares; `usable`: jobs could get it if it were free; `available`: usable and wholly free."""

vm = Table(
    "vm",
    _views,
    *(Column(column.name, column.type) for column in VM.__table__.columns),
    Column("total_gpus", Integer),
    Column("available_gpus", Integer),
)
"""The columns of `vms`, and two counts."""
