"""When a deadman has certainly ended what a silent machine ran, and what is known of what an engine begins; all else of a drive is tried
in `test_dispatcher.py`, and with a real engine in `tests/integration/fleet/test_slurm_rows.py`."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from groupwise.jobs.fleet.attempts import controller
from groupwise.jobs.fleet.attempts.decide import DEADMAN_MARGIN, ObservedState
from groupwise.jobs.fleet.attempts.records import Machine, MemberRow, Snapshot
from groupwise.jobs.fleet.states import AttemptState, Cleanup
from groupwise.jobs.hosts.answers import MemberState, RunnerState

DEADMAN = 100.0
MACHINE = Machine(
    "vm", "ssh", "127.0.0.1", 22, None, None, None, None, "fleet", "python3", DEADMAN, None, 500,
    lost=False, takes_new=True,
)  # fmt: skip


def is_over(recorded: ObservedState | None, silent_for: float | None, **handle: Any) -> bool:
    """Noticed when it fell silent, and looked at once more now."""
    passed = [0.0]
    driving = new_drive(lambda: passed[0])
    looked_at(driving, recorded, silent_for, **handle)
    passed[0] = silent_for or 0.0
    return looked_at(driving, recorded, silent_for, **handle)


def new_drive(clock: Callable[[], float] = lambda: 0.0) -> controller.AttemptController:
    return controller.AttemptController(
        1,
        cast(
            "Any",
            SimpleNamespace(poll_timing=controller.PollTiming(), clock=clock, rng=random.Random()),
        ),
    )


def looked_at(
    driving: controller.AttemptController,
    recorded: ObservedState | None,
    silent_for: float | None,
    now: float = 10_000.0,
    **handle: Any,
) -> bool:
    if silent_for is not None:
        handle["silent_since"] = now - silent_for
    member = MemberRow(0, MACHINE, recorded, handle, 0, False, (), None, None, ())
    row = Snapshot(
        1, "job", 0, 0, AttemptState.RUNNING, Cleanup.PENDING, False, {}, {}, {}, None, None, (member,), now,
    )  # fmt: skip
    return driving._deadman_is_over(row, member)  # pyright: ignore[reportPrivateUsage]


def test_only_after_the_deadman_and_a_margin() -> None:
    """Of a machine that was told of one: what stands in its row now may have been written since."""
    for silent_for in (None, 0.0, DEADMAN + 1, DEADMAN + DEADMAN_MARGIN):
        assert not is_over(ObservedState.RUNNING, silent_for, deadman=DEADMAN)
    assert is_over(ObservedState.RUNNING, DEADMAN + DEADMAN_MARGIN + 1, deadman=DEADMAN)
    assert not is_over(ObservedState.RUNNING, 1e4)
    assert not is_over(ObservedState.RUNNING, 1e4, deadman=None)


def test_a_jump_of_the_databases_clock_ends_no_deadman_early() -> None:
    """What runs there has its own clock, which did not jump. Whoever takes over counts anew: the jump may be why the lease ran out."""
    passed = [1000.0]
    driving, over = new_drive(lambda: passed[0]), DEADMAN + DEADMAN_MARGIN + 1
    handle = {"deadman": DEADMAN, "silent_since": 10_000.0}
    assert not looked_at(driving, ObservedState.RUNNING, None, now=10_001.0, **handle)
    assert not looked_at(driving, ObservedState.RUNNING, None, now=20_000.0, **handle)
    passed[0] += over
    assert not looked_at(driving, ObservedState.RUNNING, None, now=10_000.0, **handle)
    assert looked_at(driving, ObservedState.RUNNING, None, now=20_000.0, **handle)
    assert not looked_at(
        new_drive(lambda: passed[0]), ObservedState.RUNNING, None, now=20_000.0, **handle
    )
    assert not looked_at(
        driving, ObservedState.RUNNING, None, now=20_000.0, deadman=DEADMAN
    )  # it answers
    assert not looked_at(driving, ObservedState.RUNNING, None, now=20_000.0, **handle)


def test_after_the_deadman_an_attempt_is_over_unless_its_supervisor_is_lost() -> None:
    """A launch of which nothing was heard may still be under way: where it arrives after its deadman, it begins nothing."""
    for recorded in (None, *ObservedState):
        assert is_over(recorded, 1e4, deadman=DEADMAN) == (recorded is not ObservedState.LOST)


@pytest.mark.parametrize(
    ("state", "engine", "pid", "reading"),
    [
        (RunnerState.LOST, None, None, ObservedState.ABSENT),  # whoever launches takes it over
        (
            RunnerState.LOST,
            "slurm",
            None,
            ObservedState.LOST,
        ),  # its token is gone: nobody begins it
        (RunnerState.LOST, "slurm", 3, ObservedState.LOST),
        (RunnerState.REBOOTED, None, 3, ObservedState.REBOOTED),
        (RunnerState.REBOOTED, "slurm", 3, ObservedState.LOST),  # it began on another machine
        (RunnerState.QUEUED, "slurm", None, ObservedState.QUEUED),
    ],
)
def test_states_of_attempts_are_read_with_their_engine_and_process(
    state: RunnerState, engine: str | None, pid: int | None, reading: ObservedState
) -> None:
    ear = controller._MemberMonitor("job", 1, lambda: None)  # pyright: ignore[reportPrivateUsage]
    ear.on_state(MemberState("job", 1, state, engine=engine, pid=pid))
    assert ear.reading is reading
