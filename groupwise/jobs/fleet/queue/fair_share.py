"""Fair share: the queue of one project, in which each job has a `due` time and a `rank`.

Within its project a job is ordered by `due`: its creation time, less an hour for each step of priority. Across projects jobs are ordered
by `rank`: the due time, or the moment at which all jobs before it in its project have had their turns, whichever is later. A turn grows
with the GPUs that a job requests and shrinks with the weight of the project. So ranks of one project follow the order of `due`, a turn
apart, and a project that submits thousands of jobs, at any priority, does not starve the others.

Both are stored, since a claim has no time to compute them. Most jobs join at the end, which costs one query for the last job there. A job
that joins ahead of others needs a turn as well. Usually there is room for it between its neighbours, as a step of priority is worth many
turns. Otherwise all jobs after it are postponed in one statement: by the missing time, plus one per cent of the span of their ranks, to
avoid shifting a hundred thousand jobs again for each of many jobs inserted ahead of them.

Admission places jobs while it holds the lock of their project, and calls `settle` before it commits.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, literal_column, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.store.tables import Job

PRIORITY_SECONDS = 3600.0
"""Seconds of waiting that one step of priority is worth."""
TURN_SECONDS = 30.0
"""Length in seconds of a turn for each requested GPU, in a project of weight 1."""
MARGIN = 0.01
"""Jobs are postponed by this share of the span of their ranks more than needed."""
WAITING: ColumnElement[bool] = literal_column("jobs.status IN ('queued', 'pending', 'held')")
"""Written exactly as in the partial index of waiting jobs, or the database would not use that index."""

_BACKWARDS = (Job.due.desc(), Job.rank.desc())


@dataclass(slots=True)
class QueuePosition:
    """The place of one job in the queue of its project."""

    due: float
    rank: float
    turn: float
    """Seconds from this job's rank to the earliest rank of the next job."""

    @property
    def end(self) -> float:
        """The end of its turn: the earliest rank of the next job."""
        return self.rank + self.turn


@dataclass(slots=True)
class _Gap:
    """Two jobs that are neighbours in the database; None: there is no job on that side."""

    previous: QueuePosition | None
    following: QueuePosition | None
    shift: float = 0.0
    """Seconds by which all jobs after the gap will be postponed."""

    def has(self, due: float) -> bool:
        """True if a job with this due time goes here; it goes after those with the same time."""
        return (self.previous is None or self.previous.due <= due) and (
            self.following is None or due < self.following.due
        )


class ProjectQueue:
    """The waiting jobs of a project; the caller holds the project's lock."""

    def __init__(self, session: Session, project: str, weight: float) -> None:
        self._session = session
        self._project = project
        self._weight = weight
        self._gaps: list[_Gap] = []
        self._placed: list[QueuePosition] = []
        """Positions that are not in the database yet, in order."""

    def place(self, due: float, resources: Resources) -> QueuePosition:
        """The position of a job that joins. Its rank is final once all jobs of this transaction have been placed."""
        gap = next((gap for gap in self._gaps if gap.has(due)), None)
        if gap is None:
            gap = _Gap(
                self._neighbour(Job.due <= due, *_BACKWARDS),
                self._neighbour(Job.due > due, Job.due, Job.rank),
            )
            self._gaps.append(gap)
        index = bisect_right(self._placed, due, key=lambda position: position.due)
        predecessors = [*self._with_new_rank(gap.previous), *self._placed[:index][-1:]]
        successors = [*self._with_new_rank(gap.following), *self._placed[index:][:1]]
        rank = max([due, *(position.end for position in predecessors)])
        new_position = QueuePosition(due, rank, self._turn_seconds(resources))
        shift = new_position.end - min(
            [new_position.end, *(position.rank for position in successors)]
        )
        if shift:
            if gap.following is not None:
                last_position = self._neighbour(Job.due >= gap.following.due, *_BACKWARDS)
                span = (
                    0.0
                    if last_position is None
                    else max(0.0, last_position.rank - gap.following.rank)
                )
                shift += MARGIN * span
            gap.shift += shift
            for position in self._placed[index:]:
                position.rank += shift
        self._placed.insert(index, new_position)
        return new_position

    def settle(self) -> None:
        """Write the postponed ranks of the jobs after those that were placed.

        Jobs that another process has locked (claimed, changed) keep their rank: waiting for one could deadlock, as its holder may be
        waiting for the project.
        """
        for gap in self._gaps:
            if gap.following is None or not gap.shift:
                continue
            later_jobs = select(Job.job_id).where(
                *self._waiting_jobs(), Job.due >= gap.following.due
            )
            locked = later_jobs.with_for_update(skip_locked=True, key_share=True)
            self._session.execute(
                update(Job)
                .where(Job.job_id.in_(locked))
                .values(rank=Job.rank + gap.shift)
                .execution_options(synchronize_session=False)
            )

    def _turn_seconds(self, resources: Resources) -> float:
        return TURN_SECONDS * max(1, resources.gpu_count) * resources.machines / self._weight

    def _with_new_rank(self, position: QueuePosition | None) -> list[QueuePosition]:
        """A neighbour with its rank after `settle`; empty if there is none."""
        if position is None:
            return []
        earlier_gaps = (
            g for g in self._gaps if g.following is not None and g.following.due <= position.due
        )
        return [
            QueuePosition(
                position.due, position.rank + sum(g.shift for g in earlier_gaps), position.turn
            )
        ]

    def _neighbour(self, side: ColumnElement[bool], *order: Any) -> QueuePosition | None:
        """The first waiting job on one side, in this order."""
        query = select(Job.due, Job.rank, Job.resources).where(*self._waiting_jobs(), side)
        row = self._session.execute(query.order_by(*order).limit(1)).first()
        if row is None:
            return None
        turn = self._turn_seconds(Resources.model_validate(row.resources))
        return QueuePosition(row.due, row.rank, turn)

    def _waiting_jobs(self) -> tuple[ColumnElement[bool], ...]:
        return (WAITING, Job.project == self._project, Job.admitted_at.is_not(None))
