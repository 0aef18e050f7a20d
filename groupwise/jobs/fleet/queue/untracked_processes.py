"""Attempts that a machine runs and that stand in no table, as after a database was restored from a backup: nothing is done to them, and
their jobs do not begin anew beside them.

The poller writes down what it finds with what else it knows of the machine, and holds the jobs back for a while, with each look for a
while longer. A machine that has fallen silent runs on what it ran, for all that anybody knows, so that the requeue manager holds back what
the last look at it found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.states import FINAL, Contact
from groupwise.jobs.fleet.store.database import seconds
from groupwise.jobs.fleet.store.tables import VM, Job

ATTEMPT = "attempt"
"""In quarantine on a machine, beside the `folder` and `process` that its runner finds."""
WRITTEN = {"job_id", "epoch", "detail", "since"}
HELD_BACK = 180.0
"""Seconds: several looks of the poller, and sweeps of the requeue manager."""


def in_quarantine(vm: VM) -> list[dict[str, Any]]:
    """What a machine ran and no table knew when it was looked at last: job_id, epoch, and since when it was seen there."""
    return _attempts(vm.facts.get("quarantined"))


def _attempts(found: object) -> list[dict[str, Any]]:
    """Of a column that anybody may write."""
    if not isinstance(found, list):
        return []
    entries = [
        cast("dict[str, Any]", each) for each in cast("list[Any]", found) if isinstance(each, dict)
    ]
    return [each for each in entries if each.get("what") == ATTEMPT and each.keys() >= WRITTEN]


@dataclass(frozen=True, slots=True)
class Holding:
    """What attempts in quarantine have of their machine: it refuses whoever else is placed there."""

    whole: frozenset[str] = frozenset()
    """UUIDs of GPUs."""
    shares_mb: Mapping[str, int] = field(default_factory=dict[str, int])
    """By UUID."""
    slots: frozenset[int] = frozenset()


def holding(facts: Mapping[str, Any] | None) -> Holding:
    """What stands in the facts of a machine."""
    whole, slots, shares = set[str](), set[int](), Counter[str]()
    for each in _attempts((facts or {}).get("quarantined")):
        gpus, share, slot = each.get("gpus"), each.get("share_mb"), each.get("slot")
        uuids = set(map(str, cast("list[Any]", gpus) if isinstance(gpus, list) else ()))
        if isinstance(share, int):
            shares.update(dict.fromkeys(uuids, max(share, 0)))
        else:
            whole |= uuids
        if isinstance(slot, int):
            slots.add(slot)
    return Holding(frozenset(whole), dict(shares), frozenset(slots))


def on_machines(session: Session, *, silent: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Likewise of all that were not given up, by machine; `silent`: only of those that nobody hears."""
    found = VM.facts["quarantined"]
    known = select(VM.vm_id, found).where(VM.active, VM.lost_at.is_(None), found.is_not(None))
    if silent:
        known = known.where(VM.contact != Contact.OK)
    rows = session.execute(known.order_by(VM.vm_id))
    return [(vm_id, each) for vm_id, entries in rows for each in _attempts(entries)]


def held_back_by(session: Session, job_id: str) -> list[str]:
    """What keeps a job from beginning, in words."""
    return [
        f"{vm_id} runs {each['detail']}, which stands in no table: it begins once that has ended, or `groupwise fleet vm mark-lost {vm_id}`"
        for vm_id, each in on_machines(session)
        if each["job_id"] == job_id
    ]


def lock(session: Session, job_ids: Collection[str]) -> set[str]:
    """Those of these jobs that are there: nobody else begins or changes them until the end. To be called before a machine is locked, as
    claims and ends of attempts lock jobs before machines."""
    if not job_ids:
        return set()
    chosen = select(Job.job_id).where(Job.job_id.in_(job_ids)).order_by(Job.job_id)
    return set(session.scalars(chosen.with_for_update(key_share=True)))


def hold_back(session: Session, job_ids: Collection[str]) -> float:
    """Have none of these begin for a while; until when. Who has locked a machine has locked them before."""
    locked, until = lock(session, job_ids), seconds(session) + HELD_BACK
    if locked:
        session.execute(
            update(Job)
            .where(Job.job_id.in_(locked), Job.status.not_in(FINAL), Job.not_before < until)
            .values(not_before=until)
            .execution_options(synchronize_session=False)
        )
    return until


def let_go(session: Session, job_ids: Collection[str], until: object) -> None:
    """What ran of these on a machine has ended: they may begin, unless another one runs something of them. `until`: what `hold_back` said;
    whoever waits for anything else waits on. The machine is locked, so that a job which somebody else has is not waited for: its pause
    just ends by itself."""
    elsewhere = {each["job_id"] for _, each in on_machines(session)}
    if (free := set(job_ids) - elsewhere) and isinstance(until, float):
        held = select(Job.job_id).where(Job.job_id.in_(free), Job.not_before == until)
        ids = session.scalars(held.with_for_update(skip_locked=True, key_share=True)).all()
        session.execute(
            update(Job)
            .where(Job.job_id.in_(ids))
            .values(not_before=seconds(session))
            .execution_options(synchronize_session=False)
        )
