"""Decides the next step of one attempt: a pure function of its known state, and the table of an attempt's life.

The owner of an attempt reads its row and its machines' reports (`controller.py`), calls `decide`, performs the effects and calls it again.
All state between two calls is in the database and on the machines, so another dispatcher can continue from the same evidence.

    reserved     nothing sent             launching is written before anything is sent; ended(void) if it is no longer wanted
    launching    folder absent            launch, with the same epoch; void instead if it is to be given up
                 files are missing        send them; no member of a gang starts before all machines have their files
                 queued by an engine      wait without limit; launch again if the engine does not have it
                 all members have started running
                 a member refused         kill members that have started, make the others void; then ended(void), with the member at fault
    running      all have an exit record  collecting
                 one failed, or cancel    kill the others; then as their exit records say
                 rebooted, lost, gone     ended(reboot, supervisor_lost, host_lost) once none of it runs anywhere
    collecting   log and artefacts whole  ended(succeeded, a failure class, cancelled)
    ended        cleanup not clean        ask the machine until it holds nothing of it; then close the reservations

Three things are never taken for evidence that an attempt is over: silence, an error after a request was sent, and a folder that is absent.
A silent machine is waited for until it answers, or an operator declares it lost, or its deadman must have ended the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from groupwise.jobs.fleet.attempts import refusals
from groupwise.jobs.fleet.states import AttemptState, Cleanup, Outcome
from groupwise.jobs.hosts.answers import ExitReason, ExitRecord
from groupwise.jobs.hosts.failures import FailureClass, classify, has_succeeded

DEADMAN_MARGIN = 60.0
"""Seconds beyond its timeout after which a runner's deadman has ended a job for certain: its clock started before ours."""


class ObservedState(StrEnum):
    """The state of a member of an attempt, as it was last read from the machine: that of a `MemberState`, or unknown."""

    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"
    """Not asked yet, or no answer came: it may be in any state."""
    ABSENT = "absent"
    QUEUED = "queued"
    """Its files are prepared there; an engine will start it at some time."""
    CLAIMED = "claimed"
    """Its supervisor is alive; the command has not started."""
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"
    """Its supervisor is gone without an exit record; the command may still run."""
    REBOOTED = "rebooted"
    VOIDED = "voided"
    REFUSED = "refused"


SILENT = frozenset({ObservedState.UNREACHABLE, ObservedState.UNKNOWN})
BEGUN = frozenset(
    {ObservedState.RUNNING, ObservedState.EXITED, ObservedState.LOST, ObservedState.REBOOTED}
)
NEVER = frozenset({ObservedState.VOIDED, ObservedState.REFUSED})
"""It never ran there, and never will."""
_MAY_GO_ON = SILENT | {ObservedState.CLAIMED, ObservedState.RUNNING}


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member of an attempt, and its machine."""

    rank: int
    vm_id: str
    reading: ObservedState
    exit: ExitRecord | None = None
    """The exit record, read now or earlier."""
    ended: float | None = None
    """When it exited, by a clock that all members share; None: unknown."""
    refusal: str | None = None
    """`code: message` of a runner's refusal, or why the launch request could not be made."""
    highest: int | None = None
    """The highest epoch of the job that its machine has seen, with a refusal `lower_epoch`."""
    provided: bool = True
    """Its machine has the attempt's files, as far as is known; if some are missing, the launch request fails and this becomes False."""
    given: bool = True
    """Its engine has it, as far as is known; False: its files were prepared, but submitting it was cut off."""
    engine_says: str = ""
    """The last message of its engine about it."""
    rejected: bool = False
    """The launch was refused before the runner claimed anything, so the folder is absent and no further launch request will help."""
    lost: bool = False
    """An operator has declared the machine lost."""
    deadman_over: bool = False
    """It has been silent for longer than the deadman timeout and the margin."""
    drained: bool = False
    """No new attempt may start there."""
    collected: bool = False
    """Log and artefacts are on the control side, or are known to be unobtainable."""
    collection_problem: str | None = None
    """Why the artefacts are incomplete."""
    left_out: int = 0
    """Number of links, devices and the like among them, which are never fetched."""
    quiet: bool | None = None
    """True if its machine was seen to run none of its processes any more; None: not checked."""
    released: bool = False
    """Its machine was seen to hold nothing of it."""
    abandoned: bool = False
    """Its reservations were closed without looking, because its machine was declared lost."""
    gpu_problems: tuple[str, ...] = ()
    """Problems that its machine reports about the GPUs that it holds."""

    @property
    def is_gone(self) -> bool:
        """True if nothing more will be heard of it. A machine that answers is not gone, even if it was declared lost."""
        return (self.lost or self.deadman_over) and self.reading in SILENT


@dataclass(frozen=True, slots=True)
class AttemptView:
    """All inputs of a decision."""

    job_id: str
    epoch: int
    state: AttemptState
    members: tuple[MemberView, ...]
    cancel_requested: bool = False
    cleanup: Cleanup = Cleanup.PENDING


@dataclass(frozen=True)
class _OnMember:
    """An effect on the part of the attempt that runs on one machine."""

    rank: int


class Provide(_OnMember):
    """Send the attempt's files there, for as long as this effect is returned; safe to repeat."""


class Launch(_OnMember):
    """Launch the attempt there; safe to repeat."""


class Void(_OnMember):
    """Ensure that it never starts there."""


class Kill(_OnMember):
    """TERM, grace period, KILL for all processes there that carry the mark of this attempt."""


class Collect(_OnMember):
    """Fetch the rest of its log, its artefacts and its newest checkpoint."""


class CheckRelease(_OnMember):
    """Ask whether its machine still runs or holds anything of it."""


class Abandon(_OnMember):
    """Close its reservations without looking: an operator has declared its machine lost."""


@dataclass(frozen=True, slots=True)
class Move:
    """Write the next state. `ended` carries outcome, class and evidence, and the job moves in the same transaction."""

    to: AttemptState
    outcome: Outcome | None = None
    failure: FailureClass | None = None
    because: str = ""
    """The reason as a message."""
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])


Effect = Provide | Launch | Void | Kill | Collect | CheckRelease | Abandon | Move


def decide(view: AttemptView) -> tuple[Effect, ...]:
    """Decide which effects to perform now. None of them means: wait until something changes."""
    assert view.members, (
        f"attempt {view.job_id}.{view.epoch} has no members, so its machine is unknown"
    )
    match view.state:
        case AttemptState.RESERVED:
            return _decide_reserved(view)
        case AttemptState.LAUNCHING:
            return _decide_launching(view)
        case AttemptState.RUNNING:
            return _decide_running(view)
        case AttemptState.COLLECTING:
            return _decide_collecting(view)
        case AttemptState.ENDED:
            effects: list[Effect] = []
            for member in view.members:
                if not member.released:
                    effects.extend(_release_effects(member))
            return tuple(effects)


def over(view: AttemptView) -> bool:
    """True once nothing is left to do about the attempt."""
    return view.state is AttemptState.ENDED and view.cleanup is Cleanup.CLEAN


# ---------------------------------------------------------------------------------------------------------------------------------------
# One function for each state
# ---------------------------------------------------------------------------------------------------------------------------------------


def _decide_reserved(view: AttemptView) -> tuple[Effect, ...]:
    if view.cancel_requested:
        return (_end_move(view, Outcome.VOID, because="cancelled before anything was sent"),)
    if unfit := [m.vm_id for m in view.members if m.lost or m.drained]:
        return (_end_move(view, Outcome.VOID, because=f"nothing new begins on {', '.join(unfit)}"),)
    return (Move(AttemptState.LAUNCHING),)


def _decide_launching(view: AttemptView) -> tuple[Effect, ...]:
    if all(m.reading in BEGUN for m in view.members):
        return (Move(AttemptState.RUNNING),)
    end = _launch_given_up(view)
    if end is not None:
        return _once_stopped(view, end)
    # Launch once all members have their files: a member that starts long before another gives up waiting for it.
    to_begin = [m for m in view.members if m.reading in SILENT or m.reading is ObservedState.ABSENT]
    absent = [m for m in to_begin if m.reading is ObservedState.ABSENT]
    if all(m.provided for m in to_begin):
        cut_off = [m for m in view.members if m.reading is ObservedState.QUEUED and not m.given]
        return tuple(Launch(m.rank) for m in (*absent, *cut_off))
    return tuple(Provide(m.rank) for m in absent if not m.provided)


def _launch_given_up(view: AttemptView) -> Move | None:
    """The end of an attempt whose launch must not continue; None: it continues."""
    has_run = any(m.reading in BEGUN for m in view.members)
    if gone_members := [m for m in view.members if m.is_gone]:
        return _end_move(
            view, Outcome.FAILED, FailureClass.HOST_LOST, _gone_reason(gone_members[0])
        )
    if view.cancel_requested:
        outcome = Outcome.CANCELLED if has_run else Outcome.VOID
        return _end_move(view, outcome, because="cancelled while it was being launched")
    if lost_members := [m for m in view.members if m.lost and m.reading not in BEGUN]:
        outcome = Outcome.FAILED if has_run else Outcome.VOID
        failure = FailureClass.HOST_LOST if has_run else None
        return _end_move(view, outcome, failure, _gone_reason(lost_members[0]))
    if refusing_members := [
        m for m in view.members if m.reading is ObservedState.REFUSED or m.rejected
    ]:
        outcome = Outcome.FAILED if has_run else Outcome.VOID
        return _end_move(
            view, outcome, *_refusal_cause(refusing_members[0]), culprit=refusing_members[0]
        )
    if voided_members := [m for m in view.members if m.reading is ObservedState.VOIDED]:
        if engine_reason := refusals.of_engine(voided_members[0].refusal):
            return _end_move(
                view,
                Outcome.VOID,
                FailureClass.PREEMPTION,
                engine_reason,
                culprit=voided_members[0],
            )
        outcome = Outcome.FAILED if has_run else Outcome.VOID
        failure = FailureClass.LAUNCH_FAILURE if has_run else None
        return _end_move(
            view, outcome, failure, f"it had been made void on {voided_members[0].vm_id}"
        )
    return None


def _refusal_cause(member: MemberView) -> tuple[FailureClass, str]:
    """Failure class and reason of a refused launch. A machine is named only for its own refusals."""
    if refusals.code_of(member.refusal) in refusals.OURS:
        message = refusals.message_of(member.refusal)
        because = f"the control machine cannot give what the job needs: {message}"
        return FailureClass.NOT_PROVIDED, because
    because = f"{member.vm_id} would not start it: {member.refusal}"
    return FailureClass.LAUNCH_FAILURE, because


def _decide_running(view: AttemptView) -> tuple[Effect, ...]:
    if all(m.reading is ObservedState.EXITED for m in view.members):
        return (Move(AttemptState.COLLECTING),)
    if not view.cancel_requested and not any(_has_failed(m) for m in view.members):
        return ()
    return _once_stopped(view, _lost_while_running)


def _has_failed(member: MemberView) -> bool:
    """True if the member cannot continue, which ends the gang; a member that has succeeded does not end it."""
    if member.reading is ObservedState.EXITED:
        return member.exit is None or not has_succeeded(member.exit)
    return member.lost or member.is_gone or member.reading not in _MAY_GO_ON


def _lost_while_running(view: AttemptView) -> Move:
    """The end of an attempt that ran but has members without an exit record."""
    unexited_members = [m for m in view.members if m.reading is not ObservedState.EXITED]
    gone_members = [m for m in unexited_members if m.is_gone]
    rebooted_members = [m for m in unexited_members if m.reading is ObservedState.REBOOTED]
    if gone_members:
        failure, member = FailureClass.HOST_LOST, gone_members[0]
    elif rebooted_members:
        failure, member = FailureClass.REBOOT, rebooted_members[0]
    else:
        failure, member = FailureClass.SUPERVISOR_LOST, unexited_members[0]
    if member.is_gone:
        reason = _gone_reason(member)
    elif member.reading is ObservedState.REBOOTED:
        reason = f"{member.vm_id} has booted since"
    elif member.reading is ObservedState.LOST and member.engine_says:
        reason = f"what watched over it is silent, and {member.engine_says}"
    elif member.reading is ObservedState.LOST:
        reason = f"its supervisor on {member.vm_id} was killed"
    else:
        reason = f"its folder on {member.vm_id} has vanished"
    return _end_move(view, Outcome.FAILED, failure, reason)


def _decide_collecting(view: AttemptView) -> tuple[Effect, ...]:
    if uncollected_members := [m for m in view.members if not m.collected and not m.is_gone]:
        return tuple(Collect(m.rank) for m in uncollected_members if m.reading not in SILENT)
    end = _final_move(view)
    if end.outcome is Outcome.CANCELLED:
        return _once_stopped(view, end)
    return (end,)


def _release_effects(member: MemberView) -> tuple[Effect, ...]:
    """Steps until the member can be released. A lost machine may come back with the attempt: kill or void it there before releasing."""
    match member.reading:
        case ObservedState.UNREACHABLE | ObservedState.UNKNOWN:
            return (Abandon(member.rank),) if member.lost and not member.abandoned else ()
        case ObservedState.ABSENT | ObservedState.QUEUED:
            return (Void(member.rank),)
        case ObservedState.CLAIMED | ObservedState.RUNNING:
            return (Kill(member.rank),)
        case ObservedState.LOST:
            return (Kill(member.rank), CheckRelease(member.rank))
        case ObservedState.VOIDED if member.quiet is False:  # its folder was removed while it ran
            return (Kill(member.rank), CheckRelease(member.rank))
        case _:
            return (CheckRelease(member.rank),)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Stopping all members before the attempt ends
# ---------------------------------------------------------------------------------------------------------------------------------------


def _once_stopped(
    view: AttemptView, end: Move | Callable[[AttemptView], Move]
) -> tuple[Effect, ...]:
    """The end, if the attempt runs on no machine; otherwise the effects that stop it there."""
    running = [m for m in view.members if not _is_stopped(view, m)]
    if running:
        return tuple(effect for m in running for effect in _stop_effects(m))
    return (end if isinstance(end, Move) else end(view),)


def _is_stopped(view: AttemptView, member: MemberView) -> bool:
    """True if it is proved that the member does not run there, and never will.

    An exit record proves that the command has ended, but before a cancellation is acknowledged its child processes must be gone too. A
    folder that has disappeared, or says `voided` after the attempt had started, proves nothing about processes.
    """
    if member.is_gone or member.reading is ObservedState.REBOOTED:
        return True
    if member.reading is ObservedState.EXITED:
        return not view.cancel_requested or member.quiet is True
    if member.reading in NEVER:
        return view.state is AttemptState.LAUNCHING or member.quiet is True
    return member.reading is ObservedState.LOST and member.quiet is True


def _stop_effects(member: MemberView) -> tuple[Effect, ...]:
    match member.reading:
        case ObservedState.UNREACHABLE | ObservedState.UNKNOWN:
            return ()
        case ObservedState.ABSENT | ObservedState.QUEUED:
            return (Void(member.rank),)
        case ObservedState.CLAIMED | ObservedState.RUNNING:
            return (Kill(member.rank),)
        case ObservedState.LOST:
            return (Kill(member.rank), CheckRelease(member.rank))
        case _ if member.quiet is False:
            return (Kill(member.rank), CheckRelease(member.rank))
        case _:
            return (CheckRelease(member.rank),)


# ---------------------------------------------------------------------------------------------------------------------------------------
# How it ended
# ---------------------------------------------------------------------------------------------------------------------------------------


def _final_move(view: AttemptView) -> Move:
    """The end of an attempt whose members all left an exit record."""
    failed_members = [m for m in view.members if m.exit is None or not has_succeeded(m.exit)]
    if not failed_members:
        if unfetched_members := [m for m in view.members if not m.collected]:
            because = f"it succeeded, but {unfetched_members[0].vm_id} was lost before its artefacts were fetched"
            return _end_move(view, Outcome.FAILED, FailureClass.HOST_LOST, because)
        if problem_members := [m for m in view.members if m.collection_problem]:
            because = str(problem_members[0].collection_problem)
            return _end_move(view, Outcome.FAILED, FailureClass.ARTEFACTS, because)
        return _end_move(view, Outcome.SUCCEEDED, because="exit code 0")
    cause = min(failed_members, key=_cause_order)
    if cause.exit is None:
        return _end_move(
            view, Outcome.FAILED, FailureClass.SUPERVISOR_LOST, "it left no exit record"
        )
    if view.cancel_requested and cause.exit.reason is ExitReason.CANCELLED:
        return _end_move(view, Outcome.CANCELLED, because="cancelled")
    if cause.exit.reason is ExitReason.CANCELLED and (
        lost_members := [m for m in view.members if m.lost]
    ):
        return _end_move(
            view, Outcome.FAILED, FailureClass.HOST_LOST, _gone_reason(lost_members[0])
        )
    classified = classify(cause.exit, gpu_problems=cause.gpu_problems)
    return _end_move(view, Outcome.FAILED, classified.failure, classified.because, culprit=cause)


def _cause_order(member: MemberView) -> tuple[bool, float, int]:
    """Sort key: the first member to fail by itself is the cause; those killed because of it are not. Machines' clocks are not compared."""
    record = member.exit
    killed = record is not None and record.reason is ExitReason.CANCELLED
    return killed, member.ended or 0.0, member.rank


def _end_move(
    view: AttemptView,
    outcome: Outcome,
    failure: FailureClass | None = None,
    because: str = "",
    culprit: MemberView | None = None,
) -> Move:
    evidence: dict[str, Any] = {
        "because": because,
        "members": [_member_evidence(m) for m in view.members],
    }
    if culprit or failure:
        evidence["rank"] = (culprit or _member_at_fault(view.members)).rank
    return Move(AttemptState.ENDED, outcome, failure, because, evidence)


def _member_at_fault(members: Sequence[MemberView]) -> MemberView:
    """The member that caused the failure; rank 0 if that is unknown."""
    for member in members:
        if (
            member.is_gone
            or member.rejected
            or member.reading in {ObservedState.REFUSED, ObservedState.LOST}
        ):
            return member
    return members[0]


def _member_evidence(member: MemberView) -> dict[str, Any]:
    evidence: dict[str, Any] = {
        "rank": member.rank,
        "vm": member.vm_id,
        "reading": str(member.reading),
    }
    if member.refusal:
        evidence["refusal"] = member.refusal
    if member.highest is not None:
        evidence["highest"] = member.highest
    if member.lost:
        evidence["vm_lost"] = True
    if member.deadman_over:
        evidence["deadman_over"] = True
    if member.left_out:
        evidence["left_out"] = member.left_out
    if member.gpu_problems:
        evidence["gpu_problems"] = list(member.gpu_problems)
    if member.exit:
        evidence["exit"] = {
            "code": member.exit.code,
            "signal": member.exit.signal,
            "reason": str(member.exit.reason),
            "oom_kill": member.exit.oom_kill,
            "leftovers": member.exit.leftovers,
            "seconds": member.exit.seconds,
            "tail": member.exit.tail[-2000:],
        }
    return evidence


def _gone_reason(member: MemberView) -> str:
    if member.lost:
        return f"{member.vm_id} was declared lost"
    return f"{member.vm_id} was silent for longer than its deadman"


# ---------------------------------------------------------------------------------------------------------------------------------------
# Attempts on a machine without a controller
# ---------------------------------------------------------------------------------------------------------------------------------------


class OrphanAction(StrEnum):
    """What to do about an attempt that a machine reports and for which no controller runs here."""

    LEAVE = "leave"
    """It is live, or over on the machine too."""
    KILL = "kill"
    REPORT = "report"
    """Recorded and shown; it may belong to another control plane, or to this one before its database was restored to an older state."""


@dataclass(frozen=True, slots=True)
class JobEpochs:
    """The epochs that the database has of a job that a machine reports."""

    live_epoch: int | None
    """The epoch of its live attempt, if there is one with a member on this machine."""
    highest_epoch: int


def orphan_action(
    epoch: int, reading: ObservedState, known: JobEpochs | None, survivors: int = 0
) -> OrphanAction:
    """The action for an attempt on a machine; `known` is None if the job is in no table. `survivors`: its processes without a
    supervisor. Its controller handles those; without a controller they count like any other process."""
    runs = reading in {ObservedState.QUEUED, ObservedState.CLAIMED, ObservedState.RUNNING}
    if not runs and not survivors:
        return OrphanAction.LEAVE
    if known is None or epoch > known.highest_epoch:
        return OrphanAction.REPORT
    if epoch == known.live_epoch or not runs:
        return OrphanAction.LEAVE
    return OrphanAction.KILL
