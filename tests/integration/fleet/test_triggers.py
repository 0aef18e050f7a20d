"""The suite of `tests/unit/jobs/fleet/store/test_triggers.py` on a real PostgreSQL; and two writers at once cannot get around it."""

import threading

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.store.database import Database
from tests.processes import wait_until
from tests.unit.jobs.fleet.store.test_triggers import *  # noqa: F403
from tests.unit.jobs.fleet.store.test_triggers import (
    RESERVE,
    attempt,
    job,
    machine,
    reservation,
    value,
)


@pytest.mark.parametrize("share", [None, 600])
def test_two_at_once_do_not_get_the_same_gpu(database: Database, share: int | None) -> None:
    gpu = machine(database)[0]
    epochs = [attempt(database, job(database, f"j{n}")) for n in range(2)]
    second_wrote = threading.Event()
    refusals: list[str] = []

    def reserve_second() -> None:
        def write(session: Session) -> None:
            session.execute(text(RESERVE), reservation(epochs[1], gpu, share=share))
            second_wrote.set()

        try:
            database.run(write)
        except IntegrityError as error:
            refusals.append(str(error))

    second = threading.Thread(target=reserve_second)

    def reserve_first(session: Session) -> None:
        session.execute(text(RESERVE), reservation(epochs[0], gpu, share=share))
        second.start()
        until_somebody_waits(session, second_wrote)

    database.run(reserve_first)
    second.join()
    assert len(refusals) == 1
    assert value(database, "SELECT count(*) FROM reservations") == 1


def until_somebody_waits(session: Session, or_else: threading.Event) -> None:
    """For a lock of this server, which is this test's alone."""
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    wait_until(
        lambda: session.execute(waiting).scalar_one() or or_else.is_set(), "somebody to wait"
    )
