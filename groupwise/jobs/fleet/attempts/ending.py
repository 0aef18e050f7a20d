"""How an attempt ends, and gives back what it held: one transaction each.

`end` writes the end of the attempt, what follows for its job, what is to be done about a broken GPU or a machine that will launch nothing,
and the events of all that, together or not at all. So there is no moment at which a job has neither a live attempt nor a place to be.

What the attempt held stays reserved until its machine has been seen to hold nothing of it (`release`), or an operator has said that the
machine does not come back (`abandon`). Only an attempt that never ran anywhere gives it back at once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Table, bindparam, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts import refusals
from groupwise.jobs.fleet.attempts.decide import Move
from groupwise.jobs.fleet.attempts.records import guarded, job_of, members_of
from groupwise.jobs.fleet.queue import requeue_pending
from groupwise.jobs.fleet.queue.failures import JobFacts, RetryPolicy, Verdict, after_end
from groupwise.jobs.fleet.queue.request import Beyond
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
from groupwise.jobs.fleet.store.checkpoints import NEWEST_FIRST
from groupwise.jobs.fleet.store.database import seconds
from groupwise.jobs.fleet.store.gpus import note_observed
from groupwise.jobs.fleet.store.steps import Step, Steps, in_steps
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Checkpoint, Job, Member, Reservation
from groupwise.jobs.hosts.failures import FailureClass

ACCUSATION_SECONDS = 86_400.0
"""For so long it counts what a job said of a GPU."""
CORDONED_AFTER = 3
"""Launches in a row that a machine would not do, each of another job."""
REFUSED = frozenset({FailureClass.LAUNCH_FAILURE, FailureClass.NOT_PROVIDED})
"""It was never begun, and somebody said why."""


@in_steps
def end(session: Session, epoch: int, owner: str, move: Move, chance: random.Random) -> Steps:
    """The attempt ends, and its job goes where it has to. Done once or twice, it is the same."""
    attempt = guarded(session, epoch, owner)
    if attempt.state == AttemptState.ENDED:
        return
    job = job_of(session, attempt)
    verdict = verdict_on(session, job, attempt, move, chance)
    _end_attempt(session, attempt, owner, move, verdict)
    yield None  # its job moves after it, as the database demands
    if move.failure is FailureClass.GPU_FAULT:
        _quarantine(session, attempt, owner, move)
    if _steps_back(attempt, move):
        _note_damage(session, attempt, owner, move)
    if move.failure is FailureClass.LAUNCH_FAILURE:
        _blame_machine(session, attempt, owner, move)
        _note_gpus(session, attempt, owner, move)
        epochs.raise_above(session, [_member_at_fault(move).get("highest") or 0])
    _move_job(session, job, attempt, owner, move, verdict)
    freed: list[str] = []
    if move.outcome is Outcome.VOID:
        # It never ran, and every machine that was told of it has made sure that it never will.
        for member in members_of(session, epoch):
            member.released = True
            freed.append(member.vm_id)
            yield _closed(session, epoch, member.rank)
        _perhaps_clean(session, attempt, owner)
    requeue_pending.wake(session, vm_ids=freed, actor=_actor(owner))


def verdict_on(
    session: Session, job: Job, attempt: Attempt, move: Move, chance: random.Random
) -> Verdict:
    """What follows for the job from such an end."""
    assert move.outcome is not None, "the end of an attempt has an outcome"
    blamed = _machine_to_blame(move)
    facts = JobFacts(
        cancel_requested=job.cancel_requested_at is not None,
        spent=job.spent,
        policy=_policy(job.request),
        hopeless=_is_hopeless(session, job, move),
        same_machine=blamed is not None and _was_refused_here_before(session, attempt, blamed),
        taken=_is_taken(move),
        steps_back=_steps_back(attempt, move),
    )
    return after_end(facts, move.outcome, move.failure, move.because, chance)


def _policy(request: Mapping[str, Any]) -> RetryPolicy:
    return Beyond.model_validate(request).retry_policy()


def _end_attempt(
    session: Session, attempt: Attempt, owner: str, move: Move, verdict: Verdict
) -> None:
    before = attempt.state
    attempt.outcome = move.outcome
    attempt.failure_class = move.failure
    attempt.charged = verdict.charged if move.failure else None
    attempt.evidence = {**attempt.evidence, **move.evidence}
    attempt.ended_at = seconds(session)
    attempt.state = AttemptState.ENDED
    after = {"state": AttemptState.ENDED, "outcome": move.outcome, "failure_class": move.failure}
    _tell(
        session, attempt, owner, events.ATTEMPT_ENDED, before={"state": before}, after=after,
        detail={"because": move.because},
    )  # fmt: skip


def _move_job(
    session: Session, job: Job, attempt: Attempt, owner: str, move: Move, verdict: Verdict
) -> None:
    before, now = job.status, seconds(session)
    exit_code = _exit_code(move)
    job.status = verdict.status
    job.spent = dict(verdict.spent)
    job.exit_code = exit_code
    if verdict.status is JobStatus.QUEUED:
        job.not_before = max(job.not_before, now + verdict.delay)  # something else may hold it back
        job.waiting_since = now
        job.blocked_reasons = None
        job.retry_count += int(verdict.counts_as_retry and move.outcome is not Outcome.VOID)
    if verdict.status is JobStatus.FAILED:
        job.failure_reason = verdict.reason
    if verdict.status in FINAL:
        job.end_time = datetime.fromtimestamp(now, UTC)
    detail = {
        "exit_code": exit_code,
        "outcome": move.outcome,
        "failure_class": move.failure,
        "reason": verdict.reason,
        "charged": verdict.charged,
        "delay": round(verdict.delay, 3),
        "tail": _tail(move),
    }
    _tell(
        session, attempt, owner, f"job.{verdict.status}",
        before={"status": before}, after={"status": verdict.status}, detail=detail,
    )  # fmt: skip


def _member_at_fault(move: Move) -> Mapping[str, Any]:
    members: list[dict[str, Any]] = move.evidence.get("members") or [{}]
    rank = move.evidence.get("rank", 0)
    return next((m for m in members if m.get("rank") == rank), members[0])


def _exit_code(move: Move) -> int | None:
    """As a shell would say it."""
    record = _member_at_fault(move).get("exit")
    if record is None:
        return None
    return 128 + record["signal"] if record["signal"] is not None else record["code"]


def _tail(move: Move) -> str:
    record: Mapping[str, Any] | None = _member_at_fault(move).get("exit")
    return "" if record is None else record["tail"]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Broken GPUs and machines that launch nothing
# ---------------------------------------------------------------------------------------------------------------------------------------


def _quarantine(session: Session, attempt: Attempt, owner: str, move: Move) -> None:
    """The GPUs of the member that failed get no job until an operator has looked; those that the evidence names, if it names any.

    What a job printed is no evidence by itself, or one job could empty a fleet: it accuses the GPU, and counts once another job does too.
    """
    member = _member_at_fault(move)
    proven = bool(member.get("gpu_problems"))
    for gpu in _gpus_meant(session, attempt, member, move.because):
        if gpu.quarantined is not None:
            continue
        if not proven and not _accused_before(session, attempt, gpu):
            _accuse(session, attempt, owner, move, gpu)
            continue
        gpu.quarantined = f"{move.because} (attempt {attempt.job_id}.{attempt.epoch})"
        _tell(
            session, attempt, owner, "gpu.quarantined", vm_id=gpu.vm_id,
            before={"quarantined": None}, after={"quarantined": gpu.quarantined},
            detail={"index": gpu.index, "uuid": gpu.uuid},
        )  # fmt: skip


def _gpus_meant(
    session: Session, attempt: Attempt, member: Mapping[str, Any], text: str
) -> Sequence[GPU]:
    """Of those that a member holds, the ones that a text names, locked; all of them where it names none."""
    gpus = session.scalars(
        select(GPU)
        .join(Reservation, Reservation.gpu_id == GPU.gpu_id)
        .where(Reservation.epoch == attempt.epoch, Reservation.rank == member.get("rank", 0))
        .order_by(GPU.gpu_id)
        .with_for_update(of=GPU)
    ).all()
    return [gpu for gpu in gpus if gpu.uuid in text] or gpus


def _accused_before(session: Session, attempt: Attempt, gpu: GPU) -> bool:
    """Whether another job has said the same of it, of late."""
    found = gpu.accused
    if found is None or found["job_id"] == attempt.job_id:
        return False
    return found["at"] > seconds(session) - ACCUSATION_SECONDS


def _accuse(session: Session, attempt: Attempt, owner: str, move: Move, gpu: GPU) -> None:
    """An operator is told what was said of it; other jobs still get it."""
    before, now = gpu.accused, seconds(session)
    by = {"job_id": attempt.job_id, "epoch": attempt.epoch}
    gpu.accused = {**by, "at": now, "said": move.because}
    _tell(
        session, attempt, owner, events.GPU_ACCUSED, vm_id=gpu.vm_id,
        before={"accused": before}, after={"accused": gpu.accused},
        detail={"index": gpu.index, "uuid": gpu.uuid},
    )  # fmt: skip


def _blame_machine(session: Session, attempt: Attempt, owner: str, move: Move) -> None:
    """A machine that will not launch is counted out after a few in a row. One job counts once: it may be the job's fault."""
    vm_id = _machine_to_blame(move)
    if vm_id is None:
        return
    vm = session.get_one(VM, vm_id, with_for_update=True, populate_existing=True)
    if _was_refused_here_before(session, attempt, vm_id):
        return
    vm.launch_failures += 1
    if vm.launch_failures >= CORDONED_AFTER and vm.cordoned is None:
        vm.cordoned = f"{vm.launch_failures} launches in a row failed; the last one: {_member_at_fault(move)['refusal']}"
        _tell(
            session, attempt, owner, "vm.cordoned", vm_id=vm_id,
            before={"cordoned": None}, after={"cordoned": vm.cordoned},
        )  # fmt: skip


def _machine_to_blame(move: Move) -> str | None:
    """The one that would not start it, for a reason of its own."""
    culprit = _member_at_fault(move)
    refusal: str | None = culprit.get("refusal")
    if move.failure is not FailureClass.LAUNCH_FAILURE or refusal is None:
        return None
    word = refusals.code_of(refusal)
    elsewhere = word in refusals.OF_JOBS or word in refusals.OF_GPUS
    return None if elsewhere else culprit.get("vm")


def _note_gpus(session: Session, attempt: Attempt, owner: str, move: Move) -> None:
    """What a runner saw of GPUs counts until the poller's next look: nobody else is sent there meanwhile, and the rest of the machine is as
    good as before."""
    culprit = _member_at_fault(move)
    refusal: str = culprit.get("refusal") or ""
    observed = refusals.OF_GPUS.get(refusals.code_of(refusal))
    if observed is None:
        return
    for gpu in _gpus_meant(session, attempt, culprit, refusal):
        if gpu.observed == Observed.OK:  # what a poller saw says more
            note_observed(
                session, gpu, observed, refusal,
                actor=_actor(owner), job_id=attempt.job_id, epoch=attempt.epoch,
            )  # fmt: skip


def _is_hopeless(session: Session, job: Job, move: Move) -> bool:
    """It would be refused everywhere, and later too. A program that one machine lacks may be on another, if there is one that it may go to;
    a secret, or a disk of the control machine, may be there again later."""
    if move.failure not in REFUSED:
        return False
    word = refusals.code_of(_member_at_fault(move).get("refusal"))
    if word != "unknown_program":
        return word in refusals.FOR_GOOD
    wanted = Resources.model_validate(job.resources or {})
    if wanted.vm is not None or wanted.named:
        return True
    tried = (
        select(Member.vm_id)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .where(Attempt.job_id == job.job_id, Attempt.generation == job.generation)
    )
    usable = (VM.active, VM.lost_at.is_(None), VM.contact == Contact.OK)
    return session.scalar(select(VM.vm_id).where(*usable, VM.vm_id.not_in(tried)).limit(1)) is None


def _is_taken(move: Move) -> bool:
    """What it was to have is another attempt's, of which this database may know nothing, and which may run for days."""
    word = refusals.code_of(_member_at_fault(move).get("refusal"))
    return move.failure is FailureClass.LAUNCH_FAILURE and word in refusals.TAKEN


def _steps_back(attempt: Attempt, move: Move) -> bool:
    """The checkpoint that it was to go on from is damaged here."""
    if move.failure is not FailureClass.NOT_PROVIDED or attempt.resume_from is None:
        return False
    return refusals.code_of(_member_at_fault(move).get("refusal")) == refusals.CHECKPOINT


def _note_damage(session: Session, attempt: Attempt, owner: str, move: Move) -> None:
    """No attempt goes on from that checkpoint any more; and it is said what the next one goes on from."""
    damaged = attempt.resume_from or {}
    of_job = Checkpoint.job_id == attempt.job_id
    session.execute(
        update(Checkpoint)
        .where(of_job, Checkpoint.epoch == damaged["epoch"], Checkpoint.path == damaged["path"])
        .values(damaged_at=seconds(session))
        .execution_options(synchronize_session=False)
    )
    whole = select(Checkpoint.step).where(of_job, Checkpoint.damaged_at.is_(None))
    step = session.scalar(whole.order_by(*NEWEST_FIRST).limit(1))
    then = "from the beginning" if step is None else f"from the checkpoint of step {step}"
    _tell(
        session, attempt, owner, events.JOB_CHECKPOINT_DAMAGED, before={}, after={},
        detail={
            "step": damaged["step"], "path": damaged["path"], "then": then, "because": move.because
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
# Giving back
# ---------------------------------------------------------------------------------------------------------------------------------------


@in_steps
def release(session: Session, epoch: int, owner: str, rank: int) -> Steps:
    """Its machine was seen to hold nothing of this member: what was reserved for it is free."""
    attempt = guarded(session, epoch, owner)
    assert attempt.state == AttemptState.ENDED, "nothing of a live attempt is given back"
    member = session.get_one(Member, (epoch, rank))
    member.released = True
    yield _closed(session, epoch, rank)
    _perhaps_clean(session, attempt, owner)
    requeue_pending.wake(session, vm_ids=[member.vm_id], actor=_actor(owner))


@in_steps
def abandon(session: Session, epoch: int, owner: str, rank: int) -> Steps:
    """The machine of this member does not come back, an operator says: what was reserved there holds nobody up."""
    attempt = guarded(session, epoch, owner)
    assert attempt.state == AttemptState.ENDED, "nothing of a live attempt is given back"
    member = session.get_one(Member, (epoch, rank), populate_existing=True)
    member.handle = {**member.handle, "abandoned": True}
    yield _closed(session, epoch, rank)
    _perhaps_clean(session, attempt, owner)
    requeue_pending.wake(session, vm_ids=[member.vm_id], actor=_actor(owner))


def _closed(session: Session, epoch: int, rank: int) -> Step:
    """What it held is free."""
    return _CLOSED, {"of_epoch": epoch, "of_rank": rank, "now": seconds(session)}


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
    members = members_of(session, attempt.epoch)
    if all(m.released or m.handle.get("abandoned") for m in members):
        _clean(session, attempt, owner)


def _clean(session: Session, attempt: Attempt, owner: str) -> None:
    if attempt.cleanup == Cleanup.CLEAN:
        return
    before, attempt.cleanup = attempt.cleanup, Cleanup.CLEAN
    _tell(
        session, attempt, owner, "attempt.clean",
        before={"cleanup": before}, after={"cleanup": Cleanup.CLEAN},
    )  # fmt: skip


def _actor(owner: str) -> str:
    return f"dispatcher:{owner}"


def _tell(
    session: Session,
    attempt: Attempt,
    owner: str,
    kind: str,
    *,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    vm_id: str | None = None,
    detail: Mapping[str, Any] | None = None,
) -> None:
    events.append(
        session, actor=_actor(owner), kind=kind, job_id=attempt.job_id,
        epoch=attempt.epoch, vm_id=vm_id, before=before, after=after, detail=detail,
    )  # fmt: skip
