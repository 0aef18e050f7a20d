"""Requeueing pending jobs when the fleet has more free capacity than before.

A pending job is checked again only when something has changed for it: code that closes reservations, takes a machine back or ends a job
calls `wake` in the same transaction. For each waiting shape (not for each job) that checks whether one more job would fit now, and it
puts the best-ranked jobs back into the queue, as many as there is room for.

Marking and waking must not overtake each other. Suppose a claim sees a GPU taken; the GPU is released and the pending jobs are checked;
then the claim marks its job as pending: the job would wait although a GPU is free. So both take one lock until they commit
(`lock_marking` shared, `wake` exclusive) and read the machines with room after they have it. Full machines are needed for the reasons why
a job waits, and to withhold capacity for a gang. They are read before, because that takes a second in a large fleet. SQLite has only one
writer at a time anyway.

A woken job may leave the queue without using the room that woke it (cancelled, held, placed elsewhere), and where more than a thousand
machines have room `wake` reads only some of them, and may miss the one that fits. `claim` therefore calls `requeue_unnoticed`, which
reads all and takes no lock, whenever it finds the queue empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.queue.capacity import (
    FreeCapacity,
    machines,
    machines_for_gangs,
    quotas,
    view_of_room,
)
from groupwise.jobs.fleet.queue.placement import LONG_WAIT_SECONDS
from groupwise.jobs.fleet.queue.resource_shapes import (
    PENDING,
    Waiting,
    best_of_shapes,
    distinct,
    following_jobs,
)
from groupwise.jobs.fleet.states import FINAL, JobStatus
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import Job

MAX_WOKEN = 64
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
    if (postponed := session.info.get(_LATER)) is not None:
        postponed.append((vm_ids, actor))
        return 0
    session.flush()
    known = machines_for_gangs(session)  # before the lock, for which other releases wait
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    woken_count = _wake_dependents(session, actor)
    waiting_jobs = best_of_shapes(session)
    if not waiting_jobs:
        return woken_count
    now = database_time(session)
    projects = {job.project for job in waiting_jobs}
    # It is enough to check the changed machines if no quota counts, no job needs several machines, and nothing is withheld for a
    # long-waiting job.
    patient_or_gang = any(
        job.resources.machines > 1
        or (job.waiting_since is not None and now - job.waiting_since >= LONG_WAIT_SECONDS)
        for job in waiting_jobs
    )
    if vm_ids is not None and not quotas(session, projects) and not patient_or_gang:
        view_of_machines = FreeCapacity(now, machines(session, now, vm_ids))
    else:
        view_of_machines = view_of_room(session, projects, known, vm_ids or ())
    return woken_count + _wake_in_order(session, view_of_machines, waiting_jobs, actor)


@contextmanager
def woken_once(session: Session) -> Generator[None, None, None]:
    """Combine all `wake` calls within this block into one at its end, because the waking lock must be the transaction's last."""
    postponed: list[tuple[Collection[str] | None, str]] = []
    session.info[_LATER] = postponed
    try:
        yield
    finally:
        del session.info[_LATER]
    if postponed:
        vm_id_sets = [vm_ids for vm_ids, _ in postponed]
        known_sets = [vm_ids for vm_ids in vm_id_sets if vm_ids is not None]
        changed_vm_ids = {vm_id for vm_ids in known_sets for vm_id in vm_ids}
        wake(
            session,
            vm_ids=changed_vm_ids if len(known_sets) == len(vm_id_sets) else None,
            actor=postponed[-1][1],
        )


def requeue_unnoticed(session: Session, fleet_view: FreeCapacity | None) -> int:
    """Wake jobs for capacity that no `wake` call announced; returns how many. `fleet_view`: the free capacity, if already read."""
    woken_count = _wake_dependents(session, "capacity")
    if fleet_view is not None and fleet_view.is_full():
        return woken_count
    waiting_jobs = best_of_shapes(session)
    if not waiting_jobs:
        return woken_count
    projects = {job.project for job in waiting_jobs}
    if fleet_view is None:
        fleet_view = view_of_room(session, projects)
    else:
        fleet_view = replace(fleet_view, quotas=quotas(session, projects))
    return woken_count + _wake_in_order(session, fleet_view, waiting_jobs, "capacity")


def _wake_dependents(session: Session, actor: str) -> int:
    """Wake the jobs that wait for a job which has ended or was deleted."""
    awaited_jobs = distinct(Job.blocked_on, PENDING, Job.blocked_on.is_not(None))
    status = select(Job.status).where(Job.job_id == awaited_jobs.c.value).correlate(awaited_jobs)
    query = select(awaited_jobs.c.value, status.scalar_subquery().label("status"))
    ended_ids = [
        row.value
        for row in session.execute(query)
        if row.value is not None and row.status in (None, *FINAL)
    ]
    if not ended_ids:
        return 0
    dependents = select(Job.job_id).where(PENDING, Job.blocked_on.in_(ended_ids))
    ids = session.scalars(dependents.with_for_update(skip_locked=True, key_share=True)).all()
    return _to_queue(session, ids, actor)


def _wake_in_order(
    session: Session, view_before: FreeCapacity, waiting_jobs: Sequence[Waiting], actor: str
) -> int:
    """Place the best-ranked jobs of all shapes, each on the capacity that earlier ones leave; a shape without room is skipped from then
    on."""
    trial = replace(
        view_before, machines=dict(view_before.machines), quotas=dict(view_before.quotas)
    )
    best = [(job.key, job) for job in waiting_jobs]
    next_keys = {job.shape: following_jobs(session, job) for job in waiting_jobs}
    heapq.heapify(best)
    woken_ids: list[str] = []
    while best and len(woken_ids) < MAX_WOKEN:
        key, job = heapq.heappop(best)
        placement = trial.room_for(job.resources, job.project, key)
        if placement is None:
            continue
        trial.take(placement, job.resources, job.project)
        woken_ids.append(key[1])
        if (next_key := next(next_keys[job.shape], None)) is not None:
            heapq.heappush(best, (next_key, job))
    query = select(Job.job_id).where(PENDING, Job.job_id.in_(woken_ids)).order_by(Job.job_id)
    if woken_ids:
        woken_ids = list(session.scalars(query.with_for_update(skip_locked=True, key_share=True)))
    return _to_queue(session, woken_ids, actor)


def _to_queue(session: Session, ids: Sequence[str], actor: str) -> int:
    """Put these jobs back into the queue. `blocked_reasons` stay until a job runs: they are still the last known reasons."""
    if not ids:
        return 0
    now = database_time(session)
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
