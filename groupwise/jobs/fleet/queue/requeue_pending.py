"""Who is woken when the fleet has more free than before.

A pending job is looked at again only when something has changed for it: whoever closes reservations, takes a machine back or ends a job
calls `wake` in the same transaction. It asks for each shape that waits, not for each job, whether one more would fit now, and puts the
best-ranked jobs back into the queue, as many as there is room for.

Marking and waking must not pass each other: a claim that has seen a GPU taken, and marks a job as pending after the GPU was released and
the waiting jobs were asked, would leave it waiting beside a free GPU. So both take one lock until they commit (`lock_marking` shared,
`wake` alone), and whoever has got it reads anew. On SQLite there is one writer at a time anyway.

A job that was woken may leave the queue without using what woke it (cancelled, held, placed elsewhere). `claim` therefore calls
`wake_unnoticed` whenever it finds the queue empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.queue.capacity import View, machines, quotas, view
from groupwise.jobs.fleet.queue.placement import PATIENCE_SECONDS
from groupwise.jobs.fleet.queue.resource_shapes import (
    PENDING,
    Waiting,
    behind,
    best_of_shapes,
    distinct,
)
from groupwise.jobs.fleet.states import FINAL, JobStatus
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import seconds
from groupwise.jobs.fleet.store.tables import Job

MOST_WOKEN = 64
"""At once; when they are placed, claims that find the queue empty wake the next."""
_LATER = "groupwise_wake_later"
_LOCK = 0x67726F75
"""For advisory locks: the marking and waking of pending jobs."""


def lock_marking(session: Session) -> None:
    """Taken by who marks jobs as pending, before it looks for the last time whether there is room; others may do so as well.

    It is the last lock of a transaction: who holds it waits for no row.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock_shared(_LOCK)))


def _lock_waking(session: Session) -> None:
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def wake(
    session: Session,
    *,
    vm_ids: Collection[str] | None = None,
    actor: str = "capacity",
) -> int:
    """Put pending jobs back into the queue that can begin now; how many.

    To be called last in the transaction that closes reservations, takes a machine back, adds or changes one, raises a quota, or ends a
    job, since others may wait for it. `vm_ids`: there is more room on these machines and nowhere else. To call it too often is harmless.
    Within `woken_once` it is done at the end of that.
    """
    if (later := session.info.get(_LATER)) is not None:
        later.append((vm_ids, actor))
        return 0
    session.flush()
    _lock_waking(session)
    ended = _ended(session)
    return _wake_dependents(session, ended, actor) + _wake_shapes(session, vm_ids, actor)


@contextmanager
def woken_once(session: Session) -> Generator[None, None, None]:
    """What frees capacity several times in one transaction wakes once, at its end: the lock of waking has to be its last."""
    later: list[tuple[Collection[str] | None, str]] = []
    session.info[_LATER] = later
    try:
        yield
    finally:
        del session.info[_LATER]
    if later:
        places = [vm_ids for vm_ids, _ in later]
        known = [vm_ids for vm_ids in places if vm_ids is not None]
        together = {vm_id for vm_ids in known for vm_id in vm_ids}
        wake(session, vm_ids=together if len(known) == len(places) else None, actor=later[-1][1])


def wake_unnoticed(session: Session, found: View | None) -> int:
    """The same for capacity of which nobody told, by who has a view already or needs none."""
    woken = _wake_dependents(session, _ended(session), "capacity")
    if found is not None and found.is_full():
        return woken
    waiting = best_of_shapes(session)
    if not waiting:
        return woken
    projects = {each.project for each in waiting}
    if found is None:
        found = view(session, projects)
    else:
        found = replace(found, quotas=quotas(session, projects))
    return woken + _wake_in_order(session, found, waiting, "capacity")


def _ended(session: Session) -> list[str]:
    """Jobs that have ended, or are not there any more, and that others still wait for."""
    waited_for = distinct(Job.blocked_on, PENDING, Job.blocked_on.is_not(None))
    status = select(Job.status).where(Job.job_id == waited_for.c.value).correlate(waited_for)
    query = select(waited_for.c.value, status.scalar_subquery().label("status"))
    return [
        row.value
        for row in session.execute(query)
        if row.value is not None and row.status in (None, *FINAL)
    ]


def _wake_dependents(session: Session, ended: Sequence[str], actor: str) -> int:
    if not ended:
        return 0
    query = select(Job.job_id).where(PENDING, Job.blocked_on.in_(ended))
    ids = session.scalars(query.with_for_update(skip_locked=True, key_share=True)).all()
    return _to_queue(session, ids, actor)


def _wake_shapes(session: Session, vm_ids: Collection[str] | None, actor: str) -> int:
    waiting = best_of_shapes(session)
    if not waiting:
        return 0
    now = seconds(session)
    limits = quotas(session, {each.project for each in waiting})
    if vm_ids is not None and not limits and all(_is_local(each, now) for each in waiting):
        found = View(now, machines(session, now, vm_ids))
    else:
        found = view(session, {each.project for each in waiting})
    return _wake_in_order(session, found, waiting, actor)


def _is_local(waiting: Waiting, now: float) -> bool:
    """Whether it is enough to look at the machines where something changed."""
    since = waiting.waiting_since
    return waiting.resources.machines == 1 and (since is None or now - since < PATIENCE_SECONDS)


def _wake_in_order(session: Session, found: View, waiting: Sequence[Waiting], actor: str) -> int:
    """The best-ranked of all shapes together, each placed on what those before it leave; a shape that finds no room is done with."""
    trial = replace(found, machines=dict(found.machines), quotas=dict(found.quotas))
    best = [(each.key, each) for each in waiting]
    others = {each.shape: behind(session, each) for each in waiting}
    heapq.heapify(best)
    woken: list[str] = []
    while best and len(woken) < MOST_WOKEN:
        key, each = heapq.heappop(best)
        placement = trial.room_for(each.resources, each.project, key)
        if placement is None:
            continue
        trial.take(placement, each.resources, each.project)
        woken.append(key[1])
        if (following := next(others[each.shape], None)) is not None:
            heapq.heappush(best, (following, each))
    query = select(Job.job_id).where(PENDING, Job.job_id.in_(woken)).order_by(Job.job_id)
    if woken:
        woken = list(session.scalars(query.with_for_update(skip_locked=True, key_share=True)))
    return _to_queue(session, woken, actor)


def _to_queue(session: Session, ids: Sequence[str], actor: str) -> int:
    """`blocked_reasons` stay until it runs: they are still the last thing that is known of it."""
    if not ids:
        return 0
    now = seconds(session)
    session.execute(
        update(Job)
        .where(Job.job_id.in_(ids))
        .values(
            status=JobStatus.QUEUED,
            blocked_on=None,
            waiting_since=func.coalesce(Job.waiting_since, now),
        )
        .execution_options(synchronize_session=False)
    )
    events.append_of_jobs(session, ids, JobStatus.PENDING, JobStatus.QUEUED, actor)
    return len(ids)
