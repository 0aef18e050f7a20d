"""When a deadman has certainly ended what a silent machine ran; all else of a drive is tried in `test_dispatcher.py`."""

from typing import Any

import pytest

from groupwise.fleet.attempts import drive
from groupwise.fleet.attempts.decide import DEADMAN_MARGIN, Reading
from groupwise.fleet.attempts.records import Machine, MemberRow, Snapshot
from groupwise.fleet.states import AttemptState, Cleanup

DEADMAN = 100.0
MACHINE = Machine(
    "vm", "ssh", "127.0.0.1", 22, None, None, None, None, "fleet", "python3", DEADMAN, None, 500,
    lost=False, takes_new=True,
)  # fmt: skip


def is_over(recorded: Reading | None, silent_for: float | None, **handle: Any) -> bool:
    now = 10_000.0
    if silent_for is not None:
        handle["silent_since"] = now - silent_for
    member = MemberRow(0, MACHINE, recorded, handle, 0, False, (), None, None, ())
    row = Snapshot(
        1, "job", 0, 0, AttemptState.RUNNING, Cleanup.PENDING, False, {}, {}, None, None, (member,), now,
    )  # fmt: skip
    return drive._deadman_is_over(row, member)  # pyright: ignore[reportPrivateUsage]


def test_only_after_the_deadman_and_a_margin() -> None:
    for silent_for in (None, 0.0, DEADMAN + 1, DEADMAN + DEADMAN_MARGIN):
        assert not is_over(Reading.RUNNING, silent_for, deadman=DEADMAN)
    assert is_over(Reading.RUNNING, DEADMAN + DEADMAN_MARGIN + 1, deadman=DEADMAN)


@pytest.mark.parametrize("recorded", [None, *Reading])
def test_whatever_was_heard_but_that_its_supervisor_is_dead(recorded: Reading | None) -> None:
    """A launch of which nothing was heard may still be under way: where it arrives after its deadman, it begins nothing."""
    assert is_over(recorded, 1e4, deadman=DEADMAN) == (recorded is not Reading.LOST)


def test_only_of_a_machine_that_was_told_of_a_deadman() -> None:
    """What stands in its row now may have been written since."""
    assert not is_over(Reading.RUNNING, 1e4)
    assert not is_over(Reading.RUNNING, 1e4, deadman=None)
