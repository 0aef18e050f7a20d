"""Clearing away jobs that ended long ago: their rows, then their logs and artefacts.

Rows go first, each job in a transaction that looks again whether it may go: somebody may have retried it meanwhile. Files follow; where
that is interrupted, what is left of them is in nobody's way. Events stay, they are the history.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session, aliased

from groupwise.fleet.states import FINAL, AttemptState, Cleanup, JobStatus
from groupwise.fleet.store import events
from groupwise.fleet.store.database import seconds
from groupwise.fleet.store.tables import Attempt, Checkpoint, Job, Member, Reservation
from groupwise.fleet.verbs.actor import Actor
from groupwise.fleet.verbs.find import job as find_job
from groupwise.hosts.spec import JOB_ID


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
    job = find_job(session, actor, job_id, lock=True)
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
    """No machine may still hold something of it, and no job waits for it."""
    open_attempt = select(Attempt.epoch).where(
        Attempt.job_id == job_id,
        (Attempt.state != AttemptState.ENDED) | (Attempt.cleanup != Cleanup.CLEAN),
    )
    waiting = aliased(Job)
    dependant = select(waiting.job_id).where(
        waiting.blocked_on == job_id, waiting.status.not_in(FINAL)
    )
    return (
        session.scalar(open_attempt.limit(1)) is None and session.scalar(dependant.limit(1)) is None
    )


# Files


def remove_files(folders: Iterable[Path], job_id: str) -> None:
    """Remove what a job has left in the folders of logs and artefacts."""
    for path in _paths(folders, job_id):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def size_of_files(folders: Iterable[Path], job_id: str) -> int:
    """Bytes of all that."""
    return sum(_size(path) for path in _paths(folders, job_id))


def _paths(folders: Iterable[Path], job_id: str) -> Iterator[Path]:
    assert JOB_ID.fullmatch(job_id), job_id  # it becomes part of a path that is removed
    for folder in folders:
        for name in (job_id, f"{job_id}.log"):
            path = folder / name
            if path.is_symlink() or path.exists():
                yield path


def _size(path: Path) -> int:
    found = 0
    for each in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
        with suppress(OSError):
            status = each.lstat()
            found += status.st_blocks * 512 if each.is_file() else 0
    return found
