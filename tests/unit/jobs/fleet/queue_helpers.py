"""Machines and jobs for tests of the queue, in a few words."""

from typing import Any

from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.queue import admission, claim, requeue_pending
from groupwise.jobs.fleet.queue.claim import Claimed
from groupwise.jobs.fleet.queue.request import JobRequest, from_document
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Event, Job, Reservation
from groupwise.jobs.fleet.store.triggers import OF_THE_CONTROL_PLANE


def add_machine(database: Database, name: str, gpus: int = 0, **columns: Any) -> None:
    """One that was observed just now."""

    def write(session: Session) -> None:
        about = {"contact": "ok", "observed_round": database_time(session), **columns}
        session.add(VM(vm_id=name, **about))
        session.flush()
        for index in range(gpus):
            session.add(
                GPU(
                    vm_id=name,
                    index=index,
                    uuid=f"GPU-{name}-{index}",
                    memory_mb=80_000,
                    model="A100",
                )
            )

    database.run(write)


def submit(
    database: Database, job_id: str | None = None, *, project: str = "default", **asked: Any
) -> str:
    """A command with these resources and whatever else the request says; its id."""
    needs = {name: asked.pop(name) for name in list(asked) if name in Resources.model_fields}
    request = from_document({"arguments": ["true"], "resources": needs, **asked})
    return submit_request(database, request, job_id, project)


def submit_request(
    database: Database, request: JobRequest, job_id: str | None = None, project: str = "default"
) -> str:
    made = database.run(
        lambda s: admission.submit(s, request, actor="user:test", project=project, job_id=job_id)
    )
    assert made.status != "failed", made.failure_reason
    return made.job_id


def insert_admitted(session: Session, **columns: Any) -> Job:
    """A row with what admission would write, in two steps: the database lets nobody else begin with that."""
    later = {name: columns.pop(name) for name, _ in OF_THE_CONTROL_PLANE if name in columns}
    job = Job(**columns)
    session.add(job)
    session.flush()
    for name, value in later.items():
        setattr(job, name, value)
    session.flush()
    return job


def claim_some(database: Database, limit: int = 100, owner: str = "me") -> list[Claimed]:
    """As a dispatcher does: what begins, and then what cannot."""
    found = database.run(lambda s: claim.claim(s, owner=owner, lease_seconds=30.0, limit=limit))
    if (unplaced := found.unplaced) is not None:
        reasons = database.read(lambda s: claim.explain(s, unplaced))
        database.run(lambda s: claim.mark(s, unplaced, reasons, owner))
    return list(found.claimed)


def claimed_ids(database: Database, limit: int = 100) -> list[str]:
    return [each.job_id for each in claim_some(database, limit)]


def job_of(database: Database, job_id: str) -> Job:
    found = database.run(lambda s: s.get(Job, job_id))
    assert found is not None
    return found


def statuses(database: Database) -> dict[str, str]:
    return database.run(lambda s: dict(s.execute(select(Job.job_id, Job.status)).all()))


def end(
    session: Session,
    job_id: str,
    status: str = "completed",
    failure: str | None = None,
    outcome: str | None = None,
) -> list[str]:
    """The live attempt of a job ends and gives back what it held; the machines."""
    epoch = session.scalars(
        select(Attempt.epoch).where(Attempt.job_id == job_id, Attempt.state != "ended")
    ).one()
    session.execute(
        update(Attempt)
        .where(Attempt.epoch == epoch)
        .values(
            state="ended",
            outcome=outcome or ("succeeded" if status == "completed" else "failed"),
            failure_class=failure,
            ended_at=1.0,
        )
    )
    session.execute(update(Attempt).where(Attempt.epoch == epoch).values(cleanup="clean"))
    session.execute(update(Job).where(Job.job_id == job_id).values(status=status))
    held = select(Reservation.vm_id).where(Reservation.epoch == epoch)
    vm_ids = list(session.scalars(held))
    session.execute(update(Reservation).where(Reservation.epoch == epoch).values(released_at=1.0))
    return vm_ids


def finish(
    database: Database,
    job_id: str,
    status: str = "completed",
    failure: str | None = None,
    outcome: str | None = None,
) -> int:
    """The same, with those woken that may begin now; how many."""
    return database.run(
        lambda s: requeue_pending.wake(s, vm_ids=set(end(s, job_id, status, failure, outcome)))
    )


def kinds_of_events(database: Database, job_id: str) -> list[str]:
    query = select(Event.kind).where(Event.job_id == job_id).order_by(Event.event_id)
    return database.run(lambda s: list(s.scalars(query)))


def execute(database: Database, statement: str, **values: Any) -> None:
    database.run(lambda s: s.execute(text(statement), values))
