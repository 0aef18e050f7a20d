"""How a database gets its tables, and the errors if it has others."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, select, text
from sqlalchemy.event import listen
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.store import schema, triggers
from groupwise.jobs.fleet.store.database import Database, check_schema, connect, migrate
from groupwise.jobs.fleet.store.schema import gpu_free, vm
from groupwise.jobs.fleet.store.tables import GPU, VM, Base
from groupwise.jobs.fleet.store.triggers import Rule
from tests.unit.jobs.fleet.store.test_triggers import (
    RESERVE,
    attempt,
    execute,
    job,
    machine,
    reservation,
)

SQLITE_OBJECTS = "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
POSTGRESQL_OBJECTS = (
    "SELECT relkind::text, relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace "
    "UNION SELECT 'trigger', tgname::text FROM pg_trigger WHERE NOT tgisinternal "
    "UNION SELECT 'function', proname::text FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
)


def objects(database: Database) -> set[tuple[str, str]]:
    statement = SQLITE_OBJECTS if database.dialect == "sqlite" else POSTGRESQL_OBJECTS

    def read(session: Session) -> set[tuple[str, str]]:
        return {(row[0], row[1]) for row in session.execute(text(statement))}

    return database.read(read)


@pytest.fixture
def empty(empty_url: str) -> Iterator[Database]:
    """Without tables."""
    database = connect(empty_url)
    yield database
    database.close()


def test_the_way_leads_to_the_tables_of_the_code(database: Database) -> None:
    with database.engine.connect() as connection:
        options = {"version_table": schema.VERSION_TABLE}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []


def test_defaults_of_the_database_are_those_of_the_code(database: Database) -> None:
    """Alembic compares them poorly, so they are tried: both ways to a row give the same row."""
    with database.engine.begin() as connection:
        for table in ("jobs", "vms"):
            migrated = defaults(connection, table)
            assert migrated["created_at"] is not None
            connection.execute(text(f"DROP TABLE {table} {cascade(database)}"))
            Base.metadata.tables[table].create(connection)
            assert defaults(connection, table) | {"created_at": 0} == migrated | {"created_at": 0}
        connection.rollback()


def defaults(connection: Connection, table: str) -> dict[str, object]:
    key = "job_id" if table == "jobs" else "vm_id"
    connection.execute(text(f"INSERT INTO {table} ({key}) VALUES ('x')"))
    return dict(connection.execute(text(f"SELECT * FROM {table}")).mappings().one())


def cascade(database: Database) -> str:
    return "CASCADE" if database.dialect == "postgresql" else ""


def test_again_changes_nothing(database: Database) -> None:
    """Who makes a trigger anew keeps all others from the table, and waits for whoever reads it."""
    execute(database, "INSERT INTO jobs (job_id) VALUES ('j')")
    before, asked = objects(database), list[str]()
    listen(database.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    migrate(database)
    check_schema(database)
    assert asked
    assert [each for each in asked if each.startswith(("DROP", "CREATE", "ALTER"))] == []
    assert objects(database) == before
    assert database.read(lambda s: s.execute(text("SELECT count(*) FROM jobs")).scalar()) == 1


def test_several_at_once(empty_url: str) -> None:
    databases = [connect(empty_url) for _ in range(4)]
    all_there = threading.Barrier(len(databases))

    def work(database: Database) -> None:
        all_there.wait(10)
        migrate(database)
        check_schema(database)

    with ThreadPoolExecutor(len(databases)) as threads:
        done = list(threads.map(work, databases))
    for database in databases:
        database.close()
    assert done == [None] * 4


def test_a_missing_schema(empty: Database) -> None:
    if empty.dialect == "postgresql":
        with pytest.raises(UsageError, match="groupwise fleet migrate"):
            check_schema(empty)
        migrate(empty)
    check_schema(empty)
    execute(empty, "INSERT INTO jobs (job_id) VALUES ('j')")


def test_a_newer_version_is_left_alone(database: Database) -> None:
    execute(database, f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'")
    before = objects(database)
    for verb in (check_schema, migrate):
        with pytest.raises(UsageError, match=r"newer version.*9999.*Upgrade Groupwise"):
            verb(database)
    assert objects(database) == before


def test_newer_rules_are_left_alone(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    never = Rule("job_never", "jobs", "UPDATE", "1 = 1", "never")
    with monkeypatch.context() as newer:
        newer.setattr(triggers, "rules", lambda: (never,))
        newer.setattr(schema, "RULES", schema.RULES + 1)
        migrate(database)
    before = objects(database)
    for verb in (check_schema, migrate):
        with pytest.raises(UsageError, match=r"newer.*rules.*Upgrade"):
            verb(database)
    assert objects(database) == before


RULES_MADE = {
    "sqlite": "1:08b28dae02dd46c5",
    "postgresql": "1:7b64d1f50b5ff283",
}
"""By `schema.RULES` of now."""


@pytest.mark.parametrize("dialect", RULES_MADE)
def test_a_number_stands_for_the_same_rules_everywhere(dialect: str) -> None:
    """By their numbers it is known which are newer. Before a release has them they may change and keep theirs."""
    made = schema._own_fingerprint(dialect)[:18]
    assert made == RULES_MADE[dialect], (
        "triggers or views have changed: count schema.RULES up if a release had this number, and write this here"
    )


def test_a_schema_in_use_is_not_migrated(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used() -> str:
        return "its dispatcher (process 7)"

    before = objects(database)
    migrate(database, used)
    check_schema(database, used)
    other = Rule("job_never", "jobs", "UPDATE", "1 = 1", "never")
    monkeypatch.setattr(triggers, "rules", lambda: (other,))
    ways = (migrate, check_schema) if database.dialect == "sqlite" else (migrate,)
    for way in ways:
        with pytest.raises(UsageError, match=r"\(process 7\).*Restart"):
            way(database, used)
    assert objects(database) == before
    migrate(database)
    assert objects(database) != before


def test_tables_of_something_else_are_left_alone(empty: Database) -> None:
    execute(empty, "CREATE TABLE jobs (a INTEGER)")
    before = objects(empty)
    with pytest.raises(UsageError, match=r"something else: jobs\."):
        migrate(empty)
    assert objects(empty) == before


def test_all_or_nothing(empty: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Rule("wrong", "no_such_table", "UPDATE", "1 = 1", "never")
    before = objects(empty)
    with monkeypatch.context() as broken:
        broken.setattr(triggers, "rules", lambda: (wrong,))
        with pytest.raises(Exception, match="no_such_table"):
            migrate(empty)
    assert objects(empty) == before
    migrate(empty)


def test_every_process_makes_the_same_triggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy keeps indexes and constraints as sets, whose order differs from process to process."""
    made = {dialect: list(triggers.statements(dialect)) for dialect in ("sqlite", "postgresql")}
    for table in Base.metadata.tables.values():
        for of in ("indexes", "constraints"):
            named = sorted(getattr(table, of), key=lambda each: str(each.name))
            for order in (named, named[::-1]):
                monkeypatch.setattr(table, of, order)
                for dialect, statements in made.items():
                    assert list(triggers.statements(dialect)) == statements, (table.name, of)


def test_an_older_database_is_migrated_with_its_rows(empty: Database) -> None:
    migrate(empty)
    before = objects(empty)
    with empty.engine.begin() as connection:
        schema._drop_derived(connection)
        for statement in (
            "ALTER TABLE vms DROP COLUMN engine",
            "ALTER TABLE vms RENAME COLUMN drain_reason TO cordoned",
            "ALTER TABLE gpus RENAME COLUMN quarantine_reason TO quarantined",
            "ALTER TABLE gpus RENAME COLUMN fault_report TO accused",
            f"UPDATE {schema.VERSION_TABLE} SET version_num = '0001'",
            "INSERT INTO vms (vm_id, workdir, cordoned, facts) "
            """VALUES ('old', 'w', 'fan', '{"cpus": 8, "quarantined": [{"what": "folder"}]}')""",
            "INSERT INTO vms (vm_id) VALUES ('new')",
            'INSERT INTO gpus (vm_id, "index", uuid, quarantined, accused) '
            """VALUES ('old', 0, 'GPU-0', 'Xid 79', '{"job_id": "one", "said": "Xid"}')""",
            "INSERT INTO gpus (vm_id, \"index\", uuid) VALUES ('old', 1, 'GPU-1')",
            "INSERT INTO projects (name, weight, max_gpus) VALUES ('p', 0, -1)",
            "CREATE VIEW gpu_free AS SELECT * FROM gpus",
            "CREATE VIEW vm_overview AS SELECT * FROM gpu_free",
        ):
            connection.exec_driver_sql(statement)
    migrate(empty)
    assert objects(empty) == before
    execute(empty, "UPDATE vms SET engine = '{\"name\": \"slurm\"}' WHERE vm_id = 'old'")
    machines = select(VM.vm_id, VM.workdir, VM.drain_reason, VM.facts).order_by(VM.vm_id.desc())
    assert empty.read(lambda s: [tuple(row) for row in s.execute(machines)]) == [
        ("old", "w", "fan", {"cpus": 8, "untracked": [{"what": "folder"}]}),
        ("new", "groupwise-fleet", None, {}),
    ]
    gpus = select(GPU.quarantine_reason, GPU.fault_report).order_by(GPU.index)
    assert empty.read(lambda s: [tuple(row) for row in s.execute(gpus)]) == [
        ("Xid 79", {"job_id": "one", "message": "Xid"}),
        (None, None),
    ]
    query = text("SELECT weight, max_gpus, max_waiting FROM projects")
    assert empty.read(lambda s: tuple(s.execute(query).one())) == (0.001, 0, None)


def counts(database: Database, vm_id: str = "v1") -> tuple[int, int]:
    chosen = select(vm.c.total_gpus, vm.c.available_gpus)
    row = database.read(lambda s: s.execute(chosen.where(vm.c.vm_id == vm_id)).one())
    return row[0], row[1]


def states(database: Database) -> list[tuple[bool, int, bool, bool]]:
    columns = (gpu_free.c.reserved, gpu_free.c.shared_mb, gpu_free.c.usable, gpu_free.c.available)
    rows = database.read(lambda s: s.execute(select(*columns).order_by(gpu_free.c.index)).all())
    return [(row[0], row[1], row[2], row[3]) for row in rows]


@pytest.fixture
def gpus(database: Database) -> list[int]:
    """Three of a machine that answers, beside one that has none."""
    machine(database, "v2", 0)
    made = machine(database, gpus=3)
    execute(database, "UPDATE vms SET contact = 'ok'")
    return made


def test_all_are_free_while_their_machine_takes_jobs(database: Database, gpus: list[int]) -> None:
    assert counts(database, "v2") == (0, 0)
    changes = (
        *("contact = 'unreachable'", "contact = 'new'", "active = (1 = 0)", "draining = (1 = 1)"),
        *("degraded = (1 = 1)", "drain_reason = 'fails often'", "lost_at = 1"),
    )
    sound = (
        "contact = 'ok', active = (1 = 1), draining = (1 = 0), degraded = (1 = 0), "
        "drain_reason = NULL, lost_at = NULL"
    )
    for change in changes:
        execute(database, f"UPDATE vms SET {sound} WHERE vm_id = 'v1'")
        assert counts(database) == (3, 3)
        assert states(database) == [(False, 0, True, True)] * 3
        execute(database, f"UPDATE vms SET {change} WHERE vm_id = 'v1'")
        assert counts(database) == (3, 0)
        assert states(database) == [(False, 0, False, False)] * 3


def test_reservations_count_until_they_are_released(database: Database, gpus: list[int]) -> None:
    first, second, third = (attempt(database, job(database, f"j{n}")) for n in range(3))
    execute(database, RESERVE, **reservation(first, gpus[0]))
    execute(database, RESERVE, **reservation(second, gpus[1], share=400))
    execute(database, RESERVE, **reservation(third, gpus[1], share=100))
    execute(database, RESERVE, **reservation(third, slot=0))
    assert counts(database) == (3, 1)
    assert states(database) == [
        (True, 0, True, False),
        (False, 500, True, False),
        (False, 0, True, True),
    ]
    execute(database, "UPDATE reservations SET released_at = 2")
    assert counts(database) == (3, 3)


def test_rows_are_written_by_the_names_that_people_know(database: Database) -> None:
    execute(
        database,
        'INSERT INTO vm (vm_id, ip_address, "user", ssh_key_path, total_gpus, available_gpus, active)'
        " VALUES ('gpu-3', '10.0.0.13', 'ubuntu', '/home/ops/key', 8, 8, true)",
    )
    execute(
        database,
        "INSERT INTO job (job_id, job_type, model, dataset, reward_function, hyperparams, status)"
        " VALUES ('by-hand', 'GRPO', 'tiny', '/data/sums.jsonl', 'correctness', '{\"a\": 1}', 'queued')",
    )
    execute(database, "INSERT INTO vms (vm_id) VALUES ('other')")
    execute(database, "INSERT INTO jobs (job_id) VALUES ('other')")
    with database.engine.connect() as connection:
        for table, key, given in (
            ("vms", "vm_id", {"ip_address", "user", "ssh_key_path"}),
            ("jobs", "job_id", {"model", "dataset", "reward_function", "hyperparams"}),
        ):
            rows = connection.execute(text(f"SELECT * FROM {table} ORDER BY {key}")).mappings()
            first, other = ({**row} for row in rows)
            assert {name for name in first if first[name] != other[name]} <= {
                *given,
                key,
                "created_at",
            }
            assert all(first[name] not in (None, "{}") for name in given)
    for table, view in (("vms", "vm"), ("jobs", "job")):
        statement = f"INSERT INTO {view} ({view}_id) VALUES ('third') RETURNING *"
        with database.engine.connect() as connection:  # SQLite gives back only what was given
            returned = {**connection.execute(text(statement)).mappings().one()}
            connection.commit()
            query = text(f"SELECT * FROM {view} WHERE {view}_id = 'third'")
            stored = {**connection.execute(query).mappings().one()}
            connection.execute(text(f"DELETE FROM {table} WHERE {view}_id = 'third'"))
            connection.commit()
        assert database.dialect == "sqlite" or returned == stored
    assert counts(database, "gpu-3") == (0, 0)  # what the poller has found, and nothing else
    execute(database, "UPDATE vm SET active = false WHERE vm_id = 'gpu-3'")
    execute(database, "UPDATE job SET priority = 5 WHERE job_id = 'by-hand'")
    query = "SELECT active, priority FROM vms, jobs WHERE vm_id = 'gpu-3' AND job_id = 'by-hand'"
    assert database.read(lambda s: tuple(s.execute(text(query)).one())) == (False, 5)
    execute(database, "DELETE FROM vm WHERE vm_id = 'other'")
    assert database.read(lambda s: s.execute(select(vm.c.vm_id)).scalars().all()) == ["gpu-3"]
    for refused in (
        "UPDATE vm SET available_gpus = 8",
        "UPDATE job SET status = 'completed'",
        "INSERT INTO job (job_id, status) VALUES ('second', 'running')",
        "INSERT INTO vm (vm_id) VALUES ('no name')",
    ):
        with pytest.raises(DBAPIError):
            execute(database, refused)
