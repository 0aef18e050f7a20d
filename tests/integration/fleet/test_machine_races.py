"""Verbs of machines against each other and against claims, on a real PostgreSQL: whichever commits first, the other one sees it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from groupwise.fleet.queue import claim
from groupwise.fleet.store.database import Database, connect
from groupwise.fleet.store.tables import VM
from groupwise.fleet.verbs import machines
from groupwise.fleet.verbs.actor import Actor
from groupwise.fleet.verbs.machines import NewMachine
from groupwise.wire.problems import Refusal
from tests.fleet_databases import new_fleet
from tests.postgres import Postgres
from tests.unit.fleet.small_fleet import add_machine, claim_some, statuses, submit

pytestmark = pytest.mark.fleet

ADA = Actor("user:ada")
SECONDS = 60.0
WAITING = text(
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


@pytest.fixture
def database(postgres: Postgres) -> Iterator[Database]:
    with closing(connect(new_fleet(postgres))) as made:
        yield made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def one_after_the_other(
    database: Database,
    threads: ThreadPoolExecutor,
    first: Callable[[Session], Any],
    second: Callable[[Session], Any],
) -> tuple[Future[Any], Future[Any]]:
    """The second begins when the first has done its work, and waits for its commit."""
    done, go_on = threading.Event(), threading.Event()

    def held(session: Session) -> Any:
        found = first(session)
        session.flush()
        done.set()
        assert go_on.wait(SECONDS)
        return found

    one = threads.submit(database.run, held)
    assert done.wait(SECONDS)
    other = threads.submit(database.run, second)
    while not database.read(lambda s: s.scalar(WAITING)):
        assert not other.done(), "it did not wait"
    go_on.set()
    return one, other


def test_of_two_who_add_a_machine_the_second_is_told(
    database: Database, threads: ThreadPoolExecutor
) -> None:
    def add(address: str) -> Callable[[Session], Any]:
        new = NewMachine("gpu-1", address, user="ada")
        return lambda session: machines.add(session, ADA, new)

    one, other = one_after_the_other(database, threads, add("10.0.0.1"), add("10.0.0.2"))
    assert one.result(SECONDS)["ip_address"] == "10.0.0.1"
    with pytest.raises(Refusal, match=r"there is a machine gpu-1 already, ada@10\.0\.0\.1:22"):
        other.result(SECONDS)


def take(session: Session) -> list[str]:
    found = claim.claim(session, owner="me", lease_seconds=30.0, limit=10)
    return [each.job_id for each in found.made]


def test_a_machine_on_which_a_job_was_just_placed_is_not_removed(
    database: Database, threads: ThreadPoolExecutor
) -> None:
    add_machine(database, "gpu-1", gpus=1)
    submit(database, "job", gpus=1)
    one, other = one_after_the_other(
        database, threads, take, lambda session: machines.remove(session, ADA, "gpu-1")
    )
    assert one.result(SECONDS) == ["job"]
    with pytest.raises(Refusal, match="still used by job"):
        other.result(SECONDS)
    assert database.read(lambda s: s.get_one(VM, "gpu-1").active)


@pytest.mark.parametrize("verb", [machines.remove, machines.drain, machines.lost])
def test_nothing_is_placed_on_a_machine_that_was_just_taken_away(
    database: Database, threads: ThreadPoolExecutor, verb: Callable[..., Any]
) -> None:
    add_machine(database, "gpu-1", gpus=1)
    submit(database, "job", gpus=1)
    one, other = one_after_the_other(
        database, threads, lambda session: verb(session, ADA, "gpu-1") and None, take
    )
    one.result(SECONDS)
    assert other.result(SECONDS) == []
    claim_some(database)
    assert statuses(database) == {"job": "pending"}


def test_lost_names_the_attempt_that_was_just_made(
    database: Database, threads: ThreadPoolExecutor
) -> None:
    add_machine(database, "gpu-1", gpus=1)
    submit(database, "job", gpus=1)
    one, other = one_after_the_other(
        database, threads, take, lambda session: machines.lost(session, ADA, "gpu-1")
    )
    one.result(SECONDS)
    assert [each["job_id"] for each in other.result(SECONDS)["attempts"]] == ["job"]
