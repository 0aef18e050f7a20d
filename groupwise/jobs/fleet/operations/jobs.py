"""The operations for submitted jobs: list and show, cancel, hold and release, retry.

Each change of a job writes an event in the same transaction. Nothing here connects to a machine: cancelling a running job sets a flag in
its row; the dispatcher that owns its attempt ends it, and records when that is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import and_, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from groupwise.api.schemas.fleet import MAX_CHANGED
from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.operations import find, status, visibility
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import (
    Document,
    attempt_document,
    job_document,
    job_summary,
)
from groupwise.jobs.fleet.queue import (
    admission,
    pending_reasons,
    requeue_pending,
    untracked_processes,
)
from groupwise.jobs.fleet.secrets import DEFAULT_SECRETS, AllowedSecrets
from groupwise.jobs.fleet.states import FINAL, RETRIED_FROM, Contact, JobStatus, Outcome
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import at_one_moment, database_time
from groupwise.jobs.fleet.store.tables import (
    GPU,
    NEWEST_FIRST,
    Attempt,
    Checkpoint,
    Job,
    Member,
    Reservation,
)

MAX_LISTED = 1000
MAX_EVENTS = 200
"""Maximum events shown for one job, the newest."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change to jobs: a part for each job, and a part for all of them."""

    to_each: Callable[[Session, Actor, Job, int], None]
    """Changes one job, whose row is locked, or raises Refusal and changes nothing. The number: jobs of its project changed before it."""
    at_last: Callable[[Session, Sequence[str]], None] = lambda session, ids: None
    """Called with the ids of all changed jobs, after the last."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Selects the jobs of a list; fields left out do not filter."""

    ids: tuple[str, ...] | None = None
    """Only these; ids that do not exist, or that the actor may not see, are left out."""
    status: frozenset[JobStatus] | None = None
    project: str | None = None
    name: str | None = None
    job_type: str | None = None
    vm_id: str | None = None
    submitted_by: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    older_than: str | None = None
    """A job id: only jobs made before it. Give the last id of a list to get the next page."""
    limit: int = 50


def filter_of(
    *,
    ids: Sequence[str] | None = None,
    status: Iterable[str] | None = None,
    project: str | None = None,
    name: str | None = None,
    kind: str | None = None,
    vm: str | None = None,
    label: Sequence[str] | None = None,
    older_than: str | None = None,
    limit: int = 50,
) -> JobFilter:
    """Build the filter from the parameters of GET /jobs and the client. Raises `invalid_request`."""
    if ids is not None and len(ids) > MAX_LISTED:
        raise Refusal("invalid_request", f"{len(ids)} ids: at most {MAX_LISTED} ids at once.")
    labels: dict[str, str] = {}
    for label_text in label or ():
        key, equals, value = label_text.partition("=")
        if not equals:
            raise Refusal("invalid_request", f"label {label_text!r}: key=value is wanted.")
        labels[key] = value
    return JobFilter(
        ids=None if ids is None else tuple(ids),
        status=None if status is None else _parse_statuses(status),
        project=project,
        name=name,
        job_type=kind,
        vm_id=vm,
        labels=labels,
        older_than=older_than,
        limit=limit,
    )


def _parse_statuses(names: Iterable[str]) -> frozenset[JobStatus]:
    statuses: set[JobStatus] = set()
    for name in names:
        try:
            statuses.add(JobStatus(name))
        except ValueError:
            raise Refusal(
                "invalid_request",
                f"{name!r} is not a status of a job; there are {', '.join(JobStatus)}.",
            ) from None
    return frozenset(statuses)


def ended_statuses(names: Iterable[str] | None) -> frozenset[JobStatus] | None:
    """Statuses of jobs that have ended; None: all of these. Raises `invalid_request` for others."""
    statuses = None if names is None else _parse_statuses(names)
    if statuses is not None and (invalid := sorted(statuses - FINAL)):
        raise Refusal(
            "invalid_request",
            f"{', '.join(invalid)}: only jobs that have ended are removed: completed, failed, cancelled.",
        )
    return statuses


# Showing


def listing(session: Session, actor: Actor, job_filter: JobFilter) -> list[Document]:
    """Jobs, the newest first, as short documents."""
    if not 1 <= job_filter.limit <= MAX_LISTED:
        raise Refusal(
            "invalid_request", f"limit {job_filter.limit}: 1 to {MAX_LISTED} jobs at once."
        )
    query = find.visible(select(Job), actor)
    if job_filter.ids is not None:
        query = query.where(Job.job_id.in_(job_filter.ids))
    if job_filter.status is not None:
        query = query.where(Job.status.in_(job_filter.status))
    for column, value in (
        (Job.project, job_filter.project),
        (Job.name, job_filter.name),
        (Job.job_type, job_filter.job_type),
        (Job.assigned_vm, job_filter.vm_id),
        (Job.submitted_by, job_filter.submitted_by),
    ):
        if value is not None:
            query = query.where(column == value)
    for key, value in job_filter.labels.items():
        query = query.where(Job.request["labels"][key].as_string() == value)
    if job_filter.older_than is not None:
        last_id = find.job(session, actor, job_filter.older_than).job_id
        row = aliased(Job)
        # Compared in the database, because SQLite stores timestamps as texts of several forms.
        created = select(row.created_at).where(row.job_id == last_id).scalar_subquery()
        same_time = and_(Job.created_at == created, Job.job_id < last_id)
        query = query.where(or_(Job.created_at < created, same_time))
    newest_first = query.order_by(Job.created_at.desc(), Job.job_id.desc()).limit(job_filter.limit)
    jobs = session.scalars(newest_first).all()
    warnings = _memory_warnings(
        session, [j.job_id for j in jobs if j.status == JobStatus.COMPLETED]
    )
    newest = _newest_attempts(session, jobs)
    warnings |= {
        job_id: "its machine does not answer, and it may go on there"
        for job_id, attempt in newest.items()
        if attempt["ended_at"] is None and attempt["contact"] != Contact.OK
    }
    return [
        visibility.job(
            session,
            actor,
            job_summary(job)
            | _command_times(job, newest.get(job.job_id))
            | {"warning": warnings.get(job.job_id)},
        )
        for job in jobs
    ]


def _newest_attempts(session: Session, jobs: Sequence[Job]) -> dict[str, Document]:
    """The newest attempt of each job that runs or has ended: the times of its command, and whether its machine answers."""
    waiting = (JobStatus.QUEUED, JobStatus.PENDING, JobStatus.HELD)
    job_ids = [job.job_id for job in jobs if job.status not in waiting]
    epochs = select(func.max(Attempt.epoch)).where(Attempt.job_id.in_(job_ids))
    names = ("job_id", "generation", "running_at", "ended_at", "contact")
    columns = [getattr(Attempt, name) for name in names]
    rows = session.execute(
        select(*columns).where(Attempt.epoch.in_(epochs.group_by(Attempt.job_id)))
    )
    return {row["job_id"]: dict(row) for row in rows.mappings()}


def _command_times(job: Job, attempt: Document | None) -> Document:
    """When the newest attempt's command began and ended, in seconds of the database's clock; None if it has not, or not since `resume`."""
    is_earlier = attempt is not None and attempt["generation"] != job.generation
    if attempt is None or is_earlier or attempt["running_at"] is None:
        return {"running_at": None, "ran_until": None}
    # A job that was cancelled while it waited for another attempt ended later than this one.
    ends = [attempt["ended_at"], job.end_time and job.end_time.timestamp()]
    ran_until = min((end for end in ends if end is not None), default=None)
    return {"running_at": attempt["running_at"], "ran_until": ran_until}


def _memory_warnings(session: Session, completed: Sequence[str]) -> dict[str, str]:
    """Completed jobs that lost processes to the kernel for lack of memory: what they computed may be incomplete."""
    query = select(Attempt.job_id, Attempt.evidence).where(
        Attempt.job_id.in_(completed), Attempt.outcome == Outcome.SUCCEEDED
    )
    warnings: dict[str, str] = {}
    for job_id, evidence in session.execute(query) if completed else ():
        members: list[Document] = evidence.get("members") or []
        records: list[Document] = [m["exit"] for m in members if m.get("exit")]
        if count := sum(record.get("oom_kill") or 0 for record in records):
            warnings[job_id] = f"the kernel ended {count} of its processes for lack of memory"
    return warnings


def show(session: Session, actor: Actor, job_id: str) -> Document:
    """Everything about one job: its row, attempts with members and evidence, mirrored checkpoints, why it waits, and its newest events."""
    job = find.job(session, actor, job_id)
    waiting = pending_reasons.explain(session, job)
    standstill = status.why_nothing_starts(session)
    if waiting and job.status != JobStatus.HELD and standstill is not None:
        waiting.insert(0, standstill)
    newest = _newest_attempts(session, [job]).get(job_id)
    document = job_document(job) | {
        **_command_times(job, newest),
        "waiting": waiting,
        "attempts": attempts(session, job_id),
        "checkpoints": checkpoints(session, job_id),
        "events": events.recent(session, job_id=job_id, limit=MAX_EVENTS),
    }
    return visibility.job(session, actor, document)


def attempts(session: Session, job_id: str) -> list[Document]:
    """The attempts of a job, the oldest first."""
    rows = session.scalars(
        select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.epoch)
    ).all()
    epochs = [attempt.epoch for attempt in rows]
    members = session.scalars(
        select(Member).where(Member.epoch.in_(epochs)).order_by(Member.epoch, Member.rank)
    ).all()
    reservations = session.execute(
        select(Reservation, GPU)
        .outerjoin(GPU, GPU.gpu_id == Reservation.gpu_id)
        .where(Reservation.epoch.in_(epochs))
        .order_by(Reservation.reservation_id)
    ).all()
    return [
        attempt_document(
            attempt,
            [member for member in members if member.epoch == attempt.epoch],
            [(row, gpu) for row, gpu in reservations if row.epoch == attempt.epoch],
        )
        for attempt in rows
    ]


def checkpoints(session: Session, job_id: str) -> list[Document]:
    """The mirrored checkpoints of a job without their files, the newest first."""
    names = ("generation", "epoch", "path", "step", "mirrored_at", "damaged_at")
    columns = [getattr(Checkpoint, name) for name in names]
    rows = session.execute(
        select(*columns).where(Checkpoint.job_id == job_id).order_by(*NEWEST_FIRST)
    )
    return [dict(row) for row in rows.mappings()]


def progress(session: Session, actor: Actor, job_id: str) -> Document:
    """A job's document for clients that poll it often: its status, how it ended, and the epochs that may have logs."""
    job = find.job(session, actor, job_id)
    epochs = session.scalars(
        select(Attempt.epoch).where(Attempt.job_id == job_id).order_by(Attempt.epoch)
    ).all()
    return {
        "job_id": job_id,
        "status": job.status,
        "exit_code": job.exit_code,
        "failure_reason": job.failure_reason,
        "epochs": list(epochs),
    }


# Cancelling, holding, retrying


def cancel(session: Session, actor: Actor, job_id: str, reason: str | None = None) -> Document:
    """Cancel a job. A waiting job is cancelled at once; a running one once none of it is left on its machines.

    Safe to repeat. Raises `job_state` for a job that has ended otherwise.
    """
    return _change_one(session, actor, job_id, cancelling(reason))


def hold(session: Session, actor: Actor, job_id: str) -> Document:
    """Keep a waiting job from starting until it is released. Raises `job_state` for one that runs or has ended."""
    return _change_one(session, actor, job_id, holding)


def release(session: Session, actor: Actor, job_id: str) -> Document:
    """Allow a held job to start. Raises `job_state` for one that is not held."""
    return _change_one(session, actor, job_id, releasing)


def retry(
    session: Session, actor: Actor, job_id: str, *, allowed: AllowedSecrets = DEFAULT_SECRETS
) -> Document:
    """Start a failed or cancelled job again, with its failure budgets restored. Raises `job_state` for any other job, and if the maximum of
    waiting jobs of its project is reached.

    Its request is read and expanded again, and it resumes from its last checkpoint if there is one. If admission rejects it, it has failed
    again at once, with the reason.
    """
    return _change_one(session, actor, job_id, retrying(allowed))


def change_many(
    session: Session, actor: Actor, ids: Sequence[str], change: Change
) -> list[Document]:
    """Make one change to many jobs, in one transaction. Returns each job's new document, or its `job_id` and `error` if it was refused.

    The jobs are locked in one order, and then their projects in one order: two callers wait for each other instead of deadlocking.
    Waiting jobs are woken once, at the end.
    """
    if len(ids) > MAX_CHANGED:
        raise Refusal("invalid_request", f"{len(ids)} ids: at most {MAX_CHANGED} jobs at once.")
    jobs_by_id = find.jobs(session, actor, ids, lock=True)
    refusals: dict[str, Refusal] = {}
    changed_counts: Counter[str] = Counter()
    with requeue_pending.woken_once(session), events.batch(session), at_one_moment(session):
        for job in sorted(
            jobs_by_id.values(), key=lambda locked_job: (locked_job.project, locked_job.job_id)
        ):
            try:
                change.to_each(session, actor, job, changed_counts[job.project])
                changed_counts[job.project] += 1
            except Refusal as refusal:
                refusals[job.job_id] = refusal
        for job_id in dict.fromkeys(ids):
            if job_id not in jobs_by_id:
                refusals[job_id] = find.no_job(session, actor, job_id, near=not refusals)
        session.flush()
        change.at_last(session, sorted(set(ids) - set(refusals)))
    jobs_by_id = find.jobs(session, actor, ids)
    return [
        {"job_id": job_id, "error": {"code": refusal.code, "message": refusal.message}}
        if (refusal := refusals.get(job_id)) is not None
        else visibility.job(session, actor, job_document(jobs_by_id[job_id]))
        for job_id in ids
    ]


def _change_one(session: Session, actor: Actor, job_id: str, change: Change) -> Document:
    job = find.job(session, actor, job_id, lock=True)
    change.to_each(session, actor, job, 0)
    session.flush()
    change.at_last(session, [job_id])
    session.refresh(job)
    return visibility.job(session, actor, job_document(job))


def cancelling(reason: str | None = None) -> Change:
    """The change made by `cancel`."""
    return Change(partial(_cancel_job, detail=None if reason is None else {"reason": reason}))


def _cancel_job(
    session: Session, actor: Actor, job: Job, _: int, *, detail: Document | None
) -> None:
    if job.status == JobStatus.CANCELLED:
        return
    if job.status in FINAL:
        raise Refusal(
            "job_state", f"{job.job_id} has {job.status} already; there is nothing to cancel."
        )
    if job.status != JobStatus.RUNNING:
        _set_status(session, actor, job, JobStatus.CANCELLED, detail)
        requeue_pending.wake(session, actor=actor.name)
    elif job.cancel_requested_at is None:
        job.cancel_requested_at = database_time(session)
        events.append(
            session,
            actor=actor.name,
            kind=events.JOB_CANCEL_REQUESTED,
            job_id=job.job_id,
            after={"cancel_requested_at": job.cancel_requested_at},
            detail=detail,
        )


def _hold_job(session: Session, actor: Actor, job: Job, _: int) -> None:
    if job.status == JobStatus.HELD:
        return
    if job.status == JobStatus.RUNNING:
        raise Refusal(
            "job_state",
            f"{job.job_id} is running, and only a job that waits can be held. `groupwise fleet stop {job.job_id}` ends it; "
            f"`groupwise fleet resume {job.job_id}` then begins it again, from its last checkpoint if it has one.",
        )
    if job.status in FINAL:
        raise Refusal(
            "job_state", f"{job.job_id} has {job.status} already; there is nothing to hold."
        )
    _set_status(session, actor, job, JobStatus.HELD)


holding = Change(_hold_job)
"""The change made by `hold`."""


def _release_job(session: Session, actor: Actor, job: Job, _: int) -> None:
    if job.status in (JobStatus.QUEUED, JobStatus.PENDING):
        return
    if job.status != JobStatus.HELD:
        raise Refusal(
            "job_state", f"{job.job_id} is {job.status}, not held; there is nothing to release."
        )
    _set_status(session, actor, job, JobStatus.QUEUED)


releasing = Change(_release_job)
"""The change made by `release`."""


def retrying(allowed: AllowedSecrets = DEFAULT_SECRETS) -> Change:
    """The change made by `retry`."""
    return Change(_retry_job, partial(_admit_again, allowed=allowed))


def _retry_job(session: Session, actor: Actor, job: Job, ahead: int) -> None:
    if job.status not in RETRIED_FROM:
        reasons: dict[str, str] = {
            JobStatus.COMPLETED: "has completed; submit it again to have it run once more.",
            JobStatus.HELD: f"is held; `groupwise fleet release {job.job_id}` lets it run.",
            JobStatus.RUNNING: "is running; cancel it first.",
        }
        default_reason = f"is {job.status}: it is going to run anyway."
        raise Refusal("job_state", f"{job.job_id} {reasons.get(job.status, default_reason)}")
    # Any JSON, if the row was written by hand.
    resources: Document | list[Any] | None = job.request.get("resources")
    if isinstance(resources, dict) and resources.get("oversubscribe"):
        actor.require_operator_to_oversubscribe()
    if (problem := admission.no_room(session, job.project, ahead)) is not None:
        raise Refusal("job_state", f"{job.job_id} stays {job.status}: {problem}.")
    before = {"status": job.status, "generation": job.generation}
    job.generation += 1
    job.status = JobStatus.QUEUED
    job.retry_count, job.spent = 0, {}
    job.failure_reason = job.exit_code = job.blocked_reasons = job.blocked_on = None
    job.start_time = job.end_time = job.cancel_requested_at = None
    job.not_before = 0.0
    # As a new job, it cannot be claimed until it is admitted again.
    job.admitted_at = job.spec = job.spec_hash = None
    job.rank = job.due = job.shape = job.resources = None
    events.append(
        session,
        actor=actor.name,
        kind=events.JOB_RETRIED,
        job_id=job.job_id,
        before=before,
        after={"status": job.status, "generation": job.generation},
    )


def _admit_again(session: Session, ids: Sequence[str], allowed: AllowedSecrets) -> None:
    # Damaged checkpoints are tried once more: an operator may have restored their missing files.
    session.execute(
        update(Checkpoint)
        .where(Checkpoint.job_id.in_(ids), Checkpoint.damaged_at.is_not(None))
        .values(damaged_at=None)
        .execution_options(synchronize_session=False)
    )
    admission.admit(session, ids, allowed)
    strays = {attempt["job_id"] for _, attempt in untracked_processes.on_machines(session)}
    untracked_processes.hold_back(session, strays.intersection(ids))


def _set_status(
    session: Session, actor: Actor, job: Job, to: JobStatus, detail: Document | None = None
) -> None:
    """Change the status of a job that does not run, and write the event."""
    before = {"status": job.status}
    job.status = to
    job.blocked_reasons = job.blocked_on = None
    job.waiting_since = database_time(session) if to == JobStatus.QUEUED else None
    if to in FINAL:
        job.end_time = datetime.fromtimestamp(database_time(session), UTC)
    events.append(
        session,
        actor=actor.name,
        kind=f"job.{to}",
        job_id=job.job_id,
        before=before,
        after={"status": to},
        detail=detail,
    )
