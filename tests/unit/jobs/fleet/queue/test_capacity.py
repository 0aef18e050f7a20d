"""Free capacity, which pending jobs are woken when it changes, and why a job waits.

1. Whoever can begin is woken by whatever makes it possible: a release, a machine, a quota, the end of another job.
2. Nobody else is woken: it is asked by shape, not by job.
3. Capacity of which nobody told is found by the next claim.
"""

from collections.abc import Collection
from itertools import combinations
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.operations import machines
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.queue import capacity, pending_reasons, requeue_pending
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import VM, Job, Project
from tests.unit.jobs.fleet.queue_helpers import (
    add_machine,
    claim_some,
    claimed_ids,
    end,
    execute,
    finish,
    job_of,
    kinds_of_events,
    statuses,
    submit,
)


def waiting(database: Database) -> list[str]:
    return sorted(name for name, status in statuses(database).items() if status == "pending")


def wake(database: Database) -> int:
    return database.run(requeue_pending.wake)


def explain(database: Database, job_id: str) -> list[str]:
    return database.run(lambda s: pending_reasons.explain(s, job_of_session(s, job_id)))


def job_of_session(session: Session, job_id: str) -> Job:
    return session.get_one(Job, job_id)


def full_fleet(database: Database, waiting: int = 5, gpus: int = 2) -> None:
    """Every GPU taken by jobs r0, r1 …, and w0, w1 … pending."""
    add_machine(database, "vm-1", gpus)
    for n in range(gpus):
        submit(database, f"r{n}", gpus=1)
    for n in range(waiting):
        submit(database, f"w{n}", gpus=1)
    assert len(claim_some(database)) == gpus


def test_as_many_are_woken_as_there_is_room_for_and_the_best_ranked(database: Database) -> None:
    full_fleet(database)
    assert wake(database) == 0
    assert finish(database, "r0") == 1
    assert waiting(database) == ["w1", "w2", "w3", "w4"]
    woken = job_of(database, "w0")
    assert woken.status == "queued"
    assert woken.waiting_since is not None
    assert kinds_of_events(database, "w0")[-1] == "job.queued"
    assert claimed_ids(database) == ["w0"]


def test_a_release_too_small_for_a_job_wakes_no_job(database: Database) -> None:
    full_fleet(database, waiting=0)
    submit(database, "big", gpus=2)
    submit(database, "other", gpus=1, gpu_model="H100")
    assert claimed_ids(database) == []
    assert finish(database, "r0") == 0
    assert finish(database, "r1") == 1
    assert waiting(database) == ["other"]


def test_a_machine_that_comes_back_and_a_quota_that_is_raised(database: Database) -> None:
    add_machine(database, "vm-1", 1)
    submit(database, "one", project="p", gpus=1)
    for before, after in (
        ("vms SET draining = true", "vms SET draining = false"),
        ("vms SET contact = 'unreachable'", "vms SET contact = 'ok'"),
        ("vms SET drain_reason = 'x'", "vms SET drain_reason = NULL"),
        ("vms SET active = false", "vms SET active = true"),
        ("projects SET max_gpus = 0", "projects SET max_gpus = 1"),
    ):
        execute(database, f"UPDATE {before}")
        assert claimed_ids(database) == []
        assert waiting(database) == ["one"]
        execute(database, f"UPDATE {after}")
        assert wake(database) == 1
    assert claimed_ids(database) == ["one"]


def test_a_quota_does_not_count_ended_jobs_on_an_unreachable_machine(
    database: Database,
) -> None:
    """Nobody knows when that machine comes back, and its GPU stays reserved as long; what still runs there counts."""
    add_machine(database, "a", 1)
    submit(database, "one", project="p", gpus=1)
    execute(database, "UPDATE projects SET max_gpus = 1")
    assert claimed_ids(database) == ["one"]
    add_machine(database, "b", 1)
    submit(database, "two", project="p", gpus=1)
    execute(database, "UPDATE vms SET contact = 'unreachable' WHERE vm_id = 'a'")
    assert claimed_ids(database) == []
    over = "state = 'ended', outcome = 'failed', failure_class = 'host_lost', ended_at = 1"
    execute(database, f"UPDATE attempts SET {over}")
    execute(database, "UPDATE jobs SET status = 'failed' WHERE job_id = 'one'")
    assert wake(database) == 1
    assert claimed_ids(database) == ["two"]
    submit(database, "three", project="p", gpus=1)
    assert "uses 1 of its 1 GPU," in str(explain(database, "three"))


def test_unannounced_capacity_is_found_by_the_next_claim(database: Database) -> None:
    full_fleet(database)
    database.run(lambda s: end(s, "r0"))
    assert len(waiting(database)) == 5
    assert claimed_ids(database) == []
    assert waiting(database) == ["w1", "w2", "w3", "w4"]
    assert claimed_ids(database) == ["w0"]


# --- why a job waits ------------------------------------------------------------------------------


def test_a_machine_is_kept_for_projects(database: Database) -> None:
    """Also in the look of a claim, and for one that waits; a value that is not a list opens it to nobody."""
    keeps: tuple[Any, ...] = (None, ["ours", "a"], ["a"], [], "ours")
    for n, kept_for in enumerate(keeps):
        add_machine(database, f"vm-{n}", 1, projects=kept_for)
        submit(database, f"job-{n}", project="ours", gpus=1, vm=f"vm-{n}")
    assert claimed_ids(database) == ["job-0", "job-1"]
    assert "vm-4: it is kept" in str(explain(database, "job-4"))
    assert wake(database) == 0
    database.run(lambda s: machines.change(s, Actor("user:ada"), "vm-4", projects=["ours"]))
    assert claimed_ids(database) == ["job-4"]


def test_a_machine_reserved_for_other_projects_meanwhile_is_noticed_under_its_lock(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_machine(database, "vm-1", 1)
    submit(database, "job", gpus=1)
    looked = capacity.view_of_room

    def look(session: Session, projects: list[str]) -> capacity.FreeCapacity:
        found = looked(session, projects)
        session.execute(update(VM).values(projects=["others"]))
        return found

    monkeypatch.setattr(capacity, "view_of_room", look)
    assert claimed_ids(database) == []


def test_machines_without_room_are_left_unread_and_all_is_placed_as_if_they_were_read(
    database: Database,
) -> None:
    for name, gpus, slots in (("full", 2, 1), ("gpus", 3, 0), ("mixed", 4, 2), ("slots", 1, 3)):
        add_machine(database, name, gpus, cpu_slots=slots)
    taken = {"full": [0, 1, None], "gpus": [0], "mixed": [0, 1, 2], "slots": [0, None]}
    for name, seats in taken.items():
        for seat in seats:
            needs: dict[str, Any] = {"gpus": 0} if seat is None else {"gpus": 1, "named": [seat]}
            submit(database, vm=name, **needs)
    submit(database, vm="gpus", gpus=1, share_mb=30_000)
    assert len(claim_some(database)) == 10
    wanted = [Resources.model_validate(needs) for needs in (
        {"gpus": 1}, {"gpus": 2}, {"gpus": 0}, {"gpus": 1, "share_mb": 40_000}, {"gpus": 0, "machines": 2},
        {"gpus": 0, "oversubscribe": True, "vm": "full"}, {"gpus": 1, "machines": 2}, {"gpus": 1, "vm": "full"},
    )]  # fmt: skip

    def compare(session: Session) -> None:
        assert set(capacity.view_of_room(session, []).machines) == {"gpus", "mixed"}
        for order in combinations(wanted, 2):
            whole, part = capacity.view(session, []), capacity.view_of_room(session, [])
            known = capacity.view_of_room(session, [], whole.machines)
            for number, resources in enumerate(order):
                key = (float(number), "job")
                placement = part.room_for(resources, "default", key)
                assert placement == whole.room_for(resources, "default", key), order
                assert placement == known.room_for(resources, "default", key), order
                assert part.is_full() == whole.is_full() == known.is_full()
                for view in (whole, part, known):
                    if placement is not None:
                        view.take(placement, resources, "default")
                    elif number == 0:
                        view.withhold_for(resources, "default", key)

    database.read(compare)


def test_a_command_on_a_full_machine_reads_that_machine_alone(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        add_machine(database, name, 1, cpu_slots=1)
        submit(database, gpus=1, vm=name)
        submit(database, gpus=0, vm=name)
    assert len(claim_some(database)) == 6

    def look(session: Session) -> None:
        view = capacity.view_of_room(session, [])
        for name, found in (("b", True), ("no such", False)):
            command = Resources(gpus=0, vm=name, oversubscribe=True)
            assert (view.room_for(command, "default", (0.0, "job")) is not None) == found
        assert [*view.machines] == ["b"]
        assert view.is_full()

    database.read(look)


def test_a_gang_without_gpus_reads_no_full_machine_if_they_are_known(database: Database) -> None:
    for name in ("full", "free"):
        add_machine(database, name, 1, cpu_slots=1)
    for gpus in (1, 0):
        submit(database, vm="full", gpus=gpus)
    submit(database, vm="free", gpus=1)
    assert len(claim_some(database)) == 3
    gang, key = Resources(gpus=0, machines=2), (0.0, "gang")

    def look(session: Session) -> None:
        whole = capacity.view(session, [])
        whole.withhold_for(gang, "default", key)
        part = capacity.view_of_room(session, [], whole.machines)
        part.withhold_for(gang, "default", key)
        assert part.held == whole.held != []
        assert [*part.machines] == ["free"]

    database.read(look)


def test_few_machines_are_read_under_the_lock_where_many_have_room(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with more room are among them. A job that fits on another one is woken by the next claim."""
    monkeypatch.setattr(capacity, "MAX_NAMED", 2)
    database.run(lambda s: s.add(Project(name="p", max_gpus=9)))
    for name in ("a", "b", "c", "y", "z"):
        add_machine(database, name, 1, cpu_slots=1)
    for name in ("y", "z"):
        submit(database, f"on-{name}", gpus=1, vm=name)
    assert len(claim_some(database)) == 2
    for name in ("y", "z"):
        submit(database, f"after-{name}", project="p", gpus=1, vm=name)
    assert claimed_ids(database) == []
    read: list[Collection[str] | None] = []
    reading = capacity.machines

    def read_machines(session: Session, now: float, vm_ids: Collection[str] | None = None) -> Any:
        read.append(vm_ids)
        return reading(session, now, vm_ids)

    monkeypatch.setattr(capacity, "machines", read_machines)
    assert finish(database, "on-z") == 1
    database.run(lambda s: end(s, "on-y"))
    assert wake(database) == 0
    assert [len(vm_ids or ()) for vm_ids in read] == [3, 2]
    assert [claimed_ids(database) for _ in range(2)] == [["after-z"], ["after-y"]]


def test_why_a_job_waits(database: Database) -> None:
    full_fleet(database, waiting=1)
    assert explain(database, "w0") == ["vm-1: 0 of 2 fitting GPUs free, 1 wanted"]
    assert explain(database, "r0") == []
    submit(database, "held", gpus=1, hold=True)
    assert "fleet release held" in explain(database, "held")[0]
    submit(database, "after", gpus=0, after=["w0:ok"])
    assert "w0, which is pending and must complete" in explain(database, "after")[0]
    finish(database, "r0", "queued", "network")
    later = database.run(database_time) + 100
    execute(database, "UPDATE jobs SET not_before = :t WHERE job_id = 'r0'", t=later)
    assert explain(database, "r0")[0].startswith("it is tried again in ")
    execute(database, """UPDATE attempts SET evidence = '{"because": "exit code 1"}'""")
    assert explain(database, "r0")[0].endswith(" s; its last attempt ended: exit code 1")
    finish(database, "r1")
    assert explain(database, "w0") == ["there is room for it, and it is the next in the queue"]


def test_a_job_does_not_wait_for_itself_but_for_its_machine_to_confirm(database: Database) -> None:
    add_machine(database, "vm-1")
    submit(database, "job", gpus=0)
    assert claimed_ids(database) == ["job"]
    ended = "state = 'ended', outcome = 'failed', failure_class = 'network', ended_at = 1"
    execute(database, f"UPDATE attempts SET {ended}")
    execute(database, "UPDATE jobs SET status = 'queued'")
    (reason,) = explain(database, "job")
    assert "vm-1 has not confirmed" in reason
    submit(database, "other", gpus=0)
    assert explain(database, "other") == ["vm-1: its CPU slot is taken"]
    execute(database, "UPDATE reservations SET released_at = 2")
    assert explain(database, "job") == ["there is room for it, and it is the next in the queue"]
