"""The table of a group's states: every pair of state and event."""

from __future__ import annotations

import pickle
from itertools import product
from typing import get_args

import pytest

from groupwise.server.states import ENDS, TABLE, Event, MoveError, State, after, before, moves

EXPECTED = {
    ("open", "reward"): "rewarded",
    ("open", "hold"): "held",
    ("open", "expire"): "expired",
    ("open", "give_up"): "given_up",
    ("rewarded", "plan"): "planned",
    ("rewarded", "go_stale"): "stale",
    ("held", "plan"): "planned",
    ("held", "release"): "rewarded",
    ("held", "give_up"): "given_up",
    ("held", "go_stale"): "stale",
    ("planned", "train"): "trained",
    ("planned", "quarantine"): "quarantined",
}


def test_every_state_has_a_row_and_every_event_a_place() -> None:
    assert tuple(TABLE) == get_args(State)
    assert {event for row in TABLE.values() for event in row} == set(get_args(Event))


@pytest.mark.parametrize(("state", "event"), [*product(get_args(State), get_args(Event))])
def test_every_pair_of_state_and_event(state: State, event: Event) -> None:
    expected = EXPECTED.get((state, event))
    assert (state in before(event)) == (expected is not None)
    if expected is not None:
        assert after(state, event) == expected
        assert (state, expected) in moves()
    else:
        with pytest.raises(MoveError, match=f"a group that is {state} cannot {event}"):
            after(state, event)


def test_moves_are_those_of_the_table_and_nothing_else() -> None:
    assert set(moves()) == {(state, then) for (state, _), then in EXPECTED.items()}
    assert len(moves()) == len(set(moves()))


def test_nothing_leads_out_of_an_end_and_every_other_state_reaches_one() -> None:
    assert set(ENDS) == {"trained", "expired", "given_up", "stale", "quarantined"}
    reaching = set(ENDS)
    for _ in TABLE:
        reaching |= {old for old, new in moves() if new in reaching}
    assert reaching == set(TABLE)


def test_the_message_says_what_can_happen() -> None:
    with pytest.raises(MoveError, match=r"can only train \(-> trained\), quarantine"):
        after("planned", "reward")
    with pytest.raises(MoveError, match="that state is an end") as refused:
        after("trained", "plan")
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
