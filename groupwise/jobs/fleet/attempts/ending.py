"""The end of an attempt, and the release of its reservations: one transaction each.

`end` writes the end of the attempt, the job's next status, the quarantine of a broken GPU or the draining of a machine that fails
launches, and the events of all that, together or not at all. So there is no moment at which a job is running without a live attempt.

Reservations stay open until the machine was seen to hold nothing of the attempt (`release`), or an operator has declared the machine lost
(`abandon`). Only an attempt that never ran anywhere releases them at once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Table, bindparam, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts import refusals
from groupwise.jobs.fleet.attempts.decide import Move
from groupwise.jobs.fleet.attempts.records import append_event, job_of, locked_attempt, members_of
from groupwise.jobs.fleet.attempts.write_batching import Step, Steps, in_steps
from groupwise.jobs.fleet.queue import requeue_pending
from groupwise.jobs.fleet.queue.failures import REFUSED_LAUNCH, JobFacts, Verdict, after_end
from groupwise.jobs.fleet.queue.request import RequestDocument
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.states import (
    FINAL,
    AttemptState,
    Cleanup,
    Contact,
    JobStatus,
    Observed,
    Outcome,
)
from groupwise.jobs.fleet.store import epochs, events
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.events import note_observed
from groupwise.jobs.fleet.store.tables import (
    GPU,
    NEWEST_FIRST,
    VM,
    Attempt,
    Checkpoint,
    Job,
    Member,
    Reservation,
)
from groupwise.jobs.hosts.failures import FailureClass

FAULT_REPORT_SECONDS = 86_400.0
"""Seconds for which a job's report that a GPU is broken counts."""
UNKNOWN_PROGRAM = "unknown_program"
"""Refusal by a runner whose machine lacks the command's program. If no machine has it, that is the user's error."""
DRAINED_AFTER = 3
"""Refused launches in a row, each of another job, after which a machine is drained."""


@in_steps
def end(session: Session, epoch: int, owner: str, move: Move, rng: random.Random) -> Steps:
    """End the attempt and write its job's next status. Idempotent."""
    attempt = locked_attempt(session, epoch, owner)
    if attempt.state == AttemptState.ENDED:
        return
    job = job_of(session, attempt)
    if refusals.code_of(_member_at_fault(move).get("refusal")) == UNKNOWN_PROGRAM and _is_hopeless(
        session, job, move
    ):
        move = replace(move, failure=FailureClass.USER_ERROR)
    verdict = verdict_on(session, job, attempt, move, rng)
    state_before = attempt.state
    attempt.outcome = move.outcome
    attempt.failure_class = move.failure
    attempt.charged = verdict.charged if move.failure else None
    attempt.evidence = {**attempt.evidence, **move.evidence}
    attempt.ended_at = database_time(session)
    attempt.state = AttemptState.ENDED
    event_after = {
        "state": AttemptState.ENDED,
        "outcome": move.outcome,
        "failure_class": move.failure,
    }
    append_event(
        session, attempt, owner, events.ATTEMPT_ENDED, before={"state": state_before}, after=event_after,
        detail={"because": move.because},
    )  # fmt: skip
    yield None  # a trigger demands that the attempt ends before its job moves
    if move.failure is FailureClass.GPU_FAULT:
        _quarantine(session, attempt, owner, move)
    if _steps_back(attempt, move):
        _note_damage(session, attempt, owner, move)
    if move.failure is FailureClass.LAUNCH_FAILURE:
        _blame_machine(session, attempt, owner, move)
        _note_gpus(session, attempt, owner, move)
        epochs.raise_above(session, [_member_at_fault(move).get("highest") or 0])
    _move_job(session, job, attempt, owner, move, verdict)
    freed_vm_ids: list[str] = []
    if move.outcome is Outcome.VOID:
        # It never ran, and every machine that knew of it has ensured that it never will.
        for member in members_of(session, epoch):
            member.released = True
            freed_vm_ids.append(member.vm_id)
            yield _close_reservations(session, epoch, member.rank)
        _perhaps_clean(session, attempt, owner)
    requeue_pending.wake(session, vm_ids=freed_vm_ids, actor=_actor(owner))


def verdict_on(
    session: Session, job: Job, attempt: Attempt, move: Move, rng: random.Random
) -> Verdict:
    """Decide the job's next status when its attempt ends like this."""
    assert move.outcome is not None, "the end of an attempt has an outcome"
    blamed = _machine_to_blame(move)
    # True if another attempt holds its GPUs or slot. This database may not know that attempt, and it may run for days.
    code = refusals.code_of(_member_at_fault(move).get("refusal"))
    is_taken = move.failure is FailureClass.LAUNCH_FAILURE and code in refusals.TAKEN
    facts = JobFacts(
        cancel_requested=job.cancel_requested_at is not None,
        spent=job.spent,
        policy=RequestDocument.model_validate(job.request).retry_policy(),
        hopeless=_is_hopeless(session, job, move),
        same_machine=blamed is not None and _was_refused_here_before(session, attempt, blamed),
        taken=is_taken,
        steps_back=_steps_back(attempt, move),
    )
    return after_end(facts, move.outcome, move.failure, move.because, rng)


def _move_job(
    session: Session, job: Job, attempt: Attempt, owner: str, move: Move, verdict: Verdict
) -> None:
    """Write the job's next status, its retry counters and the event."""
    status_before, now = job.status, database_time(session)
    record: Mapping[str, Any] | None = _member_at_fault(move).get("exit")
    exit_code, tail = None, ""
    if record is not None:
        # As a shell reports it: 128 plus the signal's number.
        exit_code = record["code"] if record["signal"] is None else 128 + record["signal"]
        tail = record["tail"]
    job.status = verdict.status
    job.spent = dict(verdict.spent)
    job.exit_code = exit_code
    if verdict.status is JobStatus.QUEUED:
        job.not_before = max(job.not_before, now + verdict.delay)  # something else may delay it
        job.waiting_since = now
        job.blocked_reasons = None
        job.retry_count += int(verdict.counts_as_retry and move.outcome is not Outcome.VOID)
    if verdict.status is JobStatus.FAILED:
        job.failure_reason = verdict.reason
    if verdict.status in FINAL:
        job.end_time = datetime.fromtimestamp(attempt.command_ended_at or now, UTC)
    detail = {
        "exit_code": exit_code,
        "outcome": move.outcome,
        "failure_class": move.failure,
        "reason": verdict.reason,
        "charged": verdict.charged,
        "delay": round(verdict.delay, 3),
        "tail": tail,
    }
    append_event(
        session, attempt, owner, f"job.{verdict.status}",
        before={"status": status_before}, after={"status": verdict.status}, detail=detail,
    )  # fmt: skip


def _member_at_fault(move: Move) -> Mapping[str, Any]:
    """The evidence about the member that decided the end."""
    members: list[dict[str, Any]] = move.evidence.get("members") or [{}]
    rank = move.evidence.get("rank", 0)
    return next((m for m in members if m.get("rank") == rank), members[0])


# ---------------------------------------------------------------------------------------------------------------------------------------
# Broken GPUs and machines that fail launches
# ---------------------------------------------------------------------------------------------------------------------------------------


def _quarantine(session: Session, attempt: Attempt, owner: str, move: Move) -> None:
    """Quarantine the failed member's GPUs (those that the reason names, else all) until an operator has checked them.

    Output of a job is not evidence by itself, or one job could disable a whole fleet. It is only recorded as a report: an operator sees the
    event, other jobs still get the GPU, and it is quarantined once another job reports it too.
    """
    member = _member_at_fault(move)
    is_proven = bool(member.get("gpu_problems"))
    for gpu in _gpus_meant(session, attempt, member, move.because):
        if gpu.quarantine_reason is not None:
            continue
        if not is_proven and not _reported_before(session, attempt, gpu):
            report_before, now = gpu.fault_report, database_time(session)
            reporter = {"job_id": attempt.job_id, "epoch": attempt.epoch}
            gpu.fault_report = {**reporter, "at": now, "message": move.because}
            append_event(
                session, attempt, owner, events.GPU_REPORTED, vm_id=gpu.vm_id,
                before={"fault_report": report_before}, after={"fault_report": gpu.fault_report},
                detail={"index": gpu.index, "uuid": gpu.uuid},
            )  # fmt: skip
            continue
        gpu.quarantine_reason = f"{move.because} (attempt {attempt.job_id}.{attempt.epoch})"
        append_event(
            session, attempt, owner, events.GPU_QUARANTINED, vm_id=gpu.vm_id,
            before={"quarantine_reason": None}, after={"quarantine_reason": gpu.quarantine_reason},
            detail={"index": gpu.index, "uuid": gpu.uuid},
        )  # fmt: skip


def _gpus_meant(
    session: Session, attempt: Attempt, member: Mapping[str, Any], text: str
) -> Sequence[GPU]:
    """The member's GPUs that the text names by UUID, or all of them if it names none; locked."""
    gpus = session.scalars(
        select(GPU)
        .join(Reservation, Reservation.gpu_id == GPU.gpu_id)
        .where(Reservation.epoch == attempt.epoch, Reservation.rank == member.get("rank", 0))
        .order_by(GPU.gpu_id)
        .with_for_update(of=GPU)
    ).all()
    return [gpu for gpu in gpus if gpu.uuid in text] or gpus


def _reported_before(session: Session, attempt: Attempt, gpu: GPU) -> bool:
    """True if another job reported the GPU as broken within FAULT_REPORT_SECONDS."""
    report = gpu.fault_report
    if report is None or report["job_id"] == attempt.job_id:
        return False
    return report["at"] > database_time(session) - FAULT_REPORT_SECONDS


def _blame_machine(session: Session, attempt: Attempt, owner: str, move: Move) -> None:
    """Count a refused launch, and drain the machine after a few in a row. Each job counts once, since it may be the job's fault."""
    vm_id = _machine_to_blame(move)
    if vm_id is None:
        return
    vm = session.get_one(VM, vm_id, with_for_update=True, populate_existing=True)
    if _was_refused_here_before(session, attempt, vm_id):
        return
    vm.launch_failures += 1
    if vm.launch_failures >= DRAINED_AFTER and vm.drain_reason is None:
        vm.drain_reason = f"{vm.launch_failures} launches in a row failed; the last one: {_member_at_fault(move)['refusal']}"
        append_event(
            session, attempt, owner, events.VM_DRAINING, vm_id=vm_id,
            before={"reason": None}, after={"reason": vm.drain_reason},
        )  # fmt: skip


def _machine_to_blame(move: Move) -> str | None:
    """vm_id of the machine that refused the launch for a reason of its own; None if there is none."""
    culprit = _member_at_fault(move)
    refusal: str | None = culprit.get("refusal")
    if move.failure is not FailureClass.LAUNCH_FAILURE or refusal is None:
        return None
    code = refusals.code_of(refusal)
    is_not_machines_fault = code in refusals.OF_JOBS or code in refusals.OF_GPUS
    return None if is_not_machines_fault else culprit.get("vm")


def _note_gpus(session: Session, attempt: Attempt, owner: str, move: Move) -> None:
    """Record a runner's problem with its GPUs until the poller's next observation: no job is placed on them meanwhile. The rest of the
    machine stays in use."""
    culprit = _member_at_fault(move)
    refusal: str = culprit.get("refusal") or ""
    observed = refusals.OF_GPUS.get(refusals.code_of(refusal))
    if observed is None:
        return
    for gpu in _gpus_meant(session, attempt, culprit, refusal):
        if gpu.observed == Observed.OK:  # a problem that a poller saw is more precise
            note_observed(
                session, gpu, observed, refusal,
                actor=_actor(owner), job_id=attempt.job_id, epoch=attempt.epoch,
            )  # fmt: skip


def _is_hopeless(session: Session, job: Job, move: Move) -> bool:
    """True if every machine would refuse the job, also later. A program that one machine lacks may exist on another that the job can use; a
    secret or a disk of the control machine may be available again later."""
    if move.failure not in REFUSED_LAUNCH:
        return False
    code = refusals.code_of(_member_at_fault(move).get("refusal"))
    if code != UNKNOWN_PROGRAM:
        return code in refusals.FOR_GOOD
    resources = Resources.model_validate(job.resources or {})
    if resources.vm is not None or resources.named:
        return True
    tried_machines = (
        select(Member.vm_id)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .where(Attempt.job_id == job.job_id, Attempt.generation == job.generation)
    )
    is_usable = (VM.active, VM.lost_at.is_(None), VM.contact == Contact.OK)
    return (
        session.scalar(select(VM.vm_id).where(*is_usable, VM.vm_id.not_in(tried_machines)).limit(1))
        is None
    )


def _steps_back(attempt: Attempt, move: Move) -> bool:
    """True if the checkpoint to resume from is damaged in the store."""
    if move.failure is not FailureClass.NOT_PROVIDED or attempt.resume_from is None:
        return False
    return refusals.code_of(_member_at_fault(move).get("refusal")) == refusals.CHECKPOINT


def _note_damage(session: Session, attempt: Attempt, owner: str, move: Move) -> None:
    """Mark the checkpoint as damaged: no attempt resumes from it. The event records where the next one resumes."""
    checkpoint = attempt.resume_from or {}
    is_jobs = Checkpoint.job_id == attempt.job_id
    session.execute(
        update(Checkpoint)
        .where(
            is_jobs, Checkpoint.epoch == checkpoint["epoch"], Checkpoint.path == checkpoint["path"]
        )
        .values(damaged_at=database_time(session))
        .execution_options(synchronize_session=False)
    )
    undamaged_steps = select(Checkpoint.step).where(is_jobs, Checkpoint.damaged_at.is_(None))
    step = session.scalar(undamaged_steps.order_by(*NEWEST_FIRST).limit(1))
    next_start = "from the beginning" if step is None else f"from the checkpoint of step {step}"
    append_event(
        session, attempt, owner, events.JOB_CHECKPOINT_DAMAGED, before={}, after={},
        detail={
            "step": checkpoint["step"], "path": checkpoint["path"], "then": next_start, "because": move.because
        },
    )  # fmt: skip


def _was_refused_here_before(session: Session, attempt: Attempt, vm_id: str) -> bool:
    return (
        session.scalar(
            select(Attempt.epoch)
            .join(Member, Member.epoch == Attempt.epoch)
            .where(
                Attempt.job_id == attempt.job_id,
                Attempt.epoch != attempt.epoch,
                Attempt.failure_class == FailureClass.LAUNCH_FAILURE,
                Member.vm_id == vm_id,
            )
            .limit(1)
        )
        is not None
    )


# ---------------------------------------------------------------------------------------------------------------------------------------
# Releasing reservations
# ---------------------------------------------------------------------------------------------------------------------------------------


@in_steps
def release(session: Session, epoch: int, owner: str, rank: int) -> Steps:
    """Close the member's reservations: its machine was seen to hold nothing of it."""
    attempt = locked_attempt(session, epoch, owner)
    assert attempt.state == AttemptState.ENDED, "nothing of a live attempt is given back"
    member = session.get_one(Member, (epoch, rank))
    member.released = True
    yield _close_reservations(session, epoch, rank)
    _perhaps_clean(session, attempt, owner)
    requeue_pending.wake(session, vm_ids=[member.vm_id], actor=_actor(owner))


@in_steps
def abandon(session: Session, epoch: int, owner: str, rank: int) -> Steps:
    """Close the member's reservations without looking: an operator has declared its machine lost."""
    attempt = locked_attempt(session, epoch, owner)
    assert attempt.state == AttemptState.ENDED, "nothing of a live attempt is given back"
    member = session.get_one(Member, (epoch, rank), populate_existing=True)
    member.handle = {**member.handle, "abandoned": True}
    yield _close_reservations(session, epoch, rank)
    _perhaps_clean(session, attempt, owner)
    requeue_pending.wake(session, vm_ids=[member.vm_id], actor=_actor(owner))


def _close_reservations(session: Session, epoch: int, rank: int) -> Step:
    """The statement that closes the member's reservations."""
    return _CLOSED, {"of_epoch": epoch, "of_rank": rank, "now": database_time(session)}


_HELD: Table = Reservation.__table__  # pyright: ignore[reportAssignmentType] — a mapped class's table is a Table
_CLOSED = (
    update(_HELD)
    .where(
        _HELD.c.epoch == bindparam("of_epoch"),
        _HELD.c.rank == bindparam("of_rank"),
        _HELD.c.released_at.is_(None),
    )
    .values(released_at=bindparam("now"))
)


def _perhaps_clean(session: Session, attempt: Attempt, owner: str) -> None:
    """Mark the attempt as clean once all its members are released or abandoned."""
    members = members_of(session, attempt.epoch)
    if attempt.cleanup == Cleanup.CLEAN or not all(
        m.released or m.handle.get("abandoned") for m in members
    ):
        return
    cleanup_before, attempt.cleanup = attempt.cleanup, Cleanup.CLEAN
    append_event(
        session, attempt, owner, "attempt.clean",
        before={"cleanup": cleanup_before}, after={"cleanup": Cleanup.CLEAN},
    )  # fmt: skip


def _actor(owner: str) -> str:
    return f"dispatcher:{owner}"
