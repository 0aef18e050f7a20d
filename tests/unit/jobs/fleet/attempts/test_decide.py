"""Every line of the tables of an attempt's life, and of what a dispatcher finds after a crash.

What must hold, and stands here line by line:

 1. Nothing is sent before `launching` is written.
 2. Silence, an error after sending and an absent folder end no attempt.
 3. An attempt ends only when nothing of it runs or can begin: void acknowledged, exit record, reboot, a clean look, or an operator.
 4. Exit code 0 wins against a late cancellation; a cancellation is acknowledged when no process is left.
 5. A gang begins whole or not at all, and ends whole.
 6. What an attempt held is given back only after its machine was seen to hold nothing of it.
 7. Where it runs is known: without members nothing is decided.
"""

import pytest

from groupwise.jobs.fleet.attempts import refusals
from groupwise.jobs.fleet.attempts.decide import (
    Abandon,
    AttemptView,
    CheckRelease,
    Collect,
    Effect,
    JobEpochs,
    Kill,
    Launch,
    MemberView,
    Move,
    ObservedState,
    OrphanAction,
    Provide,
    Void,
    decide,
    orphan_action,
    over,
)
from groupwise.jobs.fleet.states import AttemptState, Cleanup, Outcome
from groupwise.jobs.hosts.answers import ExitReason, ExitRecord
from groupwise.jobs.hosts.failures import FailureClass

RESERVED, LAUNCHING = AttemptState.RESERVED, AttemptState.LAUNCHING
RUNNING, COLLECTING, ENDED = AttemptState.RUNNING, AttemptState.COLLECTING, AttemptState.ENDED
SILENCE = (ObservedState.UNREACHABLE, ObservedState.UNKNOWN)


def exited(
    code: int | None = 0,
    reason: ExitReason = ExitReason.EXITED,
    signal: int | None = None,
    finished_at: float = 1.0,
    tail: str = "",
    oom_kill: int = 0,
) -> ExitRecord:
    return ExitRecord(
        code=code, signal=signal, reason=reason, oom_kill=oom_kill, seconds=1.0,
        finished_at=finished_at, tail=tail,
    )  # fmt: skip


BY_US = ExitReason.CANCELLED
KILLED = exited(None, BY_US, 15)


def member(reading: ObservedState, rank: int = 0, **facts: object) -> MemberView:
    record = exited() if reading is ObservedState.EXITED else None
    return MemberView(rank, f"vm-{rank}", reading, **({"exit": record} | facts))  # pyright: ignore[reportArgumentType]


def view(state: AttemptState, *members: MemberView, cancel: bool = False) -> AttemptView:
    return AttemptView("job-1", 7, state, members, cancel_requested=cancel)


def the_end(effects: tuple[Effect, ...]) -> tuple[Outcome | None, FailureClass | None]:
    assert len(effects) == 1
    (move,) = effects
    assert isinstance(move, Move)
    assert move.to is ENDED
    assert move.because
    return move.outcome, move.failure


VOID = (Outcome.VOID, None)
REFUSED_VOID = (Outcome.VOID, FailureClass.LAUNCH_FAILURE)
CANCELLED = (Outcome.CANCELLED, None)
SUCCEEDED = (Outcome.SUCCEEDED, None)


def failed(failure: FailureClass) -> tuple[Outcome, FailureClass]:
    return Outcome.FAILED, failure


HOST_LOST = failed(FailureClass.HOST_LOST)


def case(*members: MemberView, cancel: bool = False) -> tuple[tuple[MemberView, ...], bool]:
    return members, cancel


def lost(
    reading: ObservedState = ObservedState.UNREACHABLE, rank: int = 0, **facts: object
) -> MemberView:
    return member(reading, rank, lost=True, **facts)


@pytest.mark.parametrize("state", AttemptState)
def test_nothing_is_decided_about_an_attempt_without_members(state: AttemptState) -> None:
    """All of none have begun, and ended well: it would be a success that nobody has seen."""
    with pytest.raises(AssertionError, match=r"job-1\.7"):
        decide(view(state))


TURNED_DOWN = {"rejected": True, "refusal": "disk_full: no space"}
NO_RAM = member(ObservedState.REFUSED, 1, refusal="ram: too little")
LEFT_BEHIND = (Kill(0), CheckRelease(0))

LAUNCHES = {
    # one machine
    case(member(ObservedState.ABSENT)): (Launch(0),),
    case(member(ObservedState.ABSENT, provided=False)): (Provide(0),),
    case(member(ObservedState.ABSENT, **TURNED_DOWN)): (Void(0),),
    case(member(ObservedState.UNREACHABLE, **TURNED_DOWN)): (),
    case(member(ObservedState.CLAIMED)): (),
    **{
        case(member(reading)): (Move(RUNNING),)
        for reading in (
            ObservedState.RUNNING,
            ObservedState.EXITED,
            ObservedState.LOST,
            ObservedState.REBOOTED,
        )
    },
    **{case(member(reading)): () for reading in SILENCE},
    # cancelled
    case(member(ObservedState.ABSENT), cancel=True): (Void(0),),
    case(member(ObservedState.CLAIMED), cancel=True): (Kill(0),),
    case(member(ObservedState.RUNNING), cancel=True): (Move(RUNNING),),
    **{case(member(reading), cancel=True): () for reading in SILENCE},
    case(
        member(ObservedState.ABSENT, provided=False), member(ObservedState.ABSENT, 1), cancel=True
    ): (*(Void(0), Void(1)),),
    **{
        case(member(reading, provided=False), member(ObservedState.ABSENT, 1), cancel=True): (
            Void(1),
        )
        for reading in SILENCE
    },
    # on a machine that is declared lost, and answers
    case(lost(ObservedState.ABSENT)): (Void(0),),
    # a gang begins when all machines have their files; one that is silent has not said that it has them
    case(member(ObservedState.ABSENT), member(ObservedState.ABSENT, 1, provided=False)): (
        Provide(1),
    ),
    **{
        case(member(ObservedState.ABSENT), member(reading, 1, provided=False)): ()
        for reading in SILENCE
    },
    **{case(member(ObservedState.ABSENT), member(reading, 1)): (Launch(0),) for reading in SILENCE},
    case(member(ObservedState.ABSENT), member(ObservedState.ABSENT, 1)): (Launch(0), Launch(1)),
    case(member(ObservedState.RUNNING, provided=False), member(ObservedState.ABSENT, 1)): (
        Launch(1),
    ),
    case(member(ObservedState.RUNNING), member(ObservedState.UNREACHABLE, 1)): (),
    case(member(ObservedState.RUNNING), member(ObservedState.EXITED, 1)): (Move(RUNNING),),
    # a gang of which one is refused is taken back whole, and given up when no machine can begin it
    case(member(ObservedState.RUNNING), NO_RAM, member(ObservedState.ABSENT, 2)): (
        Kill(0),
        Void(2),
    ),
    case(member(ObservedState.LOST), NO_RAM): LEFT_BEHIND,
    **{case(member(reading), NO_RAM): () for reading in SILENCE},
    # what an engine has waits for as long as it likes, and what waits is made void and never killed
    case(member(ObservedState.QUEUED)): (),
    case(member(ObservedState.QUEUED, drained=True)): (),
    case(member(ObservedState.QUEUED, given=False)): (Launch(0),),
    case(member(ObservedState.UNREACHABLE, given=False)): (),
    case(member(ObservedState.QUEUED), cancel=True): (Void(0),),
    case(member(ObservedState.QUEUED, given=False), cancel=True): (Void(0),),
    case(lost(ObservedState.QUEUED)): (Void(0),),
}
RUNS = {
    **{case(member(reading)): () for reading in (ObservedState.RUNNING, ObservedState.CLAIMED, *SILENCE)},
    case(member(ObservedState.EXITED)): (Move(COLLECTING),),
    case(member(ObservedState.LOST)): LEFT_BEHIND,
    case(member(ObservedState.LOST, quiet=False)): LEFT_BEHIND,
    case(member(ObservedState.ABSENT)): (Void(0),),
    case(member(ObservedState.VOIDED)): (CheckRelease(0),),
    case(member(ObservedState.VOIDED, quiet=False)): LEFT_BEHIND,
    case(member(ObservedState.REFUSED)): (CheckRelease(0),),
    # cancelled
    **{case(member(r), cancel=True): (Kill(0),) for r in (ObservedState.RUNNING, ObservedState.CLAIMED)},
    **{case(member(reading), cancel=True): () for reading in SILENCE},
    case(member(ObservedState.EXITED), cancel=True): (Move(COLLECTING),),
    case(member(ObservedState.LOST), cancel=True): LEFT_BEHIND,
    # a machine that answers is not gone whatever is said of it
    case(lost(ObservedState.RUNNING)): (Kill(0),),
    case(member(ObservedState.RUNNING, deadman_over=True)): (),
    # a gang: one that is done leaves the others alone, and so does one that is silent
    case(member(ObservedState.EXITED), member(ObservedState.RUNNING, 1)): (),
    **{case(member(reading), member(ObservedState.RUNNING, 1)): () for reading in SILENCE},
    **{
        case(sick, member(reading, 1)): (Kill(1),) if reading is ObservedState.RUNNING else ()
        for sick in (
            member(ObservedState.EXITED, exit=exited(1)), member(ObservedState.REBOOTED), lost(),
            member(ObservedState.UNREACHABLE, deadman_over=True),
        )
        for reading in (ObservedState.RUNNING, *SILENCE)
    },
}  # fmt: skip
COLLECTS = {
    case(member(ObservedState.EXITED)): (Collect(0),),
    **{case(member(reading, exit=exited())): () for reading in SILENCE},
    case(member(ObservedState.EXITED, exit=KILLED, collected=True), cancel=True): (
        CheckRelease(0),
    ),
    case(member(ObservedState.EXITED, exit=KILLED, collected=True, quiet=False), cancel=True): (
        LEFT_BEHIND
    ),
}
CLEANS_UP = {
    **{case(member(reading)): () for reading in SILENCE},
    case(member(ObservedState.ABSENT)): (Void(0),),
    case(member(ObservedState.QUEUED)): (Void(0),),
    **{
        case(member(reading)): (Kill(0),)
        for reading in (ObservedState.CLAIMED, ObservedState.RUNNING)
    },
    case(member(ObservedState.LOST)): LEFT_BEHIND,
    **{
        case(member(reading)): (CheckRelease(0),)
        for reading in (
            ObservedState.EXITED,
            ObservedState.REBOOTED,
            ObservedState.VOIDED,
            ObservedState.REFUSED,
        )
    },
    **{case(member(reading, released=True)): () for reading in ObservedState},
    # what a lost machine held is given back once
    **{case(lost(reading)): (Abandon(0),) for reading in SILENCE},
    **{case(lost(reading, abandoned=True)): () for reading in SILENCE},
    **{case(member(reading, deadman_over=True)): () for reading in SILENCE},
}


@pytest.mark.parametrize(("state", "cases"), [
    (RESERVED, {case(member(reading)): (Move(LAUNCHING),) for reading in ObservedState}), (LAUNCHING, LAUNCHES), (RUNNING, RUNS),
    (COLLECTING, COLLECTS), (ENDED, CLEANS_UP),
])  # fmt: skip
def test_decisions_for_every_state_and_reading(
    state: AttemptState, cases: dict[tuple[tuple[MemberView, ...], bool], tuple[Effect, ...]]
) -> None:
    found = {each: decide(view(state, *each[0], cancel=each[1])) for each in cases}
    assert found == cases


ENDS = [
    # reserved: what nobody wants, or whose machine takes nothing new, ends without a word to it
    (RESERVED, case(member(ObservedState.UNKNOWN), cancel=True), VOID),
    (RESERVED, case(lost(ObservedState.UNKNOWN)), VOID),
    (RESERVED, case(member(ObservedState.UNKNOWN, drained=True)), VOID),
    # launching
    (LAUNCHING, case(member(ObservedState.REFUSED, refusal="gpu_busy: x.3")), REFUSED_VOID),
    (LAUNCHING, case(member(ObservedState.VOIDED)), VOID),
    (LAUNCHING, case(member(ObservedState.VOIDED, **TURNED_DOWN)), REFUSED_VOID),
    (LAUNCHING, case(member(ObservedState.VOIDED), cancel=True), VOID),
    (LAUNCHING, case(lost(ObservedState.VOIDED)), VOID),
    *((LAUNCHING, case(lost(r), cancel=c), HOST_LOST) for r in SILENCE for c in (False, True)),
    (
        LAUNCHING,
        case(member(ObservedState.EXITED, exit=KILLED), NO_RAM, member(ObservedState.VOIDED, 2)),
        failed(FailureClass.LAUNCH_FAILURE),
    ),
    (LAUNCHING, case(member(ObservedState.VOIDED), NO_RAM, member(ObservedState.VOIDED, 2)), REFUSED_VOID),
    (
        LAUNCHING,
        case(member(ObservedState.LOST, quiet=True), NO_RAM),
        failed(FailureClass.LAUNCH_FAILURE),
    ),
    # running: a folder that vanished proves nothing, a complete report does
    (RUNNING, case(member(ObservedState.REBOOTED)), failed(FailureClass.REBOOT)),
    (RUNNING, case(member(ObservedState.LOST, quiet=True)), failed(FailureClass.SUPERVISOR_LOST)),
    (RUNNING, case(member(ObservedState.VOIDED, quiet=True)), failed(FailureClass.SUPERVISOR_LOST)),
    *((RUNNING, case(lost(reading)), HOST_LOST) for reading in SILENCE),
    *((RUNNING, case(member(reading, deadman_over=True)), HOST_LOST) for reading in SILENCE),
    (RUNNING, case(lost(), member(ObservedState.EXITED, 1, exit=KILLED)), HOST_LOST),
    (
        RUNNING,
        case(member(ObservedState.REBOOTED), member(ObservedState.EXITED, 1, exit=KILLED)),
        failed(FailureClass.REBOOT),
    ),
    # collecting: exit code 0 wins against a late cancellation, which is acknowledged when no process is left
    (COLLECTING, case(member(ObservedState.EXITED, collected=True)), SUCCEEDED),
    (COLLECTING, case(member(ObservedState.EXITED, collected=True), cancel=True), SUCCEEDED),
    (
        COLLECTING,
        case(member(ObservedState.EXITED, collected=True, collection_problem="a link")),
        failed(FailureClass.ARTEFACTS),
    ),
    (COLLECTING, case(lost(exit=exited())), HOST_LOST),
    (COLLECTING, case(lost(exit=exited(1))), failed(FailureClass.CRASHED)),
    (COLLECTING, case(lost(ObservedState.EXITED, exit=KILLED, collected=True)), HOST_LOST),
    *(
        (
            COLLECTING, case(member(ObservedState.EXITED, collected=True, quiet=True, exit=exited(c, BY_US, s)), cancel=True), CANCELLED,
        )
        for c, s in ((0, None), (None, 15))
    ),
    (
        COLLECTING,
        case(member(ObservedState.EXITED, exit=exited(1), collected=True), cancel=True),
        failed(FailureClass.CRASHED),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("state", "seen", "ends"), ENDS)
def test_an_attempt_ends(
    state: AttemptState,
    seen: tuple[tuple[MemberView, ...], bool],
    ends: tuple[Outcome, FailureClass | None],
) -> None:
    assert the_end(decide(view(state, *seen[0], cancel=seen[1]))) == ends


def only(effects: tuple[Effect, ...]) -> Move:
    (move,) = effects
    assert isinstance(move, Move)
    return move


@pytest.mark.parametrize("code", sorted(refusals.OURS))
def test_files_missing_on_the_control_machine_are_not_blamed_on_the_host(code: str) -> None:
    refused = member(ObservedState.VOIDED, rejected=True, refusal=f"{code}: it is gone")
    move = only(decide(view(LAUNCHING, refused)))
    assert (move.outcome, move.failure) == (Outcome.VOID, FailureClass.NOT_PROVIDED)
    assert "control machine" in move.because


def test_the_cause_is_the_member_that_failed_first_by_itself() -> None:
    """By a clock that all share: that of its machine may be years behind."""
    members = (
        member(ObservedState.EXITED, 0, exit=exited(3, finished_at=1.0), ended=9.0, collected=True),
        member(
            ObservedState.EXITED, 1, exit=exited(64, finished_at=5.0), ended=5.0, collected=True
        ),
        member(ObservedState.EXITED, 2, exit=KILLED, ended=2.0, collected=True),
    )
    move = only(decide(view(COLLECTING, *members)))
    assert the_end((move,)) == failed(FailureClass.USER_ERROR)
    assert move.evidence["rank"] == 1


def test_messages_of_a_scheduler_are_reported_and_do_not_blame_the_job() -> None:
    said = "job 7 of Slurm is cancelled, and it never began"
    gave_up = member(ObservedState.VOIDED, refusal=f"voided: {said}")
    end = only(decide(view(LAUNCHING, gave_up)))
    assert (end.outcome, end.failure, end.because) == (Outcome.VOID, FailureClass.PREEMPTION, said)
    assert only(decide(view(LAUNCHING, gave_up, cancel=True))).failure is None
    gone = member(ObservedState.LOST, engine_says="job 7 of Slurm is node fail", quiet=True)
    end = only(decide(view(RUNNING, gone)))
    assert end.failure is FailureClass.SUPERVISOR_LOST
    assert "job 7 of Slurm is node fail" in end.because


def test_an_attempt_is_over_once_it_has_ended_and_is_cleaned_up() -> None:
    assert not over(view(ENDED, member(ObservedState.EXITED)))
    assert over(AttemptView("job-1", 7, ENDED, (), cleanup=Cleanup.CLEAN))
    assert not over(AttemptView("job-1", 7, RUNNING, (), cleanup=Cleanup.CLEAN))


# what nobody drives


@pytest.mark.parametrize(("epoch", "reading", "known", "what"), [
    (5, ObservedState.RUNNING, JobEpochs(live_epoch=5, highest_epoch=5), OrphanAction.LEAVE),
    (4, ObservedState.RUNNING, JobEpochs(live_epoch=5, highest_epoch=5), OrphanAction.KILL),
    (5, ObservedState.RUNNING, JobEpochs(live_epoch=None, highest_epoch=5), OrphanAction.KILL),
    (5, ObservedState.CLAIMED, JobEpochs(live_epoch=None, highest_epoch=6), OrphanAction.KILL),
    (5, ObservedState.EXITED, JobEpochs(live_epoch=None, highest_epoch=6), OrphanAction.LEAVE),
    (5, ObservedState.RUNNING, None, OrphanAction.REPORT),
    (5, ObservedState.EXITED, None, OrphanAction.LEAVE),
    (6, ObservedState.RUNNING, JobEpochs(live_epoch=5, highest_epoch=5), OrphanAction.REPORT),
    (7, ObservedState.QUEUED, None, OrphanAction.REPORT), (7, ObservedState.QUEUED, JobEpochs(7, 7), OrphanAction.LEAVE),
    (6, ObservedState.QUEUED, JobEpochs(7, 7), OrphanAction.KILL),
])  # fmt: skip
def test_the_action_for_an_attempt_without_a_controller(
    epoch: int, reading: ObservedState, known: JobEpochs | None, what: OrphanAction
) -> None:
    assert orphan_action(epoch, reading, known) is what


@pytest.mark.parametrize("reading", [ObservedState.LOST, ObservedState.EXITED])
@pytest.mark.parametrize(("known", "what"), [
    (None, OrphanAction.REPORT), (JobEpochs(live_epoch=4, highest_epoch=4), OrphanAction.REPORT),
    (JobEpochs(live_epoch=5, highest_epoch=5), OrphanAction.LEAVE), (JobEpochs(live_epoch=None, highest_epoch=6), OrphanAction.LEAVE),
])  # fmt: skip
def test_the_action_for_processes_without_a_supervisor(
    reading: ObservedState, known: JobEpochs | None, what: OrphanAction
) -> None:
    assert orphan_action(5, reading, known, survivors=1) is what
    assert orphan_action(5, reading, known, survivors=0) is OrphanAction.LEAVE
