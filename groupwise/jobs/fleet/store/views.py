"""Views for users and dashboards: `gpu_free` has a line for each GPU, `vm` one for each machine, `job` one for each job.

`vm` and `job` are the tables `vms` and `jobs` under the names that users of this kind of system know, for reading and writing: their
INSERT, UPDATE and DELETE reach the table. `vm` also has `total_gpus` and `available_gpus`, which are counted: from reservations, which are
authoritative, and from observations, which only subtract. An INSERT may give them, as programs do that write such rows; only what the
poller finds counts. Placement reads the rows themselves, and also checks the age of an observation. Capacity that an untracked attempt
holds (`queue/untracked_processes.py`) counts as free here.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Boolean, Column, Dialect, Integer, MetaData, Table, Text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateTable

from groupwise.jobs.fleet.states import Contact, Observed
from groupwise.jobs.fleet.store.tables import VM, Base

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

NAMES = ("vm", "job", "vm_overview", "gpu_free")
"""The views, and an earlier one, in the order in which they can be dropped: those that depend on others first."""


def statements(dialect: str) -> Iterator[str]:
    """The CREATE statements of the views and of the triggers by which rows are written through them."""
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
