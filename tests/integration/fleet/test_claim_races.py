"""Several dispatchers on one queue, on a real PostgreSQL.

1. Processes that are killed at random: no job is lost, none runs twice at a time, no GPU is booked twice.
2. A job that is marked as pending while the GPU that it needs is released is not forgotten, whichever of the two commits first.
3. A project's quota holds for claims that do not see each other.
4. Two submissions under one key are one job.
5. A thousand jobs at once, or ten thousand.
"""

import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.queue import admission, capacity, claim, requeue_pending
from groupwise.jobs.fleet.queue.request import from_document
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import Attempt, Event, Job, Project, Reservation
from tests.integration.fleet import dispatchers
from tests.processes import TIMEOUT_S, wait_until
from tests.unit.jobs.fleet.queue_helpers import (
    add_machine,
    claim_some,
    claimed_ids,
    end,
    execute,
    finish,
    job_of,
    statuses,
    submit,
)

# --- 1. processes that are killed -----------------------------------------------------------------


def dispatcher(url: str, owner: str, seed: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, dispatchers.__file__, url, owner, str(seed)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("many", [4, pytest.param(8, marks=pytest.mark.soak(suite="fleet"))])
def test_dispatchers_that_are_killed(ready_url: str, database: Database, many: int) -> None:
    rng = random.Random(5)
    for n in range(3):
        add_machine(database, f"vm-{n}", 2)
    add_machine(database, "cpu", cpu_slots=2)
    names = [f"j{n:03}" for n in range(7 * many)]
    for name in names:
        submit(database, name, project=rng.choice("pq"), **rng.choice(MIX))
    running = {f"d{n}": dispatcher(ready_url, f"d{n}", n) for n in range(many)}
    try:
        # Half as many, in the middle of what they do; each is replaced, and what it held given back.
        for kill in range(1, many // 2 + 1):
            wait_until(lambda: ended(database) >= 8 * kill, "jobs to end")  # noqa: B023 — called at once
            owner = rng.choice(sorted(running))
            killed = running.pop(owner)
            killed.kill()
            killed.wait()
            wait_until(
                lambda: not connections_of_dead(database, many - 1), "the end of connections"
            )
            dispatchers.give_back(database, owner)
            running[f"later-{kill}"] = dispatcher(ready_url, f"later-{kill}", kill + 100)
        wait_until(lambda: all(p.poll() is not None for p in running.values()), "their ends")
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert {p.returncode for p in running.values()} == {0}
    assert statuses(database) == dict.fromkeys(names, "completed")
    check_history(database)


MIX: list[dict[str, Any]] = [
    {"gpus": 1}, {"gpus": 1}, {"gpus": 2}, {"gpus": 1, "machines": 2}, {"share_mb": 30_000},
    {"gpus": 0},
]  # fmt: skip


def ended(database: Database) -> int:
    query = select(func.count()).select_from(Attempt).where(Attempt.state == "ended")
    return database.read(lambda s: s.scalar(query)) or 0


def connections_of_dead(database: Database, alive: int) -> bool:
    """Whether the server still runs a transaction of a client that is gone; each dispatcher has one connection, and so has this process."""
    query = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
    return database.read(lambda s: s.execute(query).scalar_one()) > alive + 1


def check_history(database: Database) -> None:
    """From the rows alone: who held what, from when until when."""
    held = database.run(lambda s: s.scalars(select(Reservation)).all())
    assert all(r.released_at is not None for r in held)

    def hold_at(at: Reservation, *, beside: Reservation) -> bool:
        return at.reserved_at <= beside.reserved_at < (at.released_at or 0)

    for one, other in itertools.combinations(held, 2):
        together = hold_at(one, beside=other) or hold_at(other, beside=one)
        if one.epoch == other.epoch or not together:
            continue
        if one.gpu_id is None:
            assert (one.vm_id, one.slot) != (other.vm_id, other.slot)
        elif one.gpu_id == other.gpu_id:
            assert one.share_mb
            assert other.share_mb
    shares = [r for r in held if r.share_mb]
    for each in shares:
        beside = [o for o in shares if o.gpu_id == each.gpu_id and hold_at(o, beside=each)]
        assert sum(o.share_mb or 0 for o in beside) <= 80_000
    query = select(Attempt).order_by(Attempt.job_id, Attempt.epoch)
    attempts = database.run(lambda s: s.scalars(query).all())
    for _, of_job in itertools.groupby(attempts, lambda a: a.job_id):
        in_order = list(of_job)
        assert {a.number for a in in_order} == {0}, "one that never ran is not counted"
        outcomes = [a.outcome for a in in_order]
        assert outcomes == [*["void"] * (len(in_order) - 1), "succeeded"]
        for before, after in itertools.pairwise(in_order):
            assert before.ended_at is not None
            assert before.ended_at <= after.created_at


# --- 2. marking and waking ------------------------------------------------------------------------


class Step:
    """A point at which one side stops until the other lets it go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.reached.set()
        assert self.go_on.wait(TIMEOUT_S)


def stops_in(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, *, after: bool = False
) -> Step:
    """Whoever calls that function in another thread stops before it, or after it."""
    step, real = Step(), getattr(module, name)

    def stopped(*given: Any) -> Any:
        stops = threading.current_thread() is not threading.main_thread()
        if stops and not after:
            step.stop()
        found = real(*given)
        if stops and after and not step.go_on.is_set():
            step.stop()
        return found

    monkeypatch.setattr(module, name, stopped)
    return step


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def nothing_is_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims that find the queue empty would mend what was missed."""
    monkeypatch.setattr(requeue_pending, "requeue_unnoticed", lambda *_: 0)


@contextmanager
def a_claim_that_stops(database: Database, step: Step) -> Iterator[list[Any]]:
    """What it takes, once it goes on."""
    taken: list[Any] = []
    claiming = in_background(lambda: taken.extend(claim_some(database, limit=1)))
    assert step.reached.wait(TIMEOUT_S)
    yield taken
    step.go_on.set()
    claiming.join(TIMEOUT_S)


def one_begun_and_one_that_waits(database: Database, **other: Any) -> None:
    submit(database, "r", gpus=1)
    assert claimed_ids(database) == ["r"]
    submit(database, "w", gpus=1, **other)


@pytest.mark.usefixtures("nothing_is_found_later")
@pytest.mark.parametrize(
    ("gpus", "after", "place", "name"),
    [
        (1, [], requeue_pending, "lock_marking"),
        (4, ["r"], requeue_pending, "lock_marking"),
        (1, [], capacity, "view"),
    ],
    ids=["gpu", "job", "while the reasons are read"],
)
def test_released_between_the_look_and_the_mark(
    database: Database,
    second: Database,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    after: list[str],
    place: ModuleType,
    name: str,
) -> None:
    """The claim has seen that the GPU is taken, or that the job before has not ended; then it is released, and nobody is pending yet who
    could be woken. The release waits for no dispatcher that reads why its jobs cannot start: in a large fleet that takes long, and eight
    of them made the ends of attempts miss the lock timeout."""
    add_machine(database, "vm-1", gpus)
    one_begun_and_one_that_waits(database, after=after)
    with a_claim_that_stops(second, stops_in(monkeypatch, place, name, after=name == "view")):
        assert finish(database, "r") == 0
    assert statuses(database)["w"] == "queued"
    assert claimed_ids(database, limit=1) == ["w"]


@pytest.mark.usefixtures("nothing_is_found_later")
def test_released_between_the_mark_and_its_commit(
    database: Database, second: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim has marked the job, which nobody sees yet; whoever releases the GPU has to wait for it."""
    add_machine(database, "vm-1", 1)
    one_begun_and_one_that_waits(database)
    step = stops_in(monkeypatch, events, "append_of_jobs", after=True)
    with a_claim_that_stops(second, step):
        releasing = in_background(lambda: finish(database, "r"))
        wait_until(lambda: not releasing.is_alive() or waits(second, "advisory"), "a release")
        assert releasing.is_alive(), "it does not wait for the claim"
    releasing.join(TIMEOUT_S)
    assert statuses(database)["w"] == "queued"


def test_a_release_does_not_wait_while_another_one_reads_all_machines(
    database: Database, second: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where a job on several machines has waited for ten minutes. In a large fleet that takes a second."""
    for n in range(2):
        add_machine(database, f"vm-{n}", 1)
        submit(database, f"r{n}", gpus=1)
    submit(database, "gang", gpus=1, machines=2)
    assert claimed_ids(database) == ["r0", "r1"]
    execute(database, "UPDATE jobs SET waiting_since = waiting_since - 700 WHERE job_id = 'gang'")
    submit(database, "small", gpus=1)
    assert claimed_ids(database) == []
    step = stops_in(monkeypatch, requeue_pending, "machines_for_gangs", after=True)
    releasing = in_background(lambda: finish(second, "r0"))
    assert step.reached.wait(TIMEOUT_S)
    assert finish(database, "r1") == 0, "the GPU is kept for the gang"
    step.go_on.set()
    releasing.join(TIMEOUT_S)
    assert claimed_ids(database) == ["gang"]


def waits(database: Database, lock: str) -> bool:
    """Somebody, for such a lock."""
    query = text("SELECT count(*) FROM pg_locks WHERE locktype = :lock AND NOT granted")
    return database.read(lambda s: s.execute(query, {"lock": lock}).scalar_one()) > 0


# --- claims that do not see each other ------------------------------------------------------------


def test_a_gpu_taken_between_plan_and_booking_is_not_booked_twice(
    database: Database, second: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_machine(database, "vm-1", 1)
    for name in ("one", "two"):
        submit(database, name, gpus=1)
    with a_claim_that_stops(second, stops_in(monkeypatch, claim, "_book_capacity")) as slow:
        assert claimed_ids(database, limit=1) == ["two"]  # `one` is locked by the other
    assert slow == []
    assert statuses(database) == {"one": "queued", "two": "running"}


@pytest.mark.parametrize("shared", ["a quota", "the memory of a machine"])
def test_claims_at_once_see_each_other(
    database: Database, second: Database, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    """What is promised of a quota, or of a machine's memory, stands in no row of its own that could be refused twice. The first claim is
    stopped when it has booked, until the second has done the same or waits for a row."""
    if shared == "a quota":
        database.run(lambda s: s.add(Project(name="p", max_gpus=1)))
        for vm, name in (("vm-1", "one"), ("vm-2", "two")):
            add_machine(database, vm, 1)
            submit(database, name, project="p", gpus=1, vm=vm)
    else:
        add_machine(database, "vm-1", 2, facts={"ram_mb": 1000})
        for gpu, name in enumerate(("one", "two")):
            submit(database, name, named=[gpu], vm="vm-1", ram_mb=600)
    step = stops_in(monkeypatch, claim, "_book_capacity", after=True)
    taken: list[Any] = []
    with a_claim_that_stops(second, step) as first:
        step.reached.clear()
        waiting = in_background(lambda: taken.extend(claim_some(database, limit=1)))
        wait_until(lambda: step.reached.is_set() or waits(second, "transactionid"), "a claim")
    waiting.join(TIMEOUT_S)
    assert [each.job_id for each in first + taken] == ["one"]
    if shared == "a quota":
        reasons = job_of(database, "two").blocked_reasons or [""]
        assert "uses 1 of its 1 GPU" in reasons[0]


def test_dispatchers_do_not_wait_for_each_others_jobs(database: Database, second: Database) -> None:
    for n in range(2):
        add_machine(database, f"vm-{n}", 1)
        submit(database, f"j{n}", gpus=1, vm=f"vm-{n}")

    def nested(session: Session) -> list[str]:
        outer = claim.claim(session, owner="one", lease_seconds=30, limit=1)
        return [each.job_id for each in outer.claimed] + claimed_ids(second, limit=1)

    # the second transaction runs within the first one, on a connection of its own
    assert database.run(nested) == ["j0", "j1"]


# --- submissions and bursts -----------------------------------------------------------------------


def test_one_key_at_once_is_one_job(database: Database, second: Database) -> None:
    request = from_document({"arguments": ["true"], "resources": {"gpus": 1}})
    barrier = threading.Barrier(2)
    ids: list[str] = []

    def submit_here(here: Database) -> None:
        barrier.wait(TIMEOUT_S)
        job = here.run(
            lambda s: admission.submit(s, request, actor="user:x", project="p", idempotency_key="k")
        )
        ids.append(job.job_id)

    threads = [in_background(lambda d=d: submit_here(d)) for d in (database, second)]
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert (len(ids), len(set(ids))) == (2, 1)
    submitted = select(func.count()).select_from(Event).where(Event.kind == "job.submitted")
    assert database.run(lambda s: s.scalar(submitted)) == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "many", [1_000, pytest.param(10_000, marks=pytest.mark.soak(suite="fleet"))]
)
def test_many_thousand_at_once(database: Database, second: Database, many: int) -> None:
    for n in range(10):
        add_machine(database, f"vm-{n}", 8)
    request = '{"arguments": ["true"], "resources": {"gpus": 1}}'
    execute(
        database,
        "INSERT INTO jobs (job_id, job_type, request) "
        f"SELECT 'j' || lpad(n::text, 5, '0'), 'COMMAND', '{request}'::jsonb FROM generate_series(1, {many}) AS n",
    )
    begun: list[str] = []

    def admit_all(here: Database) -> None:
        while here.run(lambda s: admission.admit_new(s, 500)):
            pass

    def claim_all(here: Database) -> None:
        queued = select(func.count()).select_from(Job).where(Job.status == "queued")
        while here.run(lambda s: s.scalar(queued)):
            begun.extend(claimed_ids(here, limit=32))

    for work in (admit_all, claim_all):
        for thread in [in_background(lambda d=d, w=work: w(d)) for d in (database, second)]:
            thread.join(TIMEOUT_S)
    unadmitted = select(func.count()).select_from(Job).where(Job.admitted_at.is_(None))
    assert database.run(lambda s: s.scalar(unadmitted)) == 0
    assert len(begun) == len(set(begun)) == 80
    counts = select(Job.status, func.count()).group_by(Job.status)
    counted = database.run(lambda s: dict(s.execute(counts).all()))
    assert counted == {"running": 80, "pending": many - 80}
    for job_id in begun[:3]:
        database.run(lambda s, job_id=job_id: end(s, job_id))
    best = select(Job.job_id).where(Job.status == "pending").order_by(Job.rank, Job.job_id).limit(3)
    next_ones = database.run(lambda s: list(s.scalars(best)))
    assert database.run(requeue_pending.wake) == 3
    assert claimed_ids(database) == next_ones


def test_a_reservation_reads_those_of_its_own_machine_alone(database: Database) -> None:
    """Not all open ones, which in a large fleet would cost the square of its GPUs."""
    machines = 160
    for n in range(machines):
        add_machine(database, f"vm-{n}", 1)
        submit(database, f"j{n:04}", gpus=1)
    while claimed_ids(database, limit=64):
        pass
    read = "seq_tup_read + COALESCE(idx_tup_fetch, 0) FROM pg_stat_user_tables WHERE relname = 'reservations'"

    def look(session: Session) -> int:
        session.execute(text("SELECT pg_stat_force_next_flush()"))
        return session.execute(text(f"SELECT {read}")).scalar_one()

    database.run(look)  # what this transaction has read is counted from the next one on
    assert database.run(look) < 25 * machines


@pytest.mark.parametrize("patient", [False, True])
def test_claims_on_two_quotas_do_not_deadlock(
    database: Database, second: Database, patient: bool
) -> None:
    """Two claims that each hold the quota that the other one wants next would wait for each other for ever."""
    add_machine(database, "vm-1", 1)
    for name in ("a", "b"):
        execute(database, "INSERT INTO projects (name, max_gpus) VALUES (:name, 8)", name=name)
    if patient:  # so that the quota of its project is known before somebody thinks of locking it
        submit(database, "long", project="a", gpus=4)
        assert claimed_ids(database) == []
        execute(database, "UPDATE jobs SET waiting_since = waiting_since - 700")
    submit(database, "large", project="b", gpus=2)
    submit(database, "small", project="a", gpus=1)
    with somebody_has(second, lambda s: capacity.lock_quotas(s, {"a"})):
        assert claimed_ids(database, limit=1) == []
    assert claimed_ids(database, limit=1) == ["small"]


@contextmanager
def somebody_has(database: Database, locks: Callable[[Session], object]) -> Iterator[None]:
    """Meanwhile another transaction holds what it locks."""
    held, go_on = threading.Event(), threading.Event()

    def keeps(session: Session) -> None:
        locks(session)
        held.set()
        assert go_on.wait(TIMEOUT_S)

    keeper = in_background(lambda: database.run(keeps))
    try:
        assert held.wait(TIMEOUT_S)
        yield
    finally:
        go_on.set()
        keeper.join(TIMEOUT_S)
