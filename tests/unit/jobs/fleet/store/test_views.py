"""How many GPUs are free: counted from reservations and observations."""

import pytest
from sqlalchemy import select

from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.views import gpu_free, vm_overview
from tests.unit.jobs.fleet.store.test_triggers import (
    RESERVE,
    attempt,
    execute,
    job,
    machine,
    reservation,
)


def counts(database: Database, vm_id: str = "v1") -> tuple[int, int]:
    chosen = select(vm_overview.c.total_gpus, vm_overview.c.available_gpus)
    row = database.read(lambda s: s.execute(chosen.where(vm_overview.c.vm_id == vm_id)).one())
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
        *("degraded = (1 = 1)", "cordoned = 'fails often'", "lost_at = 1"),
    )
    sound = (
        "contact = 'ok', active = (1 = 1), draining = (1 = 0), degraded = (1 = 0), "
        "cordoned = NULL, lost_at = NULL"
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
