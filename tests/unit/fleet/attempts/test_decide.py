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

from dataclasses import replace

import pytest

from groupwise.fleet.attempts import refusals
from groupwise.fleet.attempts.decide import (
    Abandon,
    CheckRelease,
    Collect,
    Effect,
    Kill,
    Known,
    Launch,
    MemberView,
    Move,
    Provide,
    Reading,
    Stray,
    View,
    Void,
    decide,
    over,
    stray,
)
from groupwise.fleet.states import AttemptState, Cleanup, Outcome
from groupwise.hosts.answers import ExitReason, ExitRecord
from groupwise.hosts.failures import FailureClass

RESERVED, LAUNCHING = AttemptState.RESERVED, AttemptState.LAUNCHING
RUNNING, COLLECTING, ENDED = AttemptState.RUNNING, AttemptState.COLLECTING, AttemptState.ENDED
SILENCE = (Reading.UNREACHABLE, Reading.UNKNOWN)


def exited(
    code: int | None = 0,
    reason: ExitReason = ExitReason.EXITED,
    signal: int | None = None,
    finished_at: float = 1.0,
    tail: str = "",
    oom_kill: int = 0,
) -> ExitRecord:
    return ExitRecord(
        code, signal, reason, "", oom_kill, seconds=1.0,
        finished_at=finished_at, tail=tail,
    )  # fmt: skip


KILLED = exited(None, ExitReason.CANCELLED, 15)


def member(reading: Reading, rank: int = 0, **facts: object) -> MemberView:
    record = exited() if reading is Reading.EXITED else None
    return MemberView(rank, f"vm-{rank}", reading, **({"exit": record} | facts))  # pyright: ignore[reportArgumentType]


def view(state: AttemptState, *members: MemberView, cancel: bool = False) -> View:
    return View("job-1", 7, state, members, cancel_requested=cancel)


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


@pytest.mark.parametrize("state", AttemptState)
def test_nothing_is_decided_about_an_attempt_without_members(state: AttemptState) -> None:
    """All of none have begun, and ended well: it would be a success that nobody has seen."""
    with pytest.raises(AssertionError, match=r"job-1\.7 has no members"):
        decide(view(state))


# reserved


@pytest.mark.parametrize("reading", Reading)
def test_a_reserved_attempt_is_launching_before_anything_is_sent(reading: Reading) -> None:
    assert decide(view(RESERVED, member(reading))) == (Move(LAUNCHING),)


def test_a_reserved_attempt_that_nobody_wants_ends_without_a_word_to_its_machine() -> None:
    assert the_end(decide(view(RESERVED, member(Reading.UNKNOWN), cancel=True))) == VOID


@pytest.mark.parametrize("fact", ["lost", "drained"])
def test_nothing_new_begins_on_a_machine_that_is_drained_or_lost(fact: str) -> None:
    found = decide(view(RESERVED, member(Reading.UNKNOWN, **{fact: True})))
    assert the_end(found) == VOID


# launching


@pytest.mark.parametrize(
    ("reading", "effects"),
    [
        (Reading.ABSENT, (Launch(0),)),
        (Reading.CLAIMED, ()),
        (Reading.RUNNING, (Move(RUNNING),)),
        (Reading.EXITED, (Move(RUNNING),)),
        (Reading.LOST, (Move(RUNNING),)),
        (Reading.REBOOTED, (Move(RUNNING),)),
        (Reading.UNREACHABLE, ()),
        (Reading.UNKNOWN, ()),
    ],
)
def test_launching(reading: Reading, effects: tuple[Effect, ...]) -> None:
    assert decide(view(LAUNCHING, member(reading))) == effects


def test_files_are_brought_before_the_launch() -> None:
    assert decide(view(LAUNCHING, member(Reading.ABSENT, provided=False))) == (Provide(0),)


@pytest.mark.parametrize("other", [Reading.ABSENT, *SILENCE])
def test_no_member_of_a_gang_begins_before_all_machines_have_their_files(other: Reading) -> None:
    """One that is silent has not said that it has them."""
    without = member(other, rank=1, provided=False)
    brought = (Provide(1),) if other is Reading.ABSENT else ()
    assert decide(view(LAUNCHING, member(Reading.ABSENT), without)) == brought
    with_all = decide(view(LAUNCHING, member(Reading.ABSENT), replace(without, provided=True)))
    assert with_all == (Launch(0), *([Launch(1)] if other is Reading.ABSENT else []))


def test_what_has_begun_of_a_gang_has_its_files() -> None:
    """Whoever takes over has not heard of them."""
    begun = member(Reading.RUNNING, provided=False)
    assert decide(view(LAUNCHING, begun, member(Reading.ABSENT, rank=1))) == (Launch(1),)


@pytest.mark.parametrize("reading", [Reading.ABSENT, *SILENCE])
def test_files_that_are_on_their_way_hold_up_no_cancellation(reading: Reading) -> None:
    gang = member(reading, provided=False), member(Reading.ABSENT, rank=1)
    first = (Void(0),) if reading is Reading.ABSENT else ()
    assert decide(view(LAUNCHING, *gang, cancel=True)) == (*first, Void(1))


def test_a_launch_that_is_refused_never_ran() -> None:
    refused = member(Reading.REFUSED, refusal="gpu_busy: held by x.3")
    assert the_end(decide(view(LAUNCHING, refused))) == REFUSED_VOID


@pytest.mark.parametrize("code", sorted(refusals.OURS))
def test_what_the_control_machine_does_not_have_is_no_word_of_a_machine(code: str) -> None:
    (move,) = decide(
        view(LAUNCHING, member(Reading.VOIDED, rejected=True, refusal=f"{code}: it is gone"))
    )
    assert isinstance(move, Move)
    assert the_end((move,)) == (Outcome.VOID, FailureClass.NOT_PROVIDED)
    assert move.because == "the control machine cannot give what the job needs: it is gone"


def test_a_launch_that_was_made_void_is_begun_anew_and_blamed_on_nobody() -> None:
    assert the_end(decide(view(LAUNCHING, member(Reading.VOIDED)))) == VOID


def test_a_launch_that_was_turned_down_before_it_was_claimed_is_made_void_first() -> None:
    facts = {"rejected": True, "refusal": "disk_full: no space"}
    assert decide(view(LAUNCHING, member(Reading.ABSENT, **facts))) == (Void(0),)
    assert decide(view(LAUNCHING, member(Reading.UNREACHABLE, **facts))) == ()
    assert the_end(decide(view(LAUNCHING, member(Reading.VOIDED, **facts)))) == REFUSED_VOID


@pytest.mark.parametrize(
    ("reading", "effects"),
    [
        (Reading.ABSENT, (Void(0),)),
        (Reading.CLAIMED, (Kill(0),)),
        (Reading.RUNNING, (Move(RUNNING),)),
        (Reading.UNREACHABLE, ()),
        (Reading.UNKNOWN, ()),
    ],
)
def test_a_launch_that_is_cancelled(reading: Reading, effects: tuple[Effect, ...]) -> None:
    assert decide(view(LAUNCHING, member(reading), cancel=True)) == effects


def test_a_cancelled_launch_ends_when_void_is_acknowledged() -> None:
    assert the_end(decide(view(LAUNCHING, member(Reading.VOIDED), cancel=True))) == VOID


@pytest.mark.parametrize("reading", SILENCE)
@pytest.mark.parametrize("cancel", [False, True])
def test_a_launch_on_a_machine_that_is_declared_lost_ends(reading: Reading, cancel: bool) -> None:
    found = decide(view(LAUNCHING, member(reading, lost=True), cancel=cancel))
    assert the_end(found) == failed(FailureClass.HOST_LOST)


def test_a_machine_that_is_declared_lost_and_answers_gets_no_launch() -> None:
    assert decide(view(LAUNCHING, member(Reading.ABSENT, lost=True))) == (Void(0),)
    assert the_end(decide(view(LAUNCHING, member(Reading.VOIDED, lost=True)))) == VOID


# launching a gang


def test_a_gang_runs_when_all_of_it_has_begun() -> None:
    half = view(LAUNCHING, member(Reading.RUNNING), member(Reading.ABSENT, 1))
    assert decide(half) == (Launch(1),)
    waiting = view(LAUNCHING, member(Reading.RUNNING), member(Reading.UNREACHABLE, 1))
    assert decide(waiting) == ()
    whole = view(LAUNCHING, member(Reading.RUNNING), member(Reading.EXITED, 1))
    assert decide(whole) == (Move(RUNNING),)


def test_a_gang_of_which_one_is_refused_is_taken_back_whole() -> None:
    refused = member(Reading.REFUSED, 1, refusal="gpu_missing: gone")
    begun = view(LAUNCHING, member(Reading.RUNNING), refused, member(Reading.ABSENT, 2))
    assert decide(begun) == (Kill(0), Void(2))
    dead = view(LAUNCHING, member(Reading.EXITED, exit=KILLED), refused, member(Reading.VOIDED, 2))
    assert the_end(decide(dead)) == failed(FailureClass.LAUNCH_FAILURE)
    never = view(LAUNCHING, member(Reading.VOIDED), refused, member(Reading.VOIDED, 2))
    assert the_end(decide(never)) == REFUSED_VOID


def test_a_gang_is_not_given_up_while_one_machine_may_still_begin_it() -> None:
    refused = member(Reading.REFUSED, 1, refusal="ram: too little")
    for reading in SILENCE:
        assert decide(view(LAUNCHING, member(reading), refused)) == ()


def test_a_supervisor_that_was_killed_is_looked_after_before_a_gang_is_given_up() -> None:
    refused = member(Reading.REFUSED, 1, refusal="ram: too little")
    lost = view(LAUNCHING, member(Reading.LOST), refused)
    assert decide(lost) == (Kill(0), CheckRelease(0))
    quiet = view(LAUNCHING, member(Reading.LOST, quiet=True), refused)
    assert the_end(decide(quiet)) == failed(FailureClass.LAUNCH_FAILURE)


# running


@pytest.mark.parametrize(
    ("reading", "effects"),
    [
        (Reading.RUNNING, ()),
        (Reading.CLAIMED, ()),
        (Reading.UNREACHABLE, ()),
        (Reading.UNKNOWN, ()),
        (Reading.EXITED, (Move(COLLECTING),)),
        (Reading.LOST, (Kill(0), CheckRelease(0))),
        (Reading.ABSENT, (Void(0),)),
        (Reading.VOIDED, (CheckRelease(0),)),
        (Reading.REFUSED, (CheckRelease(0),)),
    ],
)
def test_running(reading: Reading, effects: tuple[Effect, ...]) -> None:
    assert decide(view(RUNNING, member(reading))) == effects


def test_a_reboot_ends_what_ran() -> None:
    assert the_end(decide(view(RUNNING, member(Reading.REBOOTED)))) == failed(FailureClass.REBOOT)


def test_a_killed_supervisor_ends_an_attempt_once_nothing_of_it_runs() -> None:
    restless = member(Reading.LOST, quiet=False)
    assert decide(view(RUNNING, restless)) == (Kill(0), CheckRelease(0))
    found = decide(view(RUNNING, member(Reading.LOST, quiet=True)))
    assert the_end(found) == failed(FailureClass.SUPERVISOR_LOST)


def test_a_folder_that_vanished_is_no_proof_that_nothing_runs() -> None:
    vanished = member(Reading.VOIDED, quiet=False)
    assert decide(view(RUNNING, vanished)) == (Kill(0), CheckRelease(0))
    found = decide(view(RUNNING, member(Reading.VOIDED, quiet=True)))
    assert the_end(found) == failed(FailureClass.SUPERVISOR_LOST)


@pytest.mark.parametrize("reading", SILENCE)
@pytest.mark.parametrize("fact", ["lost", "deadman_over"])
def test_a_silent_machine_ends_an_attempt_by_an_operators_word_or_its_deadman(
    reading: Reading, fact: str
) -> None:
    found = decide(view(RUNNING, member(reading, **{fact: True})))
    assert the_end(found) == failed(FailureClass.HOST_LOST)


def test_a_machine_that_answers_is_not_gone_whatever_is_said_of_it() -> None:
    assert decide(view(RUNNING, member(Reading.RUNNING, lost=True))) == (Kill(0),)
    assert decide(view(RUNNING, member(Reading.RUNNING, deadman_over=True))) == ()
    collected = member(Reading.EXITED, exit=KILLED, lost=True, collected=True)
    assert the_end(decide(view(COLLECTING, collected))) == failed(FailureClass.HOST_LOST)


@pytest.mark.parametrize(
    ("reading", "effects"),
    [
        (Reading.RUNNING, (Kill(0),)),
        (Reading.CLAIMED, (Kill(0),)),
        (Reading.UNREACHABLE, ()),
        (Reading.UNKNOWN, ()),
        (Reading.EXITED, (Move(COLLECTING),)),
        (Reading.LOST, (Kill(0), CheckRelease(0))),
    ],
)
def test_running_and_cancelled(reading: Reading, effects: tuple[Effect, ...]) -> None:
    assert decide(view(RUNNING, member(reading), cancel=True)) == effects


# a gang that runs


@pytest.mark.parametrize(
    "sick",
    [
        member(Reading.EXITED, exit=exited(1)),
        member(Reading.REBOOTED),
        member(Reading.UNREACHABLE, lost=True),
        member(Reading.UNREACHABLE, deadman_over=True),
    ],
)
def test_a_member_that_fails_ends_the_gang(sick: MemberView) -> None:
    assert decide(view(RUNNING, sick, member(Reading.RUNNING, 1))) == (Kill(1),)
    for reading in SILENCE:
        assert decide(view(RUNNING, sick, member(reading, 1))) == ()


def test_a_member_that_is_done_leaves_the_others_alone() -> None:
    assert decide(view(RUNNING, member(Reading.EXITED), member(Reading.RUNNING, 1))) == ()


@pytest.mark.parametrize("reading", SILENCE)
def test_a_silent_member_has_not_failed(reading: Reading) -> None:
    assert decide(view(RUNNING, member(reading), member(Reading.RUNNING, 1))) == ()


def test_the_end_of_a_gang_is_that_of_the_machine_that_was_lost() -> None:
    dead = member(Reading.EXITED, 1, exit=KILLED)
    lost = view(RUNNING, member(Reading.UNREACHABLE, lost=True), dead)
    assert the_end(decide(lost)) == failed(FailureClass.HOST_LOST)
    rebooted = view(RUNNING, member(Reading.REBOOTED), dead)
    assert the_end(decide(rebooted)) == failed(FailureClass.REBOOT)


def test_the_cause_is_the_member_that_failed_first_by_itself() -> None:
    """By a clock that all share: that of its machine may be years behind."""
    members = (
        member(Reading.EXITED, 0, exit=exited(3, finished_at=1.0), ended=9.0, collected=True),
        member(Reading.EXITED, 1, exit=exited(64, finished_at=5.0), ended=5.0, collected=True),
        member(Reading.EXITED, 2, exit=KILLED, ended=2.0, collected=True),
    )
    (move,) = decide(view(COLLECTING, *members))
    assert the_end((move,)) == failed(FailureClass.USER_ERROR)
    assert isinstance(move, Move)
    assert move.evidence["rank"] == 1


# collecting


def test_collecting_fetches_before_it_ends() -> None:
    assert decide(view(COLLECTING, member(Reading.EXITED))) == (Collect(0),)
    for reading in SILENCE:
        assert decide(view(COLLECTING, member(reading, exit=exited()))) == ()
    assert the_end(decide(view(COLLECTING, member(Reading.EXITED, collected=True)))) == SUCCEEDED


def test_what_cannot_be_fetched_whole_is_not_a_success() -> None:
    facts = {"collected": True, "collection_problem": "outputs/x leads out of the folder"}
    found = decide(view(COLLECTING, member(Reading.EXITED, **facts)))
    assert the_end(found) == failed(FailureClass.ARTEFACTS)


def test_what_was_left_out_stands_in_the_evidence() -> None:
    [end] = decide(view(COLLECTING, member(Reading.EXITED, collected=True, left_out=3)))
    assert isinstance(end, Move)
    assert (end.outcome, end.evidence["members"][0]["left_out"]) == (Outcome.SUCCEEDED, 3)


def test_what_was_ended_after_the_command_stands_in_the_evidence() -> None:
    left = replace(exited(), leftovers=3)
    [end] = decide(view(COLLECTING, member(Reading.EXITED, collected=True, exit=left)))
    assert isinstance(end, Move)
    assert end.evidence["members"][0]["exit"]["leftovers"] == 3


def test_a_machine_that_is_lost_before_its_artefacts_were_fetched() -> None:
    gone = member(Reading.UNREACHABLE, exit=exited(), lost=True)
    assert the_end(decide(view(COLLECTING, gone))) == failed(FailureClass.HOST_LOST)
    crashed = member(Reading.UNREACHABLE, exit=exited(1), lost=True)
    assert the_end(decide(view(COLLECTING, crashed))) == failed(FailureClass.CRASHED)


def test_exit_code_0_wins_against_a_late_cancellation() -> None:
    done = member(Reading.EXITED, collected=True)
    assert the_end(decide(view(COLLECTING, done, cancel=True))) == SUCCEEDED


@pytest.mark.parametrize("code", [0, None])
def test_a_cancellation_is_acknowledged_when_no_process_is_left(code: int | None) -> None:
    record = exited(code, ExitReason.CANCELLED, None if code == 0 else 15)
    facts = {"exit": record, "collected": True}
    ended = view(COLLECTING, member(Reading.EXITED, **facts), cancel=True)
    assert decide(ended) == (CheckRelease(0),)
    left = view(COLLECTING, member(Reading.EXITED, quiet=False, **facts), cancel=True)
    assert decide(left) == (Kill(0), CheckRelease(0))
    quiet = view(COLLECTING, member(Reading.EXITED, quiet=True, **facts), cancel=True)
    assert the_end(decide(quiet)) == CANCELLED


def test_a_crash_stays_a_crash_though_somebody_wanted_it_cancelled() -> None:
    crashed = member(Reading.EXITED, exit=exited(1), collected=True)
    found = decide(view(COLLECTING, crashed, cancel=True))
    assert the_end(found) == failed(FailureClass.CRASHED)


# ended


@pytest.mark.parametrize(
    ("reading", "effects"),
    [
        (Reading.UNREACHABLE, ()),
        (Reading.UNKNOWN, ()),
        (Reading.ABSENT, (Void(0),)),
        (Reading.CLAIMED, (Kill(0),)),
        (Reading.RUNNING, (Kill(0),)),
        (Reading.LOST, (Kill(0), CheckRelease(0))),
        (Reading.EXITED, (CheckRelease(0),)),
        (Reading.REBOOTED, (CheckRelease(0),)),
        (Reading.VOIDED, (CheckRelease(0),)),
        (Reading.REFUSED, (CheckRelease(0),)),
    ],
)
def test_cleaning_up(reading: Reading, effects: tuple[Effect, ...]) -> None:
    assert decide(view(ENDED, member(reading))) == effects
    assert decide(view(ENDED, member(reading, released=True))) == ()


def test_what_a_lost_machine_held_is_given_back_once() -> None:
    for reading in SILENCE:
        assert decide(view(ENDED, member(reading, lost=True))) == (Abandon(0),)
        assert decide(view(ENDED, member(reading, lost=True, abandoned=True))) == ()
        assert decide(view(ENDED, member(reading, deadman_over=True))) == ()


def test_it_is_over_when_everything_is_clean() -> None:
    assert not over(view(ENDED, member(Reading.EXITED)))
    assert over(View("job-1", 7, ENDED, (), cleanup=Cleanup.CLEAN))
    assert not over(View("job-1", 7, RUNNING, (), cleanup=Cleanup.CLEAN))


# what nobody drives


@pytest.mark.parametrize(
    ("epoch", "reading", "known", "what"),
    [
        (5, Reading.RUNNING, Known(live_epoch=5, highest_epoch=5), Stray.LEAVE),
        (4, Reading.RUNNING, Known(live_epoch=5, highest_epoch=5), Stray.KILL),
        (5, Reading.RUNNING, Known(live_epoch=None, highest_epoch=5), Stray.KILL),
        (5, Reading.CLAIMED, Known(live_epoch=None, highest_epoch=6), Stray.KILL),
        (5, Reading.EXITED, Known(live_epoch=None, highest_epoch=6), Stray.LEAVE),
        (5, Reading.RUNNING, None, Stray.QUARANTINE),
        (5, Reading.EXITED, None, Stray.LEAVE),
        (6, Reading.RUNNING, Known(live_epoch=5, highest_epoch=5), Stray.QUARANTINE),
    ],
)
def test_strays(epoch: int, reading: Reading, known: Known | None, what: Stray) -> None:
    assert stray(epoch, reading, known) is what


@pytest.mark.parametrize("reading", [Reading.LOST, Reading.EXITED])
@pytest.mark.parametrize(
    ("known", "what"),
    [
        (None, Stray.QUARANTINE),
        (Known(live_epoch=4, highest_epoch=4), Stray.QUARANTINE),
        (Known(live_epoch=5, highest_epoch=5), Stray.LEAVE),
        (Known(live_epoch=None, highest_epoch=6), Stray.LEAVE),
    ],
)
def test_what_outlives_its_supervisor(reading: Reading, known: Known | None, what: Stray) -> None:
    assert stray(5, reading, known, survivors=1) is what
    assert stray(5, reading, known, survivors=0) is Stray.LEAVE


def test_every_state_has_an_answer_for_every_reading() -> None:
    for state in AttemptState:
        for reading in Reading:
            for cancel in (False, True):
                for lost in (False, True):
                    decide(view(state, member(reading, lost=lost), cancel=cancel))


def test_of_a_gang_that_one_member_refused_that_one_is_named() -> None:
    """Another one's supervisor is dead; what is to be done about the refusal is read where it stands."""
    members = (
        member(Reading.LOST, 0, quiet=True),
        member(Reading.REFUSED, 1, refusal="gpu_busy: GPU-1 is used"),
    )
    (move,) = decide(view(LAUNCHING, *members))
    assert isinstance(move, Move)
    assert move.evidence["rank"] == 1
    assert "gpu_busy" in move.because


# Behind an engine


def test_what_an_engine_has_waits_for_as_long_as_it_likes() -> None:
    assert decide(view(LAUNCHING, member(Reading.QUEUED))) == ()
    assert decide(view(LAUNCHING, member(Reading.QUEUED, drained=True))) == ()
    assert decide(view(LAUNCHING, member(Reading.RUNNING))) == (Move(RUNNING),)


def test_what_an_engine_does_not_have_is_given_to_it_again() -> None:
    assert decide(view(LAUNCHING, member(Reading.QUEUED, given=False))) == (Launch(0),)
    assert decide(view(LAUNCHING, member(Reading.UNREACHABLE, given=False))) == ()


@pytest.mark.parametrize("given", [True, False])
def test_what_waits_is_made_void_and_never_killed(given: bool) -> None:
    waits = member(Reading.QUEUED, given=given)
    assert decide(view(LAUNCHING, waits, cancel=True)) == (Void(0),)
    assert decide(view(LAUNCHING, replace(waits, lost=True))) == (Void(0),)
    assert decide(view(ENDED, waits)) == (Void(0),)


def test_a_void_ends_what_was_cancelled_in_the_queue() -> None:
    (end,) = decide(view(LAUNCHING, member(Reading.VOIDED), cancel=True))
    assert isinstance(end, Move)
    assert (end.outcome, end.failure) == (Outcome.VOID, None)


def test_what_its_engine_gave_up_in_the_queue_is_nobodys_fault() -> None:
    said = "job 7 of Slurm is cancelled, and it never began"
    gave_up = member(Reading.VOIDED, refusal=f"voided: {said}")
    (end,) = decide(view(LAUNCHING, gave_up))
    assert isinstance(end, Move)
    assert (end.outcome, end.failure, end.because) == (Outcome.VOID, FailureClass.PREEMPTION, said)
    (cancelled,) = decide(view(LAUNCHING, gave_up, cancel=True))
    assert isinstance(cancelled, Move)
    assert cancelled.failure is None


def test_where_both_are_silent_it_is_told_what_the_engine_said() -> None:
    gone = member(Reading.LOST, engine_says="job 7 of Slurm is node fail", quiet=True)
    (end,) = decide(view(RUNNING, gone))
    assert isinstance(end, Move)
    assert end.failure is FailureClass.SUPERVISOR_LOST
    assert "job 7 of Slurm is node fail" in end.because


def test_what_waits_and_stands_in_no_table_is_not_run_beside() -> None:
    assert stray(7, Reading.QUEUED, None) is Stray.QUARANTINE
    assert stray(7, Reading.QUEUED, Known(7, 7)) is Stray.LEAVE
    assert stray(6, Reading.QUEUED, Known(7, 7)) is Stray.KILL
