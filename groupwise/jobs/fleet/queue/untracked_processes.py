"""Attempts that a machine runs and that are in no table, such as after a database was restored from a backup. They are left alone, and
their jobs do not start a second time while they run.

The poller records them with the machine's facts, and delays their jobs for a while; each observation extends the delay. A machine that has
fallen silent may still run its attempts, so the requeue manager extends the delay for those of its last observation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.states import FINAL, Contact
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import VM, Job

ATTEMPT = "attempt"
"""Marks an attempt in the list `untracked` of a machine's facts, in addition to the `folder` and `process` entries of its runner."""
WRITTEN = {"job_id", "epoch", "detail", "since"}
HELD_BACK = 180.0
"""Delay of such jobs in seconds, long enough for several rounds of the poller and the requeue manager."""


def on_machine(vm: VM) -> list[dict[str, Any]]:
    """Attempts that the machine ran at its last observation and that are in no table: job_id, epoch, and since when."""
    return _attempts_in(vm.facts.get("untracked"))


def _attempts_in(untracked: object) -> list[dict[str, Any]]:
    """The valid entries of the list. Users can write the column, so it may hold anything."""
    if not isinstance(untracked, list):
        return []
    entries = [
        cast("dict[str, Any]", entry)
        for entry in cast("list[Any]", untracked)
        if isinstance(entry, dict)
    ]
    return [entry for entry in entries if entry.get("what") == ATTEMPT and entry.keys() >= WRITTEN]


@dataclass(frozen=True, slots=True)
class Holding:
    """Capacity of a machine that untracked attempts hold; other jobs do not get it."""

    whole: frozenset[str] = frozenset()
    """UUIDs of GPUs that are held whole."""
    shares_mb: Mapping[str, int] = field(default_factory=dict[str, int])
    """MB of memory shares, by the GPU's UUID."""
    slots: frozenset[int] = frozenset()


def holding(facts: Mapping[str, Any] | None) -> Holding:
    """The capacity that untracked attempts hold, from the facts of their machine."""
    whole_gpus, slots, shares = set[str](), set[int](), Counter[str]()
    for attempt in _attempts_in((facts or {}).get("untracked")):
        gpus, share, slot = attempt.get("gpus"), attempt.get("share_mb"), attempt.get("slot")
        uuids = set(map(str, cast("list[Any]", gpus) if isinstance(gpus, list) else ()))
        if isinstance(share, int):
            shares.update(dict.fromkeys(uuids, max(share, 0)))
        else:
            whole_gpus |= uuids
        if isinstance(slot, int):
            slots.add(slot)
    return Holding(frozenset(whole_gpus), dict(shares), frozenset(slots))


def on_machines(session: Session, *, silent: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Untracked attempts of all machines that were not given up, with the vm_id; `silent`: only of machines that do not answer."""
    untracked = VM.facts["untracked"]
    query = select(VM.vm_id, untracked).where(
        VM.active, VM.lost_at.is_(None), untracked.is_not(None)
    )
    if silent:
        query = query.where(VM.contact != Contact.OK)
    rows = session.execute(query.order_by(VM.vm_id))
    return [(vm_id, attempt) for vm_id, entries in rows for attempt in _attempts_in(entries)]


def held_back_by(session: Session, job_id: str) -> list[str]:
    """The reasons why untracked attempts keep the job from starting, in words."""
    return [
        f"{vm_id} runs {attempt['detail']}, which the database does not know: this job begins once that has ended, "
        f"or after `groupwise fleet vm mark-lost {vm_id}`"
        for vm_id, attempt in on_machines(session)
        if attempt["job_id"] == job_id
    ]


def lock(session: Session, job_ids: Collection[str]) -> set[str]:
    """Lock those of these jobs that exist, until the transaction ends. Call it before locking a machine, since claims and ends of attempts
    lock jobs before machines."""
    if not job_ids:
        return set()
    query = select(Job.job_id).where(Job.job_id.in_(job_ids)).order_by(Job.job_id)
    return set(session.scalars(query.with_for_update(key_share=True)))


def hold_back(session: Session, job_ids: Collection[str]) -> float:
    """Keep these jobs from starting for a while; returns until when. A caller that has locked a machine must have locked the jobs
    before."""
    locked_ids, held_until = lock(session, job_ids), database_time(session) + HELD_BACK
    if locked_ids:
        session.execute(
            update(Job)
            .where(
                Job.job_id.in_(locked_ids), Job.status.not_in(FINAL), Job.not_before < held_until
            )
            .values(not_before=held_until)
            .execution_options(synchronize_session=False)
        )
    return held_until


def release(session: Session, job_ids: Collection[str], until: object) -> None:
    """Allow these jobs to start again after their untracked attempts on a machine have ended, unless another machine runs one.

    `until`: the result of `hold_back`; jobs that wait for another reason keep waiting. The machine is locked, so jobs locked by another
    process are skipped: their delay ends by itself.
    """
    running_elsewhere = {attempt["job_id"] for _, attempt in on_machines(session)}
    if (free_ids := set(job_ids) - running_elsewhere) and isinstance(until, float):
        waiting_jobs = select(Job.job_id).where(Job.job_id.in_(free_ids), Job.not_before == until)
        ids = session.scalars(waiting_jobs.with_for_update(skip_locked=True, key_share=True)).all()
        session.execute(
            update(Job)
            .where(Job.job_id.in_(ids))
            .values(not_before=database_time(session))
            .execution_options(synchronize_session=False)
        )
