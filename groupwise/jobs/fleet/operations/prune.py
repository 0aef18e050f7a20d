"""Prunes jobs that ended long ago: their rows, then their logs and artefacts, then the blobs that only they named.

Rows go first, some hundreds of jobs in a transaction that checks again which of them may go: one may have been retried meanwhile. Files
follow; if that is interrupted, the next `prune` or a dispatcher removes the rest (`files/clearing.py`). Events stay: they are the history,
and from them dispatchers recognise the folders of these jobs on machines, and clear them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from groupwise.api.schemas.fleet import MAX_SECONDS
from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.files import clearing
from groupwise.jobs.fleet.files.clearing import remove_files, size_of_files
from groupwise.jobs.fleet.operations import find
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import Document
from groupwise.jobs.fleet.operations.projects import WAITING
from groupwise.jobs.fleet.queue.request import dependency
from groupwise.jobs.fleet.states import FINAL, AttemptState, Cleanup, JobStatus
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import VM, Attempt, Checkpoint, Job, Member, Reservation
from groupwise.jobs.hosts.files import BlobStore

AT_ONCE = 500
"""Maximum jobs in one transaction, and in one query."""


def old_jobs(
    session: Session,
    actor: Actor,
    older_than: float,
    *,
    project: str | None = None,
    status: frozenset[JobStatus] | None = None,
) -> list[str]:
    """Jobs that ended more than `older_than` seconds ago and that nothing needs any more, the oldest first."""
    if not 0 <= older_than <= MAX_SECONDS:
        raise Refusal(
            "invalid_request",
            f"older than {older_than:g} seconds: 0 to {MAX_SECONDS:.0f} seconds are wanted, which is 31 years.",
        )
    ended_before = datetime.fromtimestamp(database_time(session) - older_than, UTC)
    query = (
        select(Job.job_id)
        .where(Job.status.in_(FINAL if status is None else status & FINAL))
        .where(func.coalesce(Job.end_time, Job.created_at) <= ended_before)
        .order_by(Job.created_at, Job.job_id)
    )
    query = find.visible(query, actor)
    if project is not None:
        query = query.where(Job.project == project)
    job_ids = session.scalars(query).all()
    awaited_ids = _jobs_waited_for(session)
    needed_ids = awaited_ids.union(
        *(_jobs_in_use(session, portion) for portion in _portions(job_ids))
    )
    return [job_id for job_id in job_ids if job_id not in needed_ids]


def remove(session: Session, actor: Actor, job_ids: Collection[str]) -> list[str]:
    """Remove the rows of these jobs, and return the ids removed. A job that runs again, or is needed after all, stays."""
    ended_jobs = (
        select(Job).where(Job.job_id.in_(job_ids), Job.status.in_(FINAL)).order_by(Job.job_id)
    )
    jobs = [
        job for job in session.scalars(ended_jobs.with_for_update()) if actor.may_see(job.project)
    ]
    needed_ids = _jobs_waited_for(session) | _jobs_in_use(session, [job.job_id for job in jobs])
    removable = [job for job in jobs if job.job_id not in needed_ids]
    events.append_many(
        session,
        [
            {
                "actor": actor.name,
                "kind": events.JOB_PRUNED,
                "job_id": job.job_id,
                "before": {"status": job.status, "project": job.project},
            }
            for job in removable
        ],
    )
    names = [job.job_id for job in removable]
    session.expunge_all()
    epochs = select(Attempt.epoch).where(Attempt.job_id.in_(names))
    for statement in (
        delete(Reservation).where(Reservation.epoch.in_(epochs)),
        delete(Checkpoint).where(Checkpoint.job_id.in_(names)),
        delete(Member).where(Member.epoch.in_(epochs)),
        delete(Attempt).where(Attempt.job_id.in_(names)),
        delete(Job).where(Job.job_id.in_(names)),
    ):
        session.execute(statement.execution_options(synchronize_session=False))
    return names


def _portions(job_ids: Sequence[str]) -> list[Sequence[str]]:
    return [job_ids[start : start + AT_ONCE] for start in range(0, len(job_ids), AT_ONCE)]


def _jobs_waited_for(session: Session) -> set[str]:
    """Jobs that admitted jobs wait for. Admission checks the jobs named by those that are not admitted yet."""
    query = select(Job.blocked_on, Job.request["after"]).where(
        Job.status.in_(WAITING),
        Job.admitted_at.is_not(None),
        or_(Job.blocked_on.is_not(None), Job.request["after"].as_string().is_not(None)),
    )
    job_ids: set[str] = set()
    for blocked_on, predecessors in session.execute(query):
        job_ids.update(dependency(entry)[0] for entry in predecessors or ())
        if blocked_on is not None:
            job_ids.add(blocked_on)
    return job_ids


def _jobs_in_use(session: Session, job_ids: Collection[str]) -> set[str]:
    """Jobs that may still have processes or GPUs on a machine.

    A machine that was declared lost may come back with them, and is then cleaned up by the rows; a removed machine will not come back.
    """
    of_these = select(Attempt.job_id).where(Attempt.job_id.in_(job_ids))
    open_attempt = of_these.where(
        or_(Attempt.state != AttemptState.ENDED, Attempt.cleanup != Cleanup.CLEAN)
    )
    given_up = (
        of_these.join(Member, Attempt.epoch == Member.epoch)
        .join(VM, VM.vm_id == Member.vm_id)
        .where(Member.released.is_(False), VM.active, VM.lost_at.is_not(None))
    )
    reserved = of_these.join(Reservation, Attempt.epoch == Reservation.epoch).where(
        Reservation.released_at.is_(None)
    )
    in_use = (open_attempt, given_up, reserved)
    return {job_id for query in in_use for job_id in session.scalars(query)}


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
    """Prune old jobs with all their files. Returns the jobs, and the bytes that were freed. `folders`: those of logs and artefacts.

    `dry_run`: nothing is removed, and files that only these jobs have named are not counted.
    """
    jobs = database.read(lambda s: old_jobs(s, actor, older_than, project=project, status=status))
    size = sum(size_of_files(folders, job) for job in jobs)
    if not dry_run:
        jobs = [
            job
            for portion in _portions(jobs)
            for job in database.run(lambda s, portion=portion: remove(s, actor, portion))
        ]
        for job in jobs:
            remove_files(folders, job)
        size += clearing.clear_away(database, store, folders)
    return {"jobs": jobs, "bytes": size, "dry_run": dry_run}
