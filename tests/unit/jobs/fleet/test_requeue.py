import random
from typing import Any

import pytest
from sqlalchemy import false, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet import requeue
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.requeue import LONGEST_PAUSE, RequeueManager
from groupwise.jobs.fleet.store.database import Database, DatabaseFailure, database_time
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Event, Job, Member, Reservation
from tests.unit.jobs.fleet.queue_helpers import insert_admitted


class Fleet:
    """One machine with one GPU, and jobs in whatever state a test wants them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.now = database.run(database_time)

        def make(session: Session) -> None:
            facts = {"cpus": 8, "ram_mb": 64000, "disk_free_mb": 100000}
            session.add(
                VM(vm_id="vm", user="u", contact="ok", observed_round=self.now, facts=facts)
            )
            session.flush()
            session.add(GPU(vm_id="vm", index=0, uuid="GPU-0", memory_mb=40000))

        database.run(make)

    async def sweep(self) -> dict[str, int]:
        found = await RequeueManager(self.database, rng=random.Random(1)).sweep()
        return {what: count for what, count in found.items() if count}

    def job(self, job_id: str, status: str = "queued", **more: Any) -> None:
        needs = Resources(gpus=1)

        def write(session: Session) -> None:
            values: dict[str, Any] = {
                "resources": needs.as_json(), "shape": needs.shape("default"), "rank": 1.0, "admitted_at": 1.0,
            }  # fmt: skip
            insert_admitted(session, job_id=job_id, **(values | more))
            if status != "queued":
                session.execute(update(Job).where(Job.job_id == job_id).values(status=status))

        self.database.run(write)

    def attempt(
        self,
        job_id: str,
        ended: str | None = None,
        failure: str | None = None,
        *,
        cleanup: str = "clean",
        contact: str = "ok",
        evidence: dict[str, Any] | None = None,
    ) -> int:
        def write(session: Session) -> int:
            attempt = Attempt(
                job_id=job_id, generation=0, number=0, created_at=0.0, contact=contact
            )
            session.add(attempt)
            session.flush()
            session.add(Member(epoch=attempt.epoch, rank=0, vm_id="vm"))
            if ended is not None:
                attempt.outcome, attempt.failure_class = ended, failure
                attempt.state, attempt.cleanup = "ended", cleanup
                attempt.evidence = evidence or {}
            number = session.scalars(select(GPU.gpu_id)).one()
            session.flush()
            session.add(
                Reservation(
                    vm_id="vm", gpu_id=number, epoch=attempt.epoch, rank=0, reserved_at=self.now
                )
            )
            return attempt.epoch

        return self.database.run(write)

    def get(self, job_id: str, column: Any = Job.status) -> Any:
        return self.database.read(
            lambda s: s.scalars(select(column).where(Job.job_id == job_id)).one()
        )

    def open_reservations(self) -> int:
        query = select(Reservation).where(Reservation.released_at.is_(None))
        return len(self.database.read(lambda s: s.scalars(query).all()))

    def told(self) -> list[tuple[Any, ...]]:
        query = select(Event.actor, Event.kind, Event.job_id).order_by(Event.event_id)
        return [tuple(row) for row in self.database.read(lambda s: s.execute(query).all())]


@pytest.fixture
def fleet(database: Database) -> Fleet:
    return Fleet(database)


async def test_a_pause_from_before_a_clock_change_is_shortened(fleet: Fleet):
    for status in ("queued", "pending", "held"):
        fleet.job(status, status, not_before=fleet.now + 3600)
    fleet.job("over", "failed", not_before=fleet.now + 3600)
    assert (await fleet.sweep())["waiting longer than any pause"] == 3
    ends = [fleet.get(j, Job.not_before) - fleet.now for j in ("queued", "pending", "held")]
    assert all(0 <= end < 60 for end in ends)
    assert await fleet.sweep() == {}


async def test_in_a_fleet_that_works_there_is_nothing_to_do(fleet: Fleet):
    fleet.job("waits")
    fleet.job("later", not_before=fleet.now + LONGEST_PAUSE - 1)
    fleet.job("held", "held")
    fleet.job("runs", "running")
    fleet.attempt("runs")
    fleet.job("blocked", "pending")
    before = fleet.told()
    assert await fleet.sweep() == {}
    assert [fleet.get(j) for j in ("waits", "later", "held", "runs", "blocked")] == [
        "queued", "queued", "held", "running", "pending",
    ]  # fmt: skip
    assert fleet.told() == before


async def test_running_without_any_attempt_goes_back_into_the_queue(fleet: Fleet):
    fleet.job("stray", "running")
    assert await fleet.sweep() == {"running without a live attempt": 1}
    assert fleet.get("stray") == "queued"
    assert fleet.get("stray", Job.retry_count) == 0
    assert fleet.told() == [("requeue", "job.queued", "stray")]
    assert await fleet.sweep() == {}


@pytest.mark.parametrize(("outcome", "failure", "status", "retries"), [
    ("succeeded", None, "completed", 0), ("failed", "crashed", "queued", 1), ("failed", "user_error", "failed", 0),
    ("cancelled", None, "cancelled", 0), ("void", None, "queued", 0),
])  # fmt: skip
async def test_a_job_whose_attempt_ended_without_it_goes_where_that_leads(
    fleet: Fleet, outcome: str, failure: str | None, status: str, retries: int
):
    fleet.job("stray", "running")
    epoch = fleet.attempt("stray", outcome, failure, evidence={"because": "exit code 3"})
    await fleet.sweep()
    assert fleet.get("stray") == status
    assert fleet.get("stray", Job.retry_count) == retries
    assert ("requeue", f"job.{status}", "stray") in fleet.told()
    ending = select(Event.epoch).where(Event.kind == f"job.{status}")
    assert fleet.database.read(lambda s: s.scalars(ending).one()) == epoch
    if status == "failed":
        assert "exit code 3" in fleet.get("stray", Job.failure_reason)


async def test_a_job_with_a_live_attempt_is_never_touched(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    """Not even one that seemed to have none: it was claimed between the look and the lock."""
    fleet.job("runs", "running")
    fleet.attempt("runs", contact="unreachable")
    monkeypatch.setattr(requeue, "exists", _Never)
    assert await fleet.sweep() == {}
    assert fleet.get("runs") == "running"


class _Never:
    def where(self, *_: Any) -> Any:
        return false()


async def test_reservations_of_clean_ended_attempts_are_closed(fleet: Fleet):
    fleet.job("done", "running")
    fleet.attempt("done", "succeeded", cleanup="clean")
    fleet.job("waits", "pending")
    found = await fleet.sweep()
    assert found["reserved for what is over"] == 1
    assert fleet.open_reservations() == 0
    assert fleet.get("waits") == "queued"
    assert ("requeue", "reservation.closed", "done") in fleet.told()


@pytest.mark.parametrize("cleanup", ["pending", "leaking"])
async def test_resources_stay_reserved_until_cleanup_is_done(fleet: Fleet, cleanup: str):
    fleet.job("done", "running")
    fleet.attempt("done", "succeeded", cleanup=cleanup)
    await fleet.sweep()
    assert fleet.open_reservations() == 1


async def test_a_kind_that_fails_does_not_keep_the_others_from_being_repaired(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: Any) -> int:
        raise DatabaseFailure("the disk is full")

    monkeypatch.setattr(requeue, "move_strays", broken)
    fleet.job("waits", "pending")
    assert await fleet.sweep() == {"waiting although they could begin": 1}
    assert "the disk is full" in caplog.text
