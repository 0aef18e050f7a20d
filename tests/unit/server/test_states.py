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


def test_nothing_leads_out_of_an_end_and_every_other_state_reaches_one() -> None:
    assert set(ENDS) == {"trained", "expired", "given_up", "stale", "quarantined"}
    reaching = set(ENDS)
    for _ in TABLE:
        reaching |= {old for old, new in moves() if new in reaching}
    assert reaching == set(TABLE)


def test_every_pair_of_state_and_event() -> None:
    assert tuple(TABLE) == get_args(State)
    assert {event for row in TABLE.values() for event in row} == set(get_args(Event))
    for state, event in product(get_args(State), get_args(Event)):
        expected = EXPECTED.get((state, event))
        assert (state in before(event)) == (expected is not None)
        if expected is not None:
            assert after(state, event) == expected
        else:
            with pytest.raises(
                MoveError, match=f"a group that is {state} cannot {event}"
            ) as raised:
                after(state, event)
            assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert sorted(moves()) == sorted({(state, then) for (state, _), then in EXPECTED.items()})
