"""Operations on machines race with each other and with claims, on a real PostgreSQL: the one that commits later sees the other."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
from sqlalchemy import Select, select, text
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.attempts import ending, records
from groupwise.jobs.fleet.attempts.decide import Move
from groupwise.jobs.fleet.machines import observation
from groupwise.jobs.fleet.operations import machines
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.machines import NewMachine
from groupwise.jobs.fleet.queue import claim
from groupwise.jobs.fleet.states import AttemptState, Outcome
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import GPU, VM, Project
from groupwise.jobs.hosts.failures import FailureClass
from tests.integration.fleet.test_claim_races import somebody_has
from tests.processes import TIMEOUT_S, wait_until
from tests.unit.jobs.fleet.machines.test_observation import gpu, running, seen
from tests.unit.jobs.fleet.queue_helpers import add_machine, claim_some, statuses, submit

ADA = Actor("user:ada")
WAITING = text(
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


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
        assert go_on.wait(TIMEOUT_S)
        return found

    one = threads.submit(database.run, held)
    assert done.wait(TIMEOUT_S)
    other = threads.submit(database.run, second)
    while not database.read(lambda s: s.scalar(WAITING)):
        assert not other.done(), "it did not wait"
    go_on.set()
    return one, other


def test_the_second_of_two_concurrent_additions_of_a_machine_is_refused(
    database: Database, threads: ThreadPoolExecutor
) -> None:
    def add(address: str) -> Callable[[Session], Any]:
        new = NewMachine("gpu-1", address, user="ada")
        return lambda session: machines.add(session, ADA, new)

    one, other = one_after_the_other(database, threads, add("10.0.0.1"), add("10.0.0.2"))
    assert one.result(TIMEOUT_S)["ip_address"] == "10.0.0.1"
    with pytest.raises(Refusal, match=r"gpu-1 .*, ada@10\.0\.0\.1:22"):
        other.result(TIMEOUT_S)


def take(session: Session) -> list[str]:
    found = claim.claim(session, owner="me", lease_seconds=30.0, limit=10)
    return [each.job_id for each in found.claimed]


@pytest.fixture
def job(database: Database) -> None:
    """One that waits, beside a machine for it."""
    add_machine(database, "gpu-1", gpus=1)
    submit(database, "job", gpus=1)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("operation", [machines.remove, machines.lost])
def test_a_machine_on_which_a_job_was_just_placed_is_not_removed(
    database: Database, threads: ThreadPoolExecutor, operation: Callable[..., Any]
) -> None:
    """And who says that it is lost is told of the attempt."""
    one, other = one_after_the_other(
        database, threads, take, lambda session: operation(session, ADA, "gpu-1")
    )
    assert one.result(TIMEOUT_S) == ["job"]
    if operation is machines.lost:
        assert [each["job_id"] for each in other.result(TIMEOUT_S)["attempts"]] == ["job"]
        return
    with pytest.raises(Refusal, match="job"):
        other.result(TIMEOUT_S)
    assert database.read(lambda s: s.get_one(VM, "gpu-1").active)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("operation", [machines.remove, machines.drain, machines.lost])
def test_no_job_is_placed_on_a_machine_that_was_just_removed(
    database: Database, threads: ThreadPoolExecutor, operation: Callable[..., Any]
) -> None:
    one, other = one_after_the_other(
        database, threads, lambda session: operation(session, ADA, "gpu-1") and None, take
    )
    one.result(TIMEOUT_S)
    assert other.result(TIMEOUT_S) == []
    claim_some(database)
    assert statuses(database) == {"job": "pending"}


def test_a_look_that_holds_a_job_back_and_a_claim_of_it_do_not_lock_each_other_out(
    database: Database, threads: ThreadPoolExecutor
) -> None:
    """Both lock the job before its machine, so that neither has to be begun anew."""
    add_machine(database, "gpu-1", gpus=1)
    database.run(lambda session: session.add(Project(name="p", max_gpus=1)))
    submit(database, "job", gpus=1, project="p")
    times: Counter[str] = Counter()
    asked_at = database.run(database_time)

    def claims(session: Session) -> list[str]:
        times["claim"] += 1
        return take(session)

    def looks(session: Session) -> bool:
        times["look"] += 1
        there = seen(gpu(0, "GPU-gpu-1-0"), attempts=[running("job", 99)])
        return observation.apply(session, "gpu-1", asked_at, there)

    # For the quota a claim waits between its jobs and its machines.
    with somebody_keeps(database, select(Project).where(Project.name == "p")):
        claimed = threads.submit(database.run, claims)
        comes_to_wait(database, 1)
        looked = threads.submit(database.run, looks)
        comes_to_wait(database, 2)
    assert claimed.result(TIMEOUT_S) == ["job"]
    assert looked.result(TIMEOUT_S)
    assert times == {"claim": 1, "look": 1}


def test_a_look_and_the_end_of_an_attempt_lock_the_gpus_of_a_machine_in_one_order(
    database: Database, threads: ThreadPoolExecutor
) -> None:
    """Also where their numbers there are others by now than when they were seen first."""
    add_machine(database, "gpu-1", gpus=3)
    submit(database, "job", gpus=3)
    (made,) = claim_some(database)
    for state in (AttemptState.LAUNCHING, AttemptState.RUNNING):
        database.run(lambda s, state=state: records.move(s, made.epoch, "me", state))
    times: Counter[str] = Counter()
    asked_at = database.run(database_time)
    seen_busy = [{"uuid": f"GPU-gpu-1-{n}", "pid": 7, "memory_mb": 9} for n in range(3)]
    there = seen(*(gpu(2 - n, f"GPU-gpu-1-{n}") for n in (2, 1, 0)), apps=seen_busy)
    fault = Move(
        AttemptState.ENDED, Outcome.FAILED, FailureClass.GPU_FAULT, "fallen off the bus",
        {"rank": 0, "members": [{"rank": 0, "vm": "gpu-1"}]},
    )  # fmt: skip

    def looks(session: Session) -> bool:
        times["look"] += 1
        return observation.apply(session, "gpu-1", asked_at, there)

    def ends(session: Session) -> None:
        times["end"] += 1
        ending.end(session, made.epoch, "me", fault, random.Random(1))

    # The one in the middle, until both wait for it or for each other.
    with somebody_keeps(database, select(GPU).where(GPU.uuid == "GPU-gpu-1-1")):
        looked = threads.submit(database.run, looks)
        comes_to_wait(database, 1)
        ended = threads.submit(database.run, ends)
        comes_to_wait(database, 2)
    assert looked.result(TIMEOUT_S)
    ended.result(TIMEOUT_S)
    assert times == {"look": 1, "end": 1}


def somebody_keeps(database: Database, rows: Select[Any]) -> AbstractContextManager[None]:
    """Meanwhile another transaction has these rows locked."""
    return somebody_has(database, lambda session: session.execute(rows.with_for_update()))


def comes_to_wait(database: Database, how_many: int) -> None:
    wait_until(
        lambda: database.read(lambda s: s.scalar(WAITING)) == how_many, "waiting transactions"
    )
