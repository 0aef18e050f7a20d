"""The line of one project: in which order its jobs stand, and when each of them is due.

Within its project a job stands by `due`: when it was made, less an hour for each step of priority. Between projects what counts is the
`rank`: a job is due then, or once those that stand before it in its project have had their turns, each by how much it asks for and by
the weight of the project. So ranks of one project are always in the order of `due` and a turn apart, whatever was admitted when; and a
project that submits thousands, at whatever priority, does not keep others from theirs.

Both are stored, since a claim has no time to compute them. Most jobs go to the end of their line, which costs a look at the last one
there. One that goes before others needs its turn as well: mostly there is time for it between its neighbours, as a step of priority is
worth many turns; otherwise all behind it are put off in one statement, by as much as is missing and a hundredth of how far they reach, so
that it is not done again for each of many that go before a hundred thousand.

Admission places jobs while it holds the lock of their project, and tells the line to `settle` before it lets go.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, literal_column, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.store.tables import Job

PRIORITY_SECONDS = 3600.0
"""Of waiting that a step of priority is worth."""
TURN_SECONDS = 30.0
"""By which a project of weight 1 comes later with each GPU that it asks for."""
MARGIN = 0.01
"""Of how far those reach that are put off: by so much more."""
WAITING: ColumnElement[bool] = literal_column("jobs.status IN ('queued', 'pending', 'held')")
"""Written out as in the index of waiting jobs."""

_BACKWARDS = (Job.due.desc(), Job.rank.desc())


@dataclass(slots=True)
class QueuePosition:
    """Of one job in the line."""

    due: float
    rank: float
    turn: float
    """Seconds after which the next one may be due."""

    @property
    def end(self) -> float:
        """Of its turn."""
        return self.rank + self.turn


@dataclass(slots=True)
class _Gap:
    """Two jobs that stand next to each other in the database; None: there is nobody on that side."""

    before: QueuePosition | None
    behind: QueuePosition | None
    put_off: float = 0.0
    """By which all on its far side are to come later than they stand there."""

    def has(self, due: float) -> bool:
        """Whether that is where such a job goes; it goes behind its equals."""
        return (self.before is None or self.before.due <= due) and (
            self.behind is None or due < self.behind.due
        )


class ProjectQueue:
    """The jobs of a project that wait, for whoever has locked the project."""

    def __init__(self, session: Session, project: str, weight: float) -> None:
        self._session = session
        self._project = project
        self._weight = max(weight, 1e-3)
        self._gaps: list[_Gap] = []
        self._placed: list[QueuePosition] = []
        """Those that are not in the database yet, in their order."""

    def place(self, due: float, resources: Resources) -> QueuePosition:
        """The place of a job that joins. Its rank stands when all have been placed that are placed together."""
        gap = self._gap(due)
        index = bisect_right(self._placed, due, key=lambda each: each.due)
        before = [*self._now(gap.before), *self._placed[:index][-1:]]
        behind = [*self._now(gap.behind), *self._placed[index:][:1]]
        rank = max([due, *(each.end for each in before)])
        place = QueuePosition(due, rank, self._turn(resources))
        missing = place.end - min([place.end, *(each.rank for each in behind)])
        if missing:
            missing += MARGIN * self._reach(gap)
            gap.put_off += missing
            for each in self._placed[index:]:
                each.rank += missing
        self._placed.insert(index, place)
        return place

    def settle(self) -> None:
        """Put off in the database those that others were placed before. Who is being claimed or changed at this moment stays as it is.

        For that it is not waited: whoever has locked a job may be waiting for its project.
        """
        for gap in self._gaps:
            if gap.behind is None or not gap.put_off:
                continue
            behind = select(Job.job_id).where(*self._members(), Job.due >= gap.behind.due)
            locked = behind.with_for_update(skip_locked=True, key_share=True)
            self._session.execute(
                update(Job)
                .where(Job.job_id.in_(locked))
                .values(rank=Job.rank + gap.put_off)
                .execution_options(synchronize_session=False)
            )

    def _turn(self, resources: Resources) -> float:
        return TURN_SECONDS * max(1, resources.gpu_count) * resources.machines / self._weight

    def _now(self, place: QueuePosition | None) -> list[QueuePosition]:
        """A neighbour, as it will stand in the database."""
        if place is None:
            return []
        before = (g for g in self._gaps if g.behind is not None and g.behind.due <= place.due)
        return [QueuePosition(place.due, place.rank + sum(g.put_off for g in before), place.turn)]

    def _reach(self, gap: _Gap) -> float:
        """From the first to the last of those in the database that stand behind a gap."""
        if gap.behind is None:
            return 0.0
        last = self._neighbour(Job.due >= gap.behind.due, *_BACKWARDS)
        return 0.0 if last is None else max(0.0, last.rank - gap.behind.rank)

    def _gap(self, due: float) -> _Gap:
        known = next((gap for gap in self._gaps if gap.has(due)), None)
        if known is None:
            known = _Gap(
                self._neighbour(Job.due <= due, *_BACKWARDS),
                self._neighbour(Job.due > due, Job.due, Job.rank),
            )
            self._gaps.append(known)
        return known

    def _neighbour(self, side: ColumnElement[bool], *order: Any) -> QueuePosition | None:
        query = select(Job.due, Job.rank, Job.resources).where(*self._members(), side)
        row = self._session.execute(query.order_by(*order).limit(1)).first()
        return None if row is None else self._read(row.due, row.rank, row.resources)

    def _read(self, due: float, rank: float, resources: Mapping[str, Any]) -> QueuePosition:
        return QueuePosition(due, rank, self._turn(Resources.model_validate(resources)))

    def _members(self) -> tuple[ColumnElement[bool], ...]:
        return (WAITING, Job.project == self._project, Job.admitted_at.is_not(None))
