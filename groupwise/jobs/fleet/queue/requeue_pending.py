"""Requeueing pending jobs when the fleet has more free capacity than before.

A pending job is checked again only when something has changed for it: code that closes reservations, takes a machine back or ends a job
calls `wake` in the same transaction. For each waiting shape (not for each job) that checks whether one more job would fit now, and it
puts the best-ranked jobs back into the queue, as many as there is room for.

Marking and waking must not overtake each other. Suppose a claim sees a GPU taken; the GPU is released and the pending jobs are checked;
then the claim marks its job as pending: the job would wait although a GPU is free. So both take one lock until they commit
(`lock_marking` shared, `wake` exclusive) and read the fleet after they have it. SQLite has only one writer at a time anyway.

A woken job may leave the queue without using the room that woke it (cancelled, held, placed elsewhere). `claim` therefore calls
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
"""Jobs woken at once; when they are placed, a claim that finds the queue empty wakes the next."""
_LATER = "groupwise_wake_later"
_LOCK = 0x67726F75
"""Key of the advisory lock for marking and waking pending jobs."""


def lock_marking(session: Session) -> None:
    """Take the lock, shared, before the last check for room ahead of marking jobs as pending.

    It is the last lock of a transaction: its holder waits for no row.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock_shared(_LOCK)))


def wake(
    session: Session,
    *,
    vm_ids: Collection[str] | None = None,
    actor: str = "capacity",
) -> int:
    """Put pending jobs that can start now back into the queue; returns how many.

    Call it last in a transaction that closes reservations, takes a machine back, adds or changes one, raises a quota, or ends a job
    (others may wait for it). `vm_ids`: only these machines have more room. Calling it too often is harmless. Within `woken_once` it is
    postponed to the end of that block.
    """
    if (later := session.info.get(_LATER)) is not None:
        later.append((vm_ids, actor))
        return 0
    session.flush()
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    woken = _wake_dependents(session, actor)
    waiting = best_of_shapes(session)
    if not waiting:
        return woken
    now = seconds(session)
    projects = {each.project for each in waiting}
    # It is enough to check the changed machines if no quota counts, no job needs several machines, and nothing is withheld for a
    # long-waiting job.
    patient_or_gang = any(
        each.resources.machines > 1
        or (each.waiting_since is not None and now - each.waiting_since >= PATIENCE_SECONDS)
        for each in waiting
    )
    if vm_ids is not None and not quotas(session, projects) and not patient_or_gang:
        found = View(now, machines(session, now, vm_ids))
    else:
        found = view(session, projects)
    return woken + _wake_in_order(session, found, waiting, actor)


@contextmanager
def woken_once(session: Session) -> Generator[None, None, None]:
    """Combine all `wake` calls within this block into one at its end, because the waking lock must be the transaction's last."""
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
    """Wake jobs for capacity that no `wake` call announced. `found`: a view of the fleet, if the caller has one; returns how many."""
    woken = _wake_dependents(session, "capacity")
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


def _wake_dependents(session: Session, actor: str) -> int:
    """Wake the jobs that wait for a job which has ended or was deleted."""
    waited_for = distinct(Job.blocked_on, PENDING, Job.blocked_on.is_not(None))
    status = select(Job.status).where(Job.job_id == waited_for.c.value).correlate(waited_for)
    query = select(waited_for.c.value, status.scalar_subquery().label("status"))
    ended = [
        row.value
        for row in session.execute(query)
        if row.value is not None and row.status in (None, *FINAL)
    ]
    if not ended:
        return 0
    dependents = select(Job.job_id).where(PENDING, Job.blocked_on.in_(ended))
    ids = session.scalars(dependents.with_for_update(skip_locked=True, key_share=True)).all()
    return _to_queue(session, ids, actor)


def _wake_in_order(session: Session, found: View, waiting: Sequence[Waiting], actor: str) -> int:
    """Place the best-ranked jobs of all shapes, each on the capacity that earlier ones leave; a shape without room is skipped from then
    on."""
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
    """Put these jobs back into the queue. `blocked_reasons` stay until a job runs: they are still the last known reasons."""
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
