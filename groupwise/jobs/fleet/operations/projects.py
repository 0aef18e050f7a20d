"""Projects, to which jobs belong. A weight sets a project's share of a busy fleet; quotas set its maximum."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupwise.api.schemas.fleet import MAX_INTEGER, MAX_WEIGHT, MIN_WEIGHT
from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import Document, project_document
from groupwise.jobs.fleet.queue import requeue_pending
from groupwise.jobs.fleet.queue.capacity import GPUS_OF_ENGINE
from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.tables import Attempt, Job, Project, Reservation

WAITING = (JobStatus.QUEUED, JobStatus.PENDING, JobStatus.HELD)
"""The statuses of waiting jobs, as in the index of the table."""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Marks a value that was not given, because None means `no limit`."""


UNCHANGED = Unchanged()


def listing(session: Session, actor: Actor) -> list[Document]:
    """All projects that the actor may see, with their numbers of waiting and running jobs and of GPUs in use."""
    query = select(Project).order_by(Project.name)
    if actor.projects is not None:
        query = query.where(Project.name.in_(actor.projects))
    by_status = session.execute(
        select(Job.project, Job.status, func.count())
        .where(Job.status.in_((*WAITING, JobStatus.RUNNING)))
        .group_by(Job.project, Job.status)
    )
    counts = {(name, status): count for name, status, count in by_status}
    in_use = session.execute(
        select(Job.project, func.count(Reservation.gpu_id.distinct()) + func.sum(GPUS_OF_ENGINE))
        .join(Attempt, Attempt.job_id == Job.job_id)
        .join(Reservation, Reservation.epoch == Attempt.epoch)
        .where(Reservation.released_at.is_(None))
        .group_by(Job.project)
    )
    gpus = dict(in_use.all())
    return [
        project_document(project)
        | {
            "waiting": sum(counts.get((project.name, status), 0) for status in WAITING),
            "running": counts.get((project.name, JobStatus.RUNNING), 0),
            "gpus_in_use": gpus.get(project.name, 0),
        }
        for project in session.scalars(query)
    ]


def change(
    session: Session,
    actor: Actor,
    name: str,
    *,
    weight: float | Unchanged = UNCHANGED,
    max_gpus: int | Unchanged | None = UNCHANGED,
    max_waiting: int | Unchanged | None = UNCHANGED,
) -> Document:
    """Set weight and quotas of a project, which is made if it does not exist. None removes a quota."""
    actor.require_all_projects("change a project")
    settings = {"weight": weight, "max_gpus": max_gpus, "max_waiting": max_waiting}
    changes = {key: value for key, value in settings.items() if not isinstance(value, Unchanged)}
    _check_quotas(changes)
    project = session.get(Project, name, with_for_update=True)
    if project is None:
        if not name or len(name) > 80 or not name.isprintable() or name != name.strip():
            raise Refusal(
                "invalid_request",
                f"{name!r} is not a name for a project: 1 to 80 printable characters.",
            )
        project = Project(name=name)
        session.add(project)
        session.flush()
        session.refresh(project)
    before = {key: getattr(project, key) for key in changes}
    if before != changes:
        for key, value in changes.items():
            setattr(project, key, value)
        events.append(
            session,
            actor=actor.name,
            kind=events.PROJECT_CHANGED,
            before=before,
            after=changes,
            detail={"project": name},
        )
        requeue_pending.wake(session, actor=actor.name)
    return project_document(project)


def _check_quotas(changes: dict[str, float | int | None]) -> None:
    if not changes:
        raise Refusal("invalid_request", "nothing to change: give weight, max_gpus or max_waiting.")
    weight = changes.get("weight", 1.0)
    if weight is None or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise Refusal(
            "invalid_request",
            f"weight {weight}: a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}; 2 gets twice as much as 1.",
        )
    for quota in ("max_gpus", "max_waiting"):
        value = changes.get(quota)
        if value is not None and not 0 <= value <= MAX_INTEGER:
            raise Refusal(
                "invalid_request",
                f"{quota} {value}: a whole number from 0 to {MAX_INTEGER}, or none for no limit.",
            )
