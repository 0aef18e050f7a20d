"""How many GPUs are free: counted from reservations and observations."""

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.views import gpu_free, vm
from tests.unit.jobs.fleet.store.test_triggers import (
    RESERVE,
    attempt,
    execute,
    job,
    machine,
    reservation,
)


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
