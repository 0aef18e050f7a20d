"""Clearing away jobs that ended long ago: their rows, then their logs and artefacts, then the files that only they had named.

Rows go first, each job in a transaction that looks again whether it may go: somebody may have retried it meanwhile. Files follow; where
that is interrupted, the next `prune` or a dispatcher takes what is left of them (`files/clearing.py`). Events stay, they are the history,
and by them the folders of these jobs on machines are known, which dispatchers clear away.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session, aliased

from groupwise.fleet.files import clearing
from groupwise.fleet.files.clearing import remove_files, size_of_files
from groupwise.fleet.states import FINAL, AttemptState, Cleanup, JobStatus
from groupwise.fleet.store import events
from groupwise.fleet.store.database import Database, seconds
from groupwise.fleet.store.tables import VM, Attempt, Checkpoint, Job, Member, Reservation
from groupwise.fleet.verbs.actor import Actor
from groupwise.fleet.verbs.documents import Document
from groupwise.fleet.verbs.find import job as find_job
from groupwise.hosts.files import BlobStore
from groupwise.wire.problems import Refusal


def old_jobs(
    session: Session,
    actor: Actor,
    older_than: float,
    *,
    project: str | None = None,
    status: frozenset[JobStatus] | None = None,
) -> list[str]:
    """Jobs that ended more than `older_than` seconds ago and that nothing needs any more, the oldest first."""
    before = datetime.fromtimestamp(seconds(session) - older_than, UTC)
    query = (
        select(Job.job_id)
        .where(Job.status.in_(FINAL if status is None else status & FINAL))
        .where(func.coalesce(Job.end_time, Job.created_at) <= before)
        .order_by(Job.created_at, Job.job_id)
    )
    if actor.projects is not None:
        query = query.where(Job.project.in_(actor.projects))
    if project is not None:
        query = query.where(Job.project == project)
    return [job_id for job_id in session.scalars(query).all() if _nothing_needs(session, job_id)]


def remove(session: Session, actor: Actor, job_id: str) -> bool:
    """Remove the rows of a job; False where it runs again, or something of it has turned out to be needed."""
    try:
        job = find_job(session, actor, job_id, lock=True)
    except Refusal:  # somebody else prunes too
        return False
    if job.status not in FINAL or not _nothing_needs(session, job_id):
        return False
    epochs = select(Attempt.epoch).where(Attempt.job_id == job_id)
    for statement in (
        delete(Reservation).where(Reservation.epoch.in_(epochs)),
        delete(Checkpoint).where(Checkpoint.job_id == job_id),
        delete(Member).where(Member.epoch.in_(epochs)),
        delete(Attempt).where(Attempt.job_id == job_id),
        delete(Job).where(Job.job_id == job_id),
    ):
        session.execute(statement)
    events.append(
        session,
        actor=actor.name,
        kind=events.JOB_PRUNED,
        job_id=job_id,
        before={"status": job.status, "project": job.project},
    )
    return True


def _nothing_needs(session: Session, job_id: str) -> bool:
    """No machine may still hold something of it, and no job waits for it.

    One that was declared lost may come back with it, and is emptied by what stands in the rows; one that was removed will not.
    """
    open_attempt = select(Attempt.epoch).where(
        Attempt.job_id == job_id,
        (Attempt.state != AttemptState.ENDED) | (Attempt.cleanup != Cleanup.CLEAN),
    )
    given_up = (
        select(Member.epoch)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .join(VM, VM.vm_id == Member.vm_id)
        .where(Attempt.job_id == job_id, Member.released.is_(False))
        .where(VM.active, VM.lost_at.is_not(None))
    )
    waiting = aliased(Job)
    dependant = select(waiting.job_id).where(
        waiting.status.not_in(FINAL),
        (waiting.blocked_on == job_id)
        | waiting.request["after"].as_string().contains(job_id, autoescape=True),
    )
    held = (
        select(Reservation.reservation_id)
        .join(Attempt, Attempt.epoch == Reservation.epoch)
        .where(Attempt.job_id == job_id, Reservation.released_at.is_(None))
    )
    needed = (open_attempt, given_up, dependant, held)
    return all(session.scalar(query.limit(1)) is None for query in needed)


def clear_away(
    database: Database,
    store: BlobStore,
    folders: Sequence[Path],
    actor: Actor,
    older_than: float,
    *,
    project: str | None = None,
    status: frozenset[JobStatus] | None = None,
    dry_run: bool = False,
) -> Document:
    """All of it: which jobs went, and how many bytes that freed. `folders`: those of logs and artefacts.

    `dry_run`: nothing goes, and files that only these jobs have named are not counted.
    """
    jobs = database.read(lambda s: old_jobs(s, actor, older_than, project=project, status=status))
    size = sum(size_of_files(folders, job) for job in jobs)
    if not dry_run:
        jobs = [job for job in jobs if database.run(lambda s, job=job: remove(s, actor, job))]
        for job in jobs:
            remove_files(folders, job)
        size += clearing.clear_away(database, store, folders)
    return {"jobs": jobs, "bytes": size, "dry_run": dry_run}
