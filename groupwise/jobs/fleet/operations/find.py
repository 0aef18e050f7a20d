"""Finds rows by the names that users give, or refuses with a list of those that exist.

An operation that changes a row locks it, so that its checks still hold when it writes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TypeVarTuple

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.store.tables import GPU, VM, Job

Columns = TypeVarTuple("Columns")

MAX_NAMES = 20
"""Maximum names that a refusal lists."""
NEAR = 200
"""Number of newest jobs that are searched for an id similar to a misspelt one."""
_INDEX = re.compile(r"[0-9]{1,9}")
"""Index of a GPU; more digits fit into no column."""


def job(session: Session, actor: Actor, job_id: str, *, lock: bool = False) -> Job:
    """The job. Raises `unknown_job`, also for a job of a project that the actor may not see."""
    row = session.get(Job, job_id, with_for_update=lock or None)
    if row is None or not actor.may_see(row.project):
        raise no_job(session, actor, job_id)
    return row


def no_job(session: Session, actor: Actor, job_id: str, *, near: bool = True) -> Refusal:
    """The refusal for an unknown id. `near`: add the most similar id, which requires reading many rows."""
    if not near:
        return Refusal("unknown_job", f"there is no job {job_id!r}.")
    query = visible(select(Job.job_id).order_by(Job.created_at.desc()).limit(NEAR), actor)
    similar = difflib.get_close_matches(job_id, session.scalars(query).all(), n=1)
    hint = f"did you mean {similar[0]}? " if similar else ""
    return Refusal(
        "unknown_job", f"there is no job {job_id!r}; {hint}`groupwise fleet list` lists them."
    )


def visible(query: Select[*Columns], actor: Actor) -> Select[*Columns]:
    """Limit a query of jobs to those that the actor may see."""
    return query if actor.projects is None else query.where(Job.project.in_(actor.projects))


def jobs(
    session: Session, actor: Actor, ids: Iterable[str], *, lock: bool = False
) -> dict[str, Job]:
    """The current rows; jobs that do not exist, or that the actor may not see, are left out."""
    query = visible(select(Job).where(Job.job_id.in_(ids)).order_by(Job.job_id), actor)
    query = query.execution_options(populate_existing=True)
    rows = session.scalars(query.with_for_update() if lock else query)
    return {job.job_id: job for job in rows}


def machine(session: Session, vm_id: str, *, lock: bool = False) -> VM:
    """The machine, also one that was removed. Raises `unknown_vm`."""
    row = session.get(VM, vm_id, with_for_update=lock or None)
    if row is None:
        names = sorted(session.scalars(select(VM.vm_id).where(VM.active)).all())
        raise Refusal(
            "unknown_vm",
            f"there is no machine {vm_id!r}; {which_there_are(vm_id, names, 'vm add')}",
        )
    return row


def active_machine(session: Session, vm_id: str, *, lock: bool = False) -> VM:
    """The machine, unless it was removed. Raises `unknown_vm` or `vm_state`."""
    row = machine(session, vm_id, lock=lock)
    if not row.active:
        raise Refusal(
            "vm_state",
            f"machine {vm_id} was removed from the fleet; `groupwise fleet vm add {vm_id} …` takes it back.",
        )
    return row


def gpu(session: Session, vm_id: str, name: str, *, lock: bool = False) -> GPU:
    """A GPU of a machine by its index or UUID. Raises `unknown_gpu`, also for an index that several have: cards of two vendors, MIG devices
    of one card, or a card and the one that it replaced."""
    machine(session, vm_id)
    query = select(GPU).where(GPU.vm_id == vm_id).order_by(GPU.index, GPU.gpu_id)
    rows = session.scalars(query).all()
    is_index = _INDEX.fullmatch(name) is not None
    found = [row for row in rows if (row.index == int(name) if is_index else row.uuid == name)]
    if len(found) == 1:
        return session.get_one(GPU, found[0].gpu_id, with_for_update=lock or None)
    problem = f"has {len(found)} GPUs {name}: name the UUID" if found else f"has no GPU {name!r}"
    known = ", ".join(
        f"{row.index} ({row.uuid}, {row.model})" for row in (found or rows)[:MAX_NAMES]
    )
    choices = f"{'they are' if found else 'it has'} {known}" if known else "none was seen there"
    raise Refusal("unknown_gpu", f"machine {vm_id} {problem}; {choices}.")


def which_there_are(name: str, names: Sequence[str], otherwise: str) -> str:
    """Text listing the existing names, or only the nearest if one is similar."""
    if not names:
        return f"there are none yet; `groupwise fleet {otherwise}` makes one."
    matches = difflib.get_close_matches(name, names, n=1)
    if matches:
        return f"did you mean {matches[0]}?"
    rest_note = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"there are {', '.join(names[:MAX_NAMES])}{rest_note}."
