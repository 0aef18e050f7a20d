"""Plans: made once, in order, and what becomes of them."""

from __future__ import annotations

import math

import pytest

from groupwise.server.ledger.groups import give_up, go_stale, groups_in
from groupwise.server.ledger.plans import (
    Trained,
    groups_of,
    last_trained_step,
    living_plan,
    make_plan,
    mark_trained,
    plan_of,
    quarantine,
)
from groupwise.server.states import MoveError
from groupwise.wire.problems import Refusal
from tests.unit.server.ledger.making import RUN, open_groups, post

DONE = Trained("f1", 1, "/runs/letters/policies/1", {"loss": -0.0, "reward": 0.5})


@pytest.fixture
def rewarded(run):
    """Six groups that wait, the last of them held."""
    open_groups(run, *range(6))
    for draw in range(6):
        post(run, f"g-{draw}", include="hold" if draw == 5 else "next")
    return run


def test_a_plan_keeps_the_order_and_the_parameters(rewarded):
    plan = make_plan(rewarded, RUN, 0, ["g-3", "g-5", "g-0"], {"learning_rate": 1e-5})
    assert (plan.run, plan.step, plan.state, plan.losses) == (RUN, 0, "planned", 0)
    assert plan.groups == ("g-3", "g-5", "g-0")
    assert plan.parameters == {"learning_rate": 1e-5}
    assert [row.position for row in groups_of(rewarded, plan)] == [0, 1, 2]
    assert {row.state for row in groups_of(rewarded, plan)} == {"planned"}
    assert plan_of(rewarded, "g-5") == living_plan(rewarded, RUN, 0) == plan
    assert plan_of(rewarded, "g-1") is None
    assert [row.id for row in groups_in(rewarded, RUN, ["rewarded"])] == ["g-1", "g-2", "g-4"]


def test_what_cannot_be_planned_is_refused_by_what_it_is(rewarded):
    open_groups(rewarded, 6, 7)
    give_up(rewarded, "g-7")
    make_plan(rewarded, RUN, 0, ["g-0"], {})
    for names, code in {
        ("g-0",): "group_in_use",
        ("g-1", "g-1"): "group_in_use",
        ("g-6",): "invalid_request",
        ("g-7",): "group_given_up",
        ("g-9",): "unknown_group",
    }.items():
        rewarded.execute("SAVEPOINT one")
        with pytest.raises(Refusal) as refused:
            make_plan(rewarded, RUN, 1, names, {})
        rewarded.execute("ROLLBACK TO one")
        assert refused.value.code == code
        fields = [error.field for error in refused.value.errors]
        assert fields == (["group_ids"] if code == "invalid_request" else [])
    quarantine(rewarded, RUN, 0, "why")
    go_stale(rewarded, RUN, 9)
    for name, code in {"g-0": "group_quarantined", "g-1": "group_stale"}.items():
        with pytest.raises(Refusal) as refused:
            make_plan(rewarded, RUN, int(name[2:]), [name], {})
        assert refused.value.code == code


def test_what_came_of_a_step_is_kept_and_then_what_came_of_it_when_it_was_taken_again(rewarded):
    assert last_trained_step(rewarded, RUN) is None
    make_plan(rewarded, RUN, 0, ["g-0", "g-1"], {})
    with pytest.raises(MoveError):
        make_plan(rewarded, RUN, 0, ["g-2"], {})
    assert mark_trained(rewarded, RUN, 0, DONE).trained == DONE
    plan = mark_trained(rewarded, RUN, 0, Trained("f2", 1, "/p", {"loss": math.nan}))
    assert (plan.state, plan.trained) == ("trained", Trained("f2", 1, "/p", {"loss": None}))
    assert {row.state for row in groups_of(rewarded, plan)} == {"trained"}
    assert last_trained_step(rewarded, RUN) == 0
    with pytest.raises(MoveError):
        quarantine(rewarded, RUN, 0, "why")
    assert make_plan(rewarded, RUN, 1, [], {}).groups == ()
