"""Claims of jobs, by one dispatcher at a time. Several at once: `tests/integration/fleet/test_claim_races.py`."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from groupwise.api.schemas.fleet import MAX_SLOTS
from groupwise.jobs.fleet.attempts import ending
from groupwise.jobs.fleet.attempts.decide import Move
from groupwise.jobs.fleet.operations import jobs, projects
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.queue import claim, kinds, requeue_pending
from groupwise.jobs.fleet.states import AttemptState, Outcome
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import (
    Attempt,
    Checkpoint,
    Event,
    Member,
    Project,
    Reservation,
)
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.spec import JobSpec
from tests.unit.jobs.fleet.queue_helpers import (
    add_machine,
    claim_some,
    claimed_ids,
    execute,
    finish,
    job_of,
    kinds_of_events,
    statuses,
    submit,
)


def attempt_of(database: Database, epoch: int) -> Attempt:
    return database.run(lambda s: s.get_one(Attempt, epoch))


def test_an_attempt_with_all_that_it_holds(database: Database) -> None:
    add_machine(database, "vm-1", 4)
    submit(database, "one", gpus=2)
    before = database.run(database_time)
    (made,) = claim_some(database, owner="me")
    attempt = attempt_of(database, made.epoch)
    found = (attempt.state, attempt.owner, attempt.number, attempt.generation)
    assert found == ("reserved", "me", 0, 0)
    assert before + 30 <= attempt.lease_until <= database.run(database_time) + 30
    assert attempt.previous_failure is attempt.resume_from is attempt.spec is None
    members = database.run(lambda s: s.scalars(select(Member)).all())
    assert [(m.epoch, m.rank, m.vm_id) for m in members] == [(made.epoch, 0, "vm-1")]
    held = database.run(lambda s: s.scalars(select(Reservation)).all())
    assert sorted(r.gpu_id or 0 for r in held) == [g.gpu_id for g in made.placement.seats[0].gpus]
    assert all(r.share_mb is None and r.slot is None for r in held)
    job = job_of(database, "one")
    assert (job.status, job.assigned_vm, job.gpu_index) == ("running", "vm-1", 0)
    assert kinds_of_events(database, "one")[-2:] == ["job.running", "attempt.reserved"]


def test_epochs_rise_and_attempts_are_counted(database: Database) -> None:
    """Those that never ran are not, and a new generation counts anew."""
    add_machine(database, "vm-1", 1)
    submit(database, "one", gpus=1)
    epoch = 0
    for status, failure, outcome, found in (
        ("queued", "network", None, (0, None, 0)),
        ("queued", "launch_failure", "void", (1, "network", 0)),
        ("failed", "user_error", None, (1, "launch_failure", 0)),
        ("completed", None, None, (0, None, 1)),
    ):
        (made,) = claim_some(database)
        assert made.epoch > epoch
        epoch, attempt = made.epoch, attempt_of(database, made.epoch)
        assert (attempt.number, attempt.previous_failure, attempt.generation) == found
        finish(database, "one", status, failure, outcome)
        if status == "failed":
            execute(database, "UPDATE jobs SET status = 'queued', generation = 1")


@pytest.mark.parametrize("retried", [False, True])
def test_a_job_that_started_again_continues_from_what_it_did_since(
    database: Database, retried: bool
) -> None:
    """Which of several attempts was further does not count, in whatever generation they were."""
    add_machine(database, "vm-1", 1)
    submit(database, "one", gpus=1)
    for generation, steps in enumerate([(990, 1000), (200, 300), ()]):
        (claimed,) = claim_some(database)
        saved = [
            Checkpoint(
                job_id="one", generation=generation * retried, epoch=claimed.epoch,
                path=f"outputs/step-{step}", step=step, mirrored_at=1.0,
                manifest={"outputs/x": ["a" * 64, 420, step]},
            )
            for step in steps
        ]  # fmt: skip
        database.run(lambda s, saved=saved: s.add_all(saved))
        if retried:
            finish(database, "one", "failed", "crashed")
            database.run(lambda s: jobs.retry(s, Actor("user:test"), "one"))
        else:
            finish(database, "one", "queued", "reboot")
    (again,) = claim_some(database)
    resume = attempt_of(database, again.epoch).resume_from
    assert resume is not None
    assert (resume["step"], resume["path"]) == (300, "outputs/step-300")
    assert resume["manifest"] == {"outputs/x": ["a" * 64, 420, 300]}


def test_a_damaged_checkpoint_is_skipped_until_the_job_is_retried_by_hand(
    database: Database,
) -> None:
    add_machine(database, "vm-1", 1)
    submit(database, "one", gpus=1)
    for epoch, step in ((-1, 900), (0, 10), (0, 20)):  # it began anew after step 900
        saved = Checkpoint(
            job_id="one", generation=0, epoch=epoch, path=f"outputs/{step}", step=step,
            manifest={"outputs/x": ["a" * 64, 420, 3]}, mirrored_at=1.0,
        )  # fmt: skip
        database.run(lambda s, row=saved: s.add(row))
    (first,) = claim_some(database)
    member = {"rank": 0, "vm": "vm-1", "refusal": "checkpoint: it is damaged"}
    evidence = {"rank": 0, "members": [member]}
    failure = FailureClass.NOT_PROVIDED
    move = Move(AttemptState.ENDED, Outcome.VOID, failure, "it is damaged", evidence)
    for _ in range(2):  # whoever made sure of it died, and does it again
        database.run(lambda s: ending.end(s, first.epoch, "me", move, random.Random()))
    (second,) = claim_some(database)
    resume = attempt_of(database, second.epoch).resume_from
    assert (resume["step"], resume["path"]) == (10, "outputs/10")
    query = select(Event.detail).where(Event.kind == "job.checkpoint_damaged")
    assert [each["step"] for each in database.read(lambda s: list(s.scalars(query)))] == [20]
    finish(database, "one", "failed", "crashed")
    database.run(lambda s: jobs.retry(s, Actor("user:test"), "one"))
    (again,) = claim_some(database)
    assert attempt_of(database, again.epoch).resume_from["step"] == 20


def test_a_job_gets_a_gpu_it_reported_only_if_no_other_is_left(
    database: Database,
) -> None:
    add_machine(database, "vm-1", 2)
    submit(database, "one", gpus=1)
    given: list[int] = []
    for busy in (False, False, True):
        if busy:
            submit(database, "other", named=[1], vm="vm-1", priority=900)
        made = claim_some(database)[-1]
        given.append(made.placement.seats[0].gpus[0].index)
        finish(database, "one", "queued", "gpu_fault")
    assert given == [0, 1, 0]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_a_gang_is_led_by_a_machine_that_others_find(database: Database, address: str) -> None:
    """Rank 0 is where they meet."""
    add_machine(database, "local", 1, ip_address=address)
    add_machine(database, "node-1", 1, ip_address="10.0.0.11")
    add_machine(database, "node-2", 1, ip_address="node-2.lan")
    submit(database, "gang", gpus=1, machines=3)
    (made,) = claim_some(database)
    assert [seat.vm_id for seat in made.placement.seats] == ["node-1", "node-2", "local"]
    assert job_of(database, "gang").assigned_vm == "node-1"


def test_ram_is_promised_to_one_job_at_a_time(database: Database) -> None:
    add_machine(database, "vm-1", 4, facts={"ram_mb": 1000, "cpus": 8})
    for n in range(3):
        submit(database, f"j{n}", gpus=1, ram_mb=500)
    assert claimed_ids(database) == ["j0", "j1"]
    assert "RAM not promised" in (job_of(database, "j2").blocked_reasons or [""])[0]
    assert finish(database, "j0") == 1
    assert claimed_ids(database) == ["j2"]


def test_held_delayed_cancelled_and_unadmitted_jobs_are_not_claimed(database: Database) -> None:
    add_machine(database, "vm-1", 8)
    for name in ("held", "later", "cancelled"):
        submit(database, name, gpus=1, hold=name == "held")
    later = database.run(database_time) + 1000
    execute(database, "UPDATE jobs SET not_before = :t WHERE job_id = 'later'", t=later)
    execute(database, "UPDATE jobs SET status = 'cancelled' WHERE job_id = 'cancelled'")
    execute(database, "INSERT INTO jobs (job_id) VALUES ('by-hand')")  # nobody has admitted it
    before = statuses(database)
    assert claimed_ids(database) == []
    assert statuses(database) == before


def test_machines_that_get_nothing(database: Database) -> None:
    long_looks = """facts = '{"look_seconds": 300}'"""
    changes = {
        "draining = true": "draining; `groupwise fleet vm undrain` ends that",
        "drain_reason = 'it burns'": "draining: it burns",
        "contact = 'unreachable'": "unreachable",
        "contact = 'untrusted'": "vm trust",
        "contact = 'new'": "not observed yet",
        "contact = 'new', problem = 'no key fits'": "no key fits",
        "lost_at = 1": "lost",
        "degraded = true": "cannot be read",
        "observed_round = observed_round - 1000": "not observed for",
        "observed_round = observed_round - 130": "not observed for over two minutes",
        f"observed_round = observed_round - 1300, {long_looks}": "for over 20 minutes",
        "active = false": "",
    }
    for n, change in enumerate(changes):
        add_machine(database, f"vm-{n}", 1)
        execute(database, f"UPDATE vms SET {change} WHERE vm_id = 'vm-{n}'")
    names = [submit(database, f"job-{n}", gpus=1, vm=f"vm-{n}") for n in range(len(changes))]
    assert claimed_ids(database) == []
    for name, why in zip(names, changes.values(), strict=True):
        assert why in "\n".join(job_of(database, name).blocked_reasons or [])


def test_a_command_of_exec_waits_for_nothing_but_the_machine(database: Database) -> None:
    add_machine(database, "vm-1", cpu_slots=1)
    first, second = submit(database, gpus=0), submit(database, gpus=0)
    assert claimed_ids(database) == [first]
    command: dict[str, Any] = {"gpus": 0, "vm": "vm-1", "oversubscribe": True, "priority": 1000}
    commands = [submit(database, **command) for _ in range(2)]
    execute(database, "UPDATE vms SET draining = true")
    assert set(claimed_ids(database)) == set(commands)
    execute(database, "UPDATE vms SET draining = false, contact = 'unreachable', problem = 'off'")
    third = submit(database, **command)
    assert claimed_ids(database) == []
    reasons = job_of(database, third).blocked_reasons or []
    assert any(reason.endswith(": unreachable") for reason in reasons)
    assert job_of(database, second).status == "pending"


def test_a_command_of_exec_takes_no_slot_of_an_untracked_one(database: Database) -> None:
    add_machine(database, "vm-1")
    stray = {"what": "attempt", "job_id": "other", "epoch": 1, "detail": "", "since": 0, "gpus": []}
    facts = json.dumps({"untracked": [{**stray, "slot": MAX_SLOTS}]})
    execute(database, f"UPDATE vms SET facts = '{facts}'")
    command = submit(database, gpus=0, vm="vm-1", oversubscribe=True)
    assert claimed_ids(database) == [command]
    slots = select(Reservation.slot)
    assert database.read(lambda s: s.scalars(slots).all()) == [MAX_SLOTS + 1]


def test_gpus_that_are_not_given(database: Database) -> None:
    add_machine(database, "vm-1", 2)
    execute(database, "UPDATE gpus SET quarantine_reason = 'Xid 79' WHERE \"index\" = 1")
    submit(database, "one", gpus=1)
    for state in ("foreign_busy", "missing", "degraded", "mig"):
        execute(database, f"UPDATE gpus SET observed = '{state}' WHERE \"index\" = 0")
        assert claimed_ids(database) == []
    assert "quarantined: Xid 79" in "\n".join(job_of(database, "one").blocked_reasons or [])


def test_a_job_waits_for_others(database: Database) -> None:
    add_machine(database, "vm-1", 4)
    submit(database, "first", gpus=1)
    submit(database, "then", gpus=1, after=["first"])
    submit(database, "if-well", gpus=1, after=["first:ok"])
    assert claimed_ids(database) == ["first"]
    waiting = job_of(database, "then")
    assert (waiting.status, waiting.blocked_on, waiting.waiting_since) == ("pending", "first", None)
    assert waiting.blocked_reasons == ["it comes after job first, which is running"]
    assert finish(database, "first", "failed", "crashed") == 2
    assert claimed_ids(database) == ["then"]
    hopeless = job_of(database, "if-well")
    assert hopeless.status == "failed"
    assert "job first" in str(hopeless.failure_reason)
    assert hopeless.end_time is not None


def test_a_job_behind_a_waiting_gang_is_not_woken_unless_it_can_start(database: Database) -> None:
    """What is kept for the gang is found among all machines, also those that are taken now."""
    add_machine(database, "full", 2)
    add_machine(database, "free", 2)
    submit(database, "runs", gpus=2)
    assert claimed_ids(database) == ["runs"]
    submit(database, "gang", gpus=2, machines=2)
    assert claimed_ids(database) == []
    execute(database, "UPDATE jobs SET waiting_since = waiting_since - 700 WHERE job_id = 'gang'")
    submit(database, "small", gpus=1)
    assert claimed_ids(database) == []
    told = kinds_of_events(database, "small")
    assert told[-1] == "job.pending"
    for _ in range(4):
        assert claimed_ids(database) == []
    assert kinds_of_events(database, "small") == told


def test_a_job_whose_predecessor_has_ended_waits_for_room_like_others(
    database: Database,
) -> None:
    """With reasons, and in time with patience: small jobs do not overtake it for ever."""
    add_machine(database, "vm-1", 2)
    submit(database, "first", gpus=1)
    assert claimed_ids(database) == ["first"]
    finish(database, "first")
    submit(database, "small", gpus=1)
    assert claimed_ids(database) == ["small"]
    submit(database, "large", gpus=2, after=["first:ok"])
    submit(database, "another", gpus=2, after=["first"])
    assert claimed_ids(database) == []
    assert claimed_ids(database) == []
    for job_id in ("large", "another"):
        waiting = job_of(database, job_id)
        assert (waiting.status, waiting.blocked_on) == ("pending", None)
        assert waiting.blocked_reasons == ["vm-1: 1 of 2 fitting GPUs free, 2 wanted"]
        assert waiting.waiting_since is not None
    execute(database, "UPDATE jobs SET waiting_since = waiting_since - 700 WHERE job_id = 'large'")
    submit(database, "overtaking", gpus=1)
    assert claimed_ids(database) == []
    finish(database, "small")
    assert claimed_ids(database) == ["large"]


def test_a_job_that_left_the_queue_is_not_marked_as_unplaced(database: Database) -> None:
    add_machine(database, "vm-1", 1)
    submit(database, "first", gpus=1)
    submit(database, "then", gpus=1, after=["first"])
    submit(database, "later", gpus=1, after=["first"])
    submit(database, "large", gpus=2)
    found = database.run(lambda s: claim.claim(s, owner="me", lease_seconds=30.0, limit=10))
    assert [each.job_id for each in found.claimed] == ["first"]
    unplaced = found.unplaced
    assert unplaced is not None
    reasons = database.read(lambda s: claim.explain(s, unplaced))
    for job_id in ("then", "large"):
        database.run(lambda s, job_id=job_id: jobs.cancel(s, Actor("user:test"), job_id))
    database.run(lambda s: claim.mark(s, unplaced, reasons, "me"))
    found_of = [statuses(database)[name] for name in ("first", "then", "later", "large")]
    assert found_of == ["running", "cancelled", "pending", "cancelled"]


def test_a_project_stays_within_its_quota(database: Database) -> None:
    add_machine(database, "vm-1", 8)
    for n in range(3):
        submit(database, f"p{n}", project="p", gpus=2)
    submit(database, "q", project="q", gpus=2)
    execute(database, "UPDATE projects SET max_gpus = 4 WHERE name = 'p'")
    assert claimed_ids(database) == ["p0", "q", "p1"]
    waiting = job_of(database, "p2")
    assert waiting.blocked_reasons == ["project p uses 4 of its 4 GPUs, 2 wanted"]
    assert waiting.waiting_since is None  # it waits for its project, so that nothing is kept for it
    assert finish(database, "p0") == 1
    assert claimed_ids(database) == ["p2"]


@pytest.mark.parametrize("machines", [1, 2])
def test_a_share_is_not_begun_on_one_gpu_more_than_the_quota_has(
    database: Database, machines: int
) -> None:
    """Though another one, there or elsewhere, would suit it better."""
    for n in range(machines):
        add_machine(database, f"vm-{n}", 2 // machines)
    for n, (project, share) in enumerate((("p", 20_000), ("q", 70_000), ("p", 5_000))):
        submit(database, f"j{n}", project=project, share_mb=share)
        execute(database, "UPDATE projects SET max_gpus = 1 WHERE name = 'p'")
        assert claimed_ids(database) == [f"j{n}"]
    query = select(Reservation.gpu_id).order_by(Reservation.reservation_id)
    held = database.run(lambda s: s.scalars(query).all())
    assert held[0] == held[2] != held[1]


class Shrinking:
    """A kind whose batch can be halved."""

    def expand(self, row: kinds.Row) -> JobSpec:
        return JobSpec(("train", str(row["batch_size"])))

    def smaller(self, row: kinds.Row) -> kinds.Row | None:
        return {**row, "batch_size": row["batch_size"] // 2} if row["batch_size"] > 1 else None


def test_a_smaller_batch_after_the_memory_was_too_small(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "_entry_points", lambda: {"SHRINK": "shrinking"})
    monkeypatch.setattr(kinds, "_load_entry_point", lambda place: Shrinking())
    add_machine(database, "vm-1", 4)
    sizes = {(True, 1): "4", (True, 2): "2", (True, 9): "1", (False, 1): None}
    for n, ((allowed, failures), size) in enumerate(sizes.items()):
        asked = {"job_type": "SHRINK", "batch_size": 8, "gpus": 1, "allow_smaller_batch": allowed}
        submit(database, f"job-{n}", arguments=[], **asked)
        spent = f'{{"gpu_oom": {failures}}}'
        execute(database, f"UPDATE jobs SET spent = :spent WHERE job_id = 'job-{n}'", spent=spent)
        (made,) = claim_some(database)
        spec = attempt_of(database, made.epoch).spec
        assert (None if spec is None else spec["arguments"][1]) == size


def test_a_reservation_that_the_view_does_not_know_costs_one_job_its_turn(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of the database is the last guard: who runs into it is rolled back alone."""
    add_machine(database, "vm-1", 1)
    add_machine(database, "vm-2", 1)
    submit(database, "one", gpus=1)
    submit(database, "two", gpus=1)
    real = claim._make_attempts

    def broken(session: Session, bookings: Sequence[claim._Booking], *rest: Any) -> Any:
        made = real(session, bookings, *rest)
        if any(each.job_id == "one" for each in made):
            raise IntegrityError("uq_reservations_gpu", {}, Exception())
        return made

    monkeypatch.setattr(claim, "_make_attempts", broken)
    assert claimed_ids(database) == ["two"]
    assert statuses(database) == {"one": "queued", "two": "running"}
    assert len(database.run(lambda s: s.scalars(select(Reservation)).all())) == 1
    monkeypatch.undo()
    assert claimed_ids(database) == ["one"]


# Behind an engine

SLURM = {"name": "slurm", "slots": 2, "gpus": 4}


def test_behind_an_engine_a_job_holds_a_place_and_no_gpu(database: Database) -> None:
    add_machine(database, "slurm", engine=SLURM)
    for name in ("one", "two", "three"):
        submit(database, name, gpus=2)
    made = claim_some(database)
    held = database.run(lambda s: s.scalars(select(Reservation)).all())
    assert [(r.gpu_id, r.slot, r.share_mb) for r in held] == [(None, 0, None), (None, 1, None)]
    assert statuses(database) == {"one": "running", "two": "running", "three": "pending"}
    job = job_of(database, "one")
    assert (job.assigned_vm, job.gpu_index) == ("slurm", None)
    twice = {"vm_id": "slurm", "slot": 0, "epoch": made[0].epoch, "rank": 0, "reserved_at": 1.0}
    with pytest.raises(IntegrityError):
        database.run(lambda s: s.add(Reservation(**twice)))


def test_gpus_that_an_engine_gives_count_for_a_quota(database: Database) -> None:
    add_machine(database, "slurm", engine={**SLURM, "slots": 9})
    add_machine(database, "own", 1)
    database.run(lambda s: s.add(Project(name="p", max_gpus=4)))
    for name, gpus in (("a", 2), ("b", 1), ("c", 2), ("d", 0)):
        submit(database, name, project="p", gpus=gpus)
    assert claimed_ids(database) == ["a", "b", "d"]
    assert job_of(database, "b").assigned_vm == "own"
    assert job_of(database, "c").blocked_reasons == ["project p uses 3 of its 4 GPUs, 2 wanted"]
    (shown,) = database.read(lambda s: projects.listing(s, Actor("user:test")))
    assert shown["gpus_in_use"] == 3
    finish(database, "a", "completed")
    database.run(lambda s: s.execute(update(Reservation).values(released_at=1.0)))
    database.run(lambda s: requeue_pending.wake(s, actor="test"))
    assert claimed_ids(database) == ["c"]


def test_a_patient_gang_that_may_not_begin_yet_keeps_nothing(database: Database) -> None:
    add_machine(database, "vm-1", 2)
    submit(database, "first", gpus=1)
    assert claimed_ids(database) == ["first"]
    submit(database, "gang", gpus=2)
    assert claimed_ids(database) == []
    execute(
        database,
        "UPDATE jobs SET waiting_since = waiting_since - 700, not_before = 1e12 WHERE job_id = 'gang'",
    )
    submit(database, "small", gpus=1)
    assert claimed_ids(database) == ["small"]
