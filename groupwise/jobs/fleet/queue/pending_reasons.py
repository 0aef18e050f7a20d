"""The reasons why a job waits, as messages: for other jobs, for room, or for its turn in the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from groupwise.core.terminal.quantities import counted
from groupwise.jobs.fleet.queue import untracked_processes
from groupwise.jobs.fleet.queue.capacity import view
from groupwise.jobs.fleet.queue.placement import Blocked, Placement
from groupwise.jobs.fleet.queue.request import dependency
from groupwise.jobs.fleet.queue.resource_shapes import QUEUED
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.states import FINAL, AttemptState, JobStatus
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import Attempt, Job, Member, Reservation

_MAX_COUNTED = 1000


@dataclass(frozen=True, slots=True)
class Unmet:
    """A job that another one must follow, and why the other one cannot start yet."""

    job_id: str
    reason: str
    unsatisfiable: bool = False
    """The followed job has ended other than required, or is gone: the other one can never start."""


def unmet(session: Session, after: Mapping[str, Sequence[str]]) -> dict[str, Unmet]:
    """The jobs that cannot start yet, or never. `after`: the jobs that each job must follow (`JOB`, `JOB:ok`)."""
    ids = {dependency(entry)[0] for entries in after.values() for entry in entries}
    if not ids:
        return {}
    query = select(Job.job_id, Job.status).where(Job.job_id.in_(ids))
    statuses = dict(session.execute(query).all())
    by_job: dict[str, Unmet] = {}
    for job_id, entries in after.items():
        reasons = [reason for entry in entries if (reason := _unmet_dependency(entry, statuses))]
        if reasons:
            by_job[job_id] = next(
                (reason for reason in reasons if reason.unsatisfiable), reasons[0]
            )
    return by_job


def _unmet_dependency(entry: str, statuses: Mapping[str, str]) -> Unmet | None:
    """The reason why one dependency is unmet; None if it is met."""
    job_id, must_complete = dependency(entry)
    status = statuses.get(job_id)
    if status in (None, *FINAL):
        if not must_complete or status == JobStatus.COMPLETED:
            return None
        description = "is not there any more" if status is None else f"has {status}"
        if status == JobStatus.CANCELLED:
            description = "was cancelled"
        return Unmet(
            job_id, f"job {job_id}, which it was to come after, {description}", unsatisfiable=True
        )
    condition = " and must complete" if must_complete else ""
    return Unmet(job_id, f"it comes after job {job_id}, which is {status}{condition}")


def outlook(session: Session, job: Job) -> Placement | Blocked:
    """The placement that an admitted job would get if it were next now, or the reason why it could not start.

    What its last attempt has not given back yet counts as free.
    """
    resources = Resources.model_validate(job.resources or {})
    fleet_view = view(session, {job.project}, apart_from=job.job_id)
    return fleet_view.find_placement(resources, job.project, (job.rank or 0.0, job.job_id))


def explain(session: Session, job: Job) -> list[str]:
    """The reasons why a job waits now, as messages; empty if it does not wait."""
    if job.status == JobStatus.HELD:
        return [f"it is held: `groupwise fleet release {job.job_id}` lets it run"]
    if job.status == JobStatus.RUNNING:
        # Its attempt may still wait in the queue of Slurm or Ray, which reports the reason.
        reason_column = Member.handle["waits"].as_string()
        query = (
            select(reason_column)
            .join(Attempt, Attempt.epoch == Member.epoch)
            .where(
                Attempt.job_id == job.job_id,
                Attempt.state != AttemptState.ENDED,
                reason_column.is_not(None),
            )
        )
        return [
            f"it was placed on {job.assigned_vm}: {reason}" for reason in session.scalars(query)
        ]
    if job.status not in (JobStatus.QUEUED, JobStatus.PENDING):
        return []
    if job.admitted_at is None:
        return ["it is not admitted yet: a dispatcher does that, once a machine has been observed"]
    reasons: list[str] = []
    if unmet_jobs := unmet(session, {job.job_id: job.request.get("after", [])}):
        reasons += [unmet_job.reason for unmet_job in unmet_jobs.values()]
    held_back = untracked_processes.held_back_by(session, job.job_id)
    reasons += held_back
    reasons += _reasons_of_last_attempt(session, job, is_held_back=bool(held_back))
    placement = outlook(session, job)
    if isinstance(placement, Blocked):
        return [*reasons, *placement.reasons]
    if reasons:
        return reasons
    ranks_before = or_(Job.rank < job.rank, and_(Job.rank == job.rank, Job.job_id < job.job_id))
    may_start = (QUEUED, Job.not_before <= database_time(session))
    jobs_ahead = select(Job.job_id).where(*may_start, ranks_before).limit(_MAX_COUNTED).subquery()
    count = session.scalar(select(func.count()).select_from(jobs_ahead)) or 0
    if not count:
        return ["there is room for it, and it is the next in the queue"]
    at_least = "at least " if count == _MAX_COUNTED else ""
    return [f"there is room for it; before it in the queue: {at_least}{counted(count, 'job')}"]


def _reasons_of_last_attempt(session: Session, job: Job, *, is_held_back: bool) -> list[str]:
    """The pause before the next attempt, and the machines that still hold something of the last one."""
    reasons: list[str] = []
    pause = job.not_before - database_time(session)
    if pause > 0 and not is_held_back:
        newest = select(Attempt.evidence).where(
            Attempt.job_id == job.job_id, Attempt.generation == job.generation
        )
        evidence = session.scalars(newest.order_by(Attempt.epoch.desc()).limit(1)).first() or {}
        why = evidence.get("because")
        reasons.append(
            f"it is tried again in {pause:.0f} s"
            + (f"; its last attempt ended: {why}" if why else "")
        )
    own = select(Reservation.vm_id).join(Attempt, Attempt.epoch == Reservation.epoch)
    still_held = own.where(Attempt.job_id == job.job_id, Reservation.released_at.is_(None))
    if vm_ids := sorted(set(session.scalars(still_held))):
        reasons.append(
            f"its last attempt keeps its place: {' and '.join(vm_ids)} has not confirmed yet that all its processes are gone"
        )
    return reasons
