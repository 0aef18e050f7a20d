"""Shapes: pending jobs with equal resources wait for the same room, and the best-ranked job represents all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import CTE, ColumnElement, literal_column, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.store.tables import Job

QUEUED = Job.status == literal_column("'queued'")
PENDING = Job.status == literal_column("'pending'")
"""Written as literals, not as parameters: only then do both databases use their partial indexes."""

RankKey = tuple[float, str]
"""Rank and id of a job: its place in the queue."""
_READ_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Waiting:
    """The best-ranked pending job of a shape that waits for room."""

    shape: str
    key: RankKey
    resources: Resources
    project: str
    waiting_since: float | None
    not_before: float


def best_of_shapes(session: Session) -> list[Waiting]:
    """The best-ranked job of each shape, by rank. Reads one row per shape, no matter how many jobs wait."""
    is_waiting = (PENDING, Job.blocked_on.is_(None))
    shapes = distinct(Job.shape, *is_waiting)
    first_job = (
        select(Job.job_id)
        .where(*is_waiting, Job.shape == shapes.c.value)
        .order_by(Job.rank, Job.job_id)
        .limit(1)
        .correlate(shapes)
        .scalar_subquery()
    )
    # Materialised: the ids are then found by the index, even if the statistics suggest another plan.
    best = select(first_job.label("job_id")).select_from(shapes).cte("best")
    best = best.prefix_with("MATERIALIZED", dialect="postgresql")
    query = select(
        Job.job_id,
        Job.shape,
        Job.rank,
        Job.resources,
        Job.project,
        Job.waiting_since,
        Job.not_before,
    ).join(best, best.c.job_id == Job.job_id)
    best_jobs = [
        Waiting(
            row.shape,
            (row.rank, row.job_id),
            Resources.model_validate(row.resources or {}),
            row.project,
            row.waiting_since,
            row.not_before,
        )
        for row in session.execute(query)
    ]
    return sorted(best_jobs, key=lambda job: job.key)


def distinct(column: InstrumentedAttribute[str | None], *where: ColumnElement[bool]) -> CTE:
    """Distinct values of an indexed column, as `value`, with one index lookup for each; the last one is NULL."""
    # With ORDER BY and LIMIT instead of min(), for which PostgreSQL would read all greater values.
    first_value = select(column.label("value")).where(*where).order_by(column).limit(1)
    values = select(first_value.subquery().c.value).cte(recursive=True)
    next_value = select(column).where(*where, column > values.c.value).order_by(column).limit(1)
    return values.union_all(
        select(next_value.correlate(values).scalar_subquery()).where(values.c.value.is_not(None))
    )


def following_jobs(session: Session, job: Waiting) -> Iterator[RankKey]:
    """The pending jobs of the same shape that follow it, read lazily."""
    key = job.key
    while True:
        rows = session.execute(
            select(Job.rank, Job.job_id)
            .where(
                PENDING,
                Job.blocked_on.is_(None),
                Job.shape == job.shape,
                tuple_(Job.rank, Job.job_id) > key,
            )
            .order_by(Job.rank, Job.job_id)
            .limit(_READ_AT_ONCE)
        ).all()
        for row in rows:
            key = (row.rank, row.job_id)
            yield key
        if len(rows) < _READ_AT_ONCE:
            return
