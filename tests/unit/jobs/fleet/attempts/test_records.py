"""Writes about attempts: only their owner's count, and each can be made twice."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts import ending, records, refusals
from groupwise.jobs.fleet.attempts.decide import Move
from groupwise.jobs.fleet.attempts.records import Stale
from groupwise.jobs.fleet.operations import jobs, machines, status
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.queue import claim, failures
from groupwise.jobs.fleet.states import AttemptState, Cleanup, Outcome
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Event, Job, Member
from groupwise.jobs.hosts.answers import MemberState, RunnerState
from groupwise.jobs.hosts.failures import FailureClass
from tests.in_process_fleet import InProcessFleet, NoJitter

ADA = Actor("user:ada")
SUCCESS = Move(AttemptState.ENDED, Outcome.SUCCEEDED, because="exit code 0")


def failed(failure: FailureClass, **evidence: Any) -> Move:
    member = {"rank": 0, "vm": "a", **evidence}
    return Move(
        AttemptState.ENDED, Outcome.FAILED, failure, "why", {"rank": 0, "members": [member]}
    )


@pytest.fixture
def fleet(database: Database, tmp_path: Path) -> InProcessFleet:
    return InProcessFleet(database, tmp_path, {"a": ["GPU-a0"], "b": ["GPU-b0"]})


@pytest.fixture
def epoch(fleet: InProcessFleet) -> int:
    """Of an attempt that `me` has claimed."""
    fleet.submit("job")
    (made,) = claimed(fleet)
    return made.epoch


def claimed(fleet: InProcessFleet, limit: int = 1) -> Sequence[claim.Claimed]:
    """What `me` gets."""
    return fleet.database.run(
        lambda s: claim.claim(s, owner="me", lease_seconds=30.0, limit=limit).claimed
    )


def advance(fleet: InProcessFleet, epoch: int, *states: AttemptState) -> None:
    for state in states:
        fleet.database.run(lambda s, to=state: records.move(s, epoch, "me", to))


def end(fleet: InProcessFleet, epoch: int, move: Move, owner: str = "me") -> None:
    fleet.database.run(lambda s: ending.end(s, epoch, owner, move, NoJitter()))


def events(fleet: InProcessFleet) -> list[str]:
    return fleet.database.read(
        lambda s: list(s.scalars(select(Event.kind).order_by(Event.event_id)))
    )


def row(fleet: InProcessFleet, model: Any, *where: Any) -> Any:
    def look(session: Session) -> Any:
        found = session.scalars(select(model).where(*where)).one()
        session.expunge_all()
        return found

    return fleet.database.read(look)


def state_of(word: RunnerState) -> MemberState:
    return MemberState("job", 1, word, pid=4242)


WRITES: dict[str, Callable[[Session, int, str], object]] = {
    "move": lambda s, e, me: records.move(s, e, me, AttemptState.LAUNCHING),
    "record": lambda s, e, me: records.record_state(s, e, me, state_of(RunnerState.RUNNING), 0),
    "sending": lambda s, e, me: records.record_deadman(s, e, me, 0, 60.0),
    "contact": lambda s, e, me: records.record_contact(s, e, me, 0, silent=True),
    "leaking": lambda s, e, me: records.record_leaking(s, e, me, 0, []),
    "end": lambda s, e, me: ending.end(s, e, me, SUCCESS, random.Random()),
    "release": lambda s, e, me: ending.release(s, e, me, 0),
    "abandon": lambda s, e, me: ending.abandon(s, e, me, 0),
}


def test_a_controller_that_lost_its_lease_can_neither_read_nor_write(
    fleet: InProcessFleet, epoch: int
) -> None:
    """Nor does it read."""
    assert list(fleet.database.read(lambda s: records.snapshots(s, [epoch], "me"))) == [epoch]
    fleet.expire_leases()
    assert fleet.database.run(lambda s: records.adopt(s, "other")) == [epoch]
    before = events(fleet), row(fleet, Attempt).state, row(fleet, Job).status
    for write in WRITES.values():
        with pytest.raises(Stale):
            fleet.database.run(lambda s, write=write: write(s, epoch, "me"))
        assert (events(fleet), row(fleet, Attempt).state, row(fleet, Job).status) == before
        assert len(fleet.open_reservations()) == 1
    assert fleet.database.read(lambda s: records.snapshots(s, [epoch], "me")) == {}


def test_a_write_is_about_the_attempt_that_it_names(fleet: InProcessFleet, epoch: int) -> None:
    fleet.submit("other")
    (made,) = claimed(fleet)
    advance(fleet, made.epoch, AttemptState.LAUNCHING)
    assert row(fleet, Attempt, Attempt.epoch == epoch).state == AttemptState.RESERVED
    assert row(fleet, Attempt, Attempt.epoch == made.epoch).state == AttemptState.LAUNCHING


@pytest.mark.parametrize("wrong", [-3600.0, 3600.0])
def test_leases_are_counted_by_the_clock_of_the_database(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    """That of the dispatcher's machine may say anything."""
    here = time.time()
    monkeypatch.setattr(time, "time", lambda: here + wrong)
    fleet.submit("job")
    (made,) = claimed(fleet)

    def left() -> float:
        return row(fleet, Attempt).lease_until - fleet.database.read(database_time)

    assert 0.0 < left() <= 30.0
    assert fleet.database.run(lambda s: records.renew(s, "me")) == [made.epoch]
    assert 0.0 < left() <= records.LEASE
    assert fleet.database.run(lambda s: records.adopt(s, "other")) == []
    fleet.expire_leases()
    assert fleet.database.run(lambda s: records.adopt(s, "other")) == [made.epoch]
    assert 0.0 < left() <= records.LEASE


def test_an_attempt_is_adopted_once(fleet: InProcessFleet, epoch: int) -> None:
    def adopt(owner: str) -> list[int]:
        return list(fleet.database.run(lambda s: records.adopt(s, owner)))

    def renew(owner: str) -> list[int]:
        return list(fleet.database.run(lambda s: records.renew(s, owner)))

    assert adopt("other") == []
    fleet.expire_leases()
    advance(fleet, epoch, AttemptState.LAUNCHING)  # it is still its owner's until somebody takes it
    assert (renew("me"), adopt("other")) == ([epoch], [])
    fleet.expire_leases()
    assert (adopt("other"), adopt("third"), renew("me")) == ([epoch], [], [])
    assert row(fleet, Attempt).owner == "other"
    assert "attempt.adopted" in events(fleet)
    fleet.database.run(lambda s: records.end_leases(s, "other"))
    assert adopt("me") == [epoch]
    fleet.database.run(records.end_leases)  # whoever drove is known to be gone
    assert adopt("me") == [epoch]
    end(fleet, epoch, Move(AttemptState.ENDED, Outcome.VOID, because="nobody wants it"))
    fleet.expire_leases()
    assert row(fleet, Attempt).cleanup == Cleanup.CLEAN
    assert (renew("me"), adopt("other")) == ([], [])


def test_a_lease_from_before_the_clock_was_set_back_delays_no_job(
    fleet: InProcessFleet, epoch: int
) -> None:
    def ends_in(time: float) -> None:
        fleet.database.run(
            lambda s: s.execute(update(Attempt).values(lease_until=database_time(s) + time))
        )

    ends_in(records.LONGEST_LEASE + 10)  # of a dispatcher with another setting
    assert fleet.database.run(lambda s: records.adopt(s, "other")) == []
    ends_in(3600)
    assert fleet.database.run(lambda s: records.renew(s, "me")) == [epoch]
    assert fleet.database.run(lambda s: records.adopt(s, "other")) == []
    ends_in(3600)
    assert fleet.database.run(lambda s: records.adopt(s, "other")) == [epoch]


def test_attempt_and_job_end_together_and_once(fleet: InProcessFleet, epoch: int) -> None:
    advance(fleet, epoch, AttemptState.LAUNCHING, AttemptState.RUNNING, AttemptState.COLLECTING)
    end(fleet, epoch, SUCCESS)
    end(fleet, epoch, failed(FailureClass.CRASHED))
    assert row(fleet, Attempt).outcome == Outcome.SUCCEEDED
    assert row(fleet, Job).status == "completed"
    assert row(fleet, Job).end_time is not None
    assert events(fleet).count("job.completed") == 1


def test_a_job_took_the_seconds_that_its_machine_counted(fleet: InProcessFleet, epoch: int) -> None:
    """Even if the fleet was down when the job ended."""
    advance(fleet, epoch, AttemptState.LAUNCHING, AttemptState.RUNNING, AttemptState.COLLECTING)
    started = fleet.database.run(database_time) - 100.0
    fleet.database.run(lambda s: s.execute(update(Attempt).values(running_at=started)))
    exit_record = {"code": 0, "signal": None, "tail": "", "seconds": 20.0}
    end(fleet, epoch, replace(SUCCESS, evidence={"members": [{"exit": exit_record}]}))
    assert row(fleet, Attempt).ended_at >= started + 100.0
    job = fleet.database.read(lambda s: jobs.show(s, ADA, "job"))
    assert job["attempts"][0]["ended_at"] == started + 20.0
    assert datetime.fromisoformat(job["end_time"]).timestamp() == int(started + 20.0)


def test_reservations_of_a_live_attempt_cannot_be_released(
    fleet: InProcessFleet, epoch: int
) -> None:
    for give_back in (ending.release, ending.abandon):
        with pytest.raises(AssertionError, match="live"):
            fleet.database.run(lambda s, f=give_back: f(s, epoch, "me", 0))


def test_a_job_that_is_tried_again_waits_by_the_databases_clock(
    fleet: InProcessFleet, epoch: int
) -> None:
    advance(fleet, epoch, AttemptState.LAUNCHING, AttemptState.RUNNING)

    class Most(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    fleet.database.run(lambda s: ending.end(s, epoch, "me", failed(FailureClass.CRASHED), Most()))
    job = row(fleet, Job)
    assert (job.status, job.retry_count, job.spent) == ("queued", 1, {"crashed": 1, "charged": 1})
    assert job.failure_reason is None
    left = job.not_before - fleet.database.read(database_time)
    assert 9.0 < left <= 10.0


def test_a_gpu_fault_puts_the_gpus_that_it_names_out_of_use(fleet: InProcessFleet) -> None:
    fleet.database.run(_another_gpu)
    fleet.submit("big", resources={"gpus": 2})
    (made,) = claimed(fleet)
    advance(fleet, made.epoch, AttemptState.LAUNCHING, AttemptState.RUNNING)
    fault = Move(
        AttemptState.ENDED, Outcome.FAILED, FailureClass.GPU_FAULT, "GPU-a1 has fallen off the bus",
        {"rank": 0, "members": [{"rank": 0, "vm": "a", "gpu_problems": ["GPU-a1 has fallen off"]}]},
    )  # fmt: skip
    end(fleet, made.epoch, fault)
    assert row(fleet, GPU, GPU.uuid == "GPU-a0").quarantine_reason is None
    assert "fallen off" in row(fleet, GPU, GPU.uuid == "GPU-a1").quarantine_reason


def test_a_gpu_is_quarantined_only_after_reports_of_two_jobs(fleet: InProcessFleet) -> None:
    """It may print what it likes; a second one is believed."""
    for job in ("one", "one", "two"):
        if job == "two":
            assert row(fleet, GPU, GPU.uuid == "GPU-a0").quarantine_reason is None
        _fails_with_words_about_its_gpu(fleet, job)
    assert "fallen off" in row(fleet, GPU, GPU.uuid == "GPU-a0").quarantine_reason


def test_a_jobs_report_on_a_gpu_raises_an_alarm_until_cleared_or_one_day_old(
    fleet: InProcessFleet,
) -> None:
    def told() -> list[Any]:
        found = fleet.database.read(lambda s: list(status.alarms(s, ADA)))
        return [each for each in found if each["kind"] == "gpu_faulty"]

    _fails_with_words_about_its_gpu(fleet, "one")
    (alarm,) = told()
    assert "bus (attempt one.1, " in alarm["message"]
    assert (alarm["vm_id"], alarm["gpu"], alarm["job_id"]) == ("a", 0, "one")
    assert row(fleet, Event, Event.kind == "gpu.reported").after["fault_report"]["job_id"] == "one"
    fleet.database.run(lambda s: machines.clear_quarantine(s, ADA, "a", "0"))
    assert told() == []
    assert row(fleet, Event, Event.kind == "gpu.cleared").before["fault_report"]["job_id"] == "one"
    _fails_with_words_about_its_gpu(fleet, "two")
    assert row(fleet, GPU, GPU.uuid == "GPU-a0").quarantine_reason is None
    assert [each["job_id"] for each in told()] == ["two"]
    long_ago = {**row(fleet, GPU, GPU.uuid == "GPU-a0").fault_report, "at": 0.0}
    fleet.database.run(lambda s: s.execute(update(GPU).values(fault_report=long_ago)))
    assert told() == []
    _fails_with_words_about_its_gpu(fleet, "three")
    assert row(fleet, GPU, GPU.uuid == "GPU-a0").quarantine_reason is None
    _fails_with_words_about_its_gpu(fleet, "four")
    assert row(fleet, GPU, GPU.uuid == "GPU-a0").quarantine_reason is not None
    assert ["is in quarantine" in each["message"] for each in told()] == [True]


def _fails_with_words_about_its_gpu(fleet: InProcessFleet, job: str) -> None:
    if not fleet.database.read(lambda s: s.get(Job, job)):
        fleet.submit(job, resources={"gpus": 1, "vm": "a"})
    soon = update(Job).where(Job.job_id == job).values(not_before=0.0)
    fleet.database.run(lambda s: s.execute(soon))
    (made,) = claimed(fleet)
    advance(fleet, made.epoch, AttemptState.LAUNCHING, AttemptState.RUNNING)
    said = "GPU 0 has fallen off the bus"
    evidence = {"rank": 0, "members": [{"rank": 0, "vm": "a"}]}
    end(
        fleet,
        made.epoch,
        Move(AttemptState.ENDED, Outcome.FAILED, FailureClass.GPU_FAULT, said, evidence),
    )
    fleet.database.run(lambda s: ending.release(s, made.epoch, "me", 0))
    far = update(Job).where(Job.job_id == job).values(not_before=1e11)
    fleet.database.run(lambda s: s.execute(far))


def _another_gpu(session: Session, index: int = 1) -> None:
    uuid = f"GPU-a{index}"
    session.add(GPU(vm_id="a", index=index, uuid=uuid, model="Fake 80GB", memory_mb=81_920))


def refused(code: str = "disk_full", why: str = "no") -> Move:
    ours = code in refusals.OURS
    failure = FailureClass.NOT_PROVIDED if ours else FailureClass.LAUNCH_FAILURE
    return Move(
        AttemptState.ENDED, Outcome.VOID, failure, "why",
        {"rank": 0, "members": [{"rank": 0, "vm": "a", "refusal": f"{code}: {why}"}]},
    )  # fmt: skip


def refuse(fleet: InProcessFleet, job: str, code: str = "disk_full") -> None:
    """A job is refused by machine a."""
    fleet.submit(job, resources={"gpus": 1, "vm": "a"})
    (made,) = claimed(fleet)
    advance(fleet, made.epoch, AttemptState.LAUNCHING)
    end(fleet, made.epoch, refused(code))
    fleet.database.run(
        lambda s: s.execute(
            update(Job).where(Job.job_id == job).values(not_before=database_time(s) + 99)
        )
    )


@pytest.mark.parametrize(
    ("code", "observed"),
    [("foreign_busy", "foreign_busy"), ("gpu_busy", "foreign_busy"), ("gpu_missing", "degraded")],
)
def test_a_refusal_for_the_sake_of_a_gpu_is_that_gpus(
    fleet: InProcessFleet, epoch: int, code: str, observed: str
) -> None:
    """Nobody else is sent there before the poller has looked, and the other GPUs of the machine are as good as before."""
    fleet.database.run(_another_gpu)
    advance(fleet, epoch, AttemptState.LAUNCHING)
    (mine,) = fleet.open_reservations()
    uuid = value_of(fleet, GPU.uuid, GPU.gpu_id == mine.gpu_id)
    end(fleet, epoch, refused(code, f"{uuid} is used by bash (pid 7)"))
    gpu = row(fleet, GPU, GPU.uuid == uuid)
    assert (gpu.observed, uuid in gpu.detail) == (observed, True)
    assert events(fleet).count("gpu.observed") == 1
    machine = row(fleet, VM, VM.vm_id == gpu.vm_id)
    assert (machine.launch_failures, machine.drain_reason) == (0, None)
    other = value_of(fleet, GPU.uuid, GPU.vm_id == "a", GPU.uuid != uuid)
    fleet.submit("next", resources={"gpus": 1, "vm": "a"})
    fleet.submit("last", resources={"gpus": 1, "vm": "a"})
    made = claimed(fleet, 9)
    seats = [each.placement.seats[0] for each in made]
    assert [[gpu.uuid for gpu in seat.gpus] for seat in seats if seat.vm_id == "a"] == [[other]]


def value_of(fleet: InProcessFleet, column: Any, *where: Any) -> Any:
    return fleet.database.read(lambda s: s.scalars(select(column).where(*where)).one())


def test_a_refusal_that_speaks_of_the_job_is_not_the_machines_fault(fleet: InProcessFleet) -> None:
    for code in sorted(refusals.OF_JOBS | refusals.OURS):
        refuse(fleet, f"job-{code}", code)
        assert row(fleet, VM, VM.vm_id == "a").launch_failures == 0, code


def begin_and_refuse(fleet: InProcessFleet, job: str, code: str) -> str:
    """Wherever it is claimed for; the machine."""
    query = update(Job).where(Job.job_id == job)
    fleet.database.run(lambda s: s.execute(query.values(not_before=0.0)))
    (made,) = claimed(fleet)
    advance(fleet, made.epoch, AttemptState.LAUNCHING)
    vm_id = made.placement.seats[0].vm_id
    move = refused(code)
    move.evidence["members"][0]["vm"] = vm_id
    end(fleet, made.epoch, move)
    return vm_id


def test_a_program_that_no_machine_has_is_looked_for_once_on_each(fleet: InProcessFleet) -> None:
    fleet.submit("job")
    first = begin_and_refuse(fleet, "job", "unknown_program")
    assert row(fleet, Job, Job.job_id == "job").status == "queued"
    assert begin_and_refuse(fleet, "job", "unknown_program") != first
    job = row(fleet, Job, Job.job_id == "job")
    assert job.status == "failed"
    assert job.failure_reason.startswith("user_error: ")
    assert "never tried again" in job.failure_reason


def test_a_gpu_held_by_another_attempt_is_waited_for_without_using_retries(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore that one may stand in no table, and run for days."""
    monkeypatch.setattr(failures, "FREE_RETRIES", 3)
    fleet.submit("job", resources={"gpus": 1, "vm": "a"})
    for code in ["gpu_busy"] * 4 + ["gpu_missing"]:
        fleet.database.run(lambda s: s.execute(update(GPU).values(observed="ok")))  # by a look
        begin_and_refuse(fleet, "job", code)
    job = row(fleet, Job, Job.job_id == "job")
    assert (job.status, job.retry_count) == ("queued", 0)
    assert job.spent == {"taken": 4, "launch_failure": 1, "free": 1}


# what machines have that nobody drives


def test_a_machine_is_welcome_back_when_nothing_is_left_there(
    fleet: InProcessFleet, epoch: int
) -> None:
    advance(fleet, epoch, AttemptState.LAUNCHING, AttemptState.RUNNING)
    vm_id = row(fleet, Member).vm_id
    fleet.lose(vm_id)

    def welcome() -> bool:
        return fleet.database.run(lambda s: records.return_to_use(s, "me", vm_id))

    def shown_state() -> str:
        job = fleet.database.read(lambda s: jobs.show(s, ADA, "job"))
        return job["attempts"][0]["members"][0]["state"]

    assert not welcome()
    end(fleet, epoch, failed(FailureClass.HOST_LOST))
    fleet.database.run(lambda s: ending.abandon(s, epoch, "me", 0))
    assert fleet.open_reservations() == []
    assert row(fleet, Attempt).cleanup == Cleanup.CLEAN
    assert not welcome()
    fleet.database.run(lambda s: s.execute(update(Member).values(state="running")))
    assert shown_state() == "running"
    (left,) = fleet.database.read(lambda s: records.unreleased_members(s, vm_id))
    assert (left.job_id, left.epoch, left.rank) == ("job", epoch, 0)
    assert left.gpus == (row(fleet, GPU, GPU.vm_id == vm_id).uuid,)
    fleet.database.run(lambda s: records.record_released(s, epoch, 0))
    assert shown_state() == "ended"
    assert (welcome(), welcome()) == (True, False)
    assert row(fleet, VM, VM.vm_id == vm_id).lost_at is None


def test_a_retry_avoids_gpus_and_slots_held_by_other_attempts(
    fleet: InProcessFleet,
) -> None:
    """The next look may see nobody on the GPU: its holder has not come to use it."""
    fleet.database.run(_another_gpu)
    fleet.database.run(lambda s: _another_gpu(s, 2))
    fleet.submit("job", resources={"gpus": 2, "vm": "a"})
    assert refuse_once(fleet, "GPU-a0 is held by old.3") == ["GPU-a0", "GPU-a1"]
    assert refuse_once(fleet, "nobody is named") == ["GPU-a1", "GPU-a2"]
    fleet.cancel("job")
    fleet.submit("cpu", resources={"gpus": 0, "vm": "a"})
    assert refuse_once(fleet, "slot 0 is held by old.3") == 0
    assert refuse_once(fleet, "slot 1 is held by old.4") == 1


def refuse_once(fleet: InProcessFleet, why: str) -> Sequence[str] | int | None:
    """After a look at which all seemed free; the GPUs or the slot."""

    def free(session: Session) -> None:
        session.execute(update(GPU).values(observed="ok"))
        session.execute(update(VM).values(cpu_slots=2))
        session.execute(update(Job).values(not_before=0.0))

    fleet.database.run(free)
    (made,) = claimed(fleet)
    advance(fleet, made.epoch, AttemptState.LAUNCHING)
    move = refused("gpu_busy", why)
    end(fleet, made.epoch, replace(move, evidence={**move.evidence, "because": why}))
    (seat,) = made.placement.seats
    return [gpu.uuid for gpu in seat.gpus] or seat.slot
