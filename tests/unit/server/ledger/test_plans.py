"""Plans: made once, in order, and what becomes of them."""

from __future__ import annotations

import math

import pytest

from groupwise.server.ledger.groups import give_up, go_stale, groups_in, read_group
from groupwise.server.ledger.plans import (
    Trained,
    count_loss,
    groups_of,
    last_trained_step,
    living_plan,
    make_plan,
    mark_trained,
    plan_of,
    plans_from,
    quarantine,
    quarantined_plans,
)
from groupwise.server.ledger.runs import set_run_state
from groupwise.server.states import MoveError
from groupwise.wire.problems import Refusal
from tests.unit.server.ledger.making import RUN, begin, open_groups, post

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


def test_an_empty_plan_is_a_step_too(run):
    assert make_plan(run, RUN, 0, [], {}).groups == ()
    assert mark_trained(run, RUN, 0, DONE).state == "trained"


def test_a_step_has_one_living_plan(rewarded):
    make_plan(rewarded, RUN, 0, ["g-0"], {})
    with pytest.raises(MoveError, match="step 0 of run letters has a plan already, of 1 groups"):
        make_plan(rewarded, RUN, 0, ["g-1"], {})


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


def test_a_group_of_another_run_is_not_planned(rewarded):
    set_run_state(rewarded, RUN, "replaced")
    with pytest.raises(Refusal) as refused:
        make_plan(rewarded, RUN, 0, ["g-0"], {})
    assert refused.value.code == "finished"
    begin(rewarded, "next")
    with pytest.raises(Refusal, match="group g-0 is of run letters, not of next") as refused:
        make_plan(rewarded, "next", 0, ["g-0"], {})
    assert refused.value.code == "unknown_group"


def test_losses_are_counted_until_the_step_is_trained(rewarded):
    make_plan(rewarded, RUN, 0, ["g-0"], {})
    assert [count_loss(rewarded, RUN, 0) for _ in range(2)] == [1, 2]
    assert mark_trained(rewarded, RUN, 0, DONE).losses == 0
    assert count_loss(rewarded, RUN, 0) == 1
    with pytest.raises(MoveError, match="step 1 of run letters has no plan"):
        count_loss(rewarded, RUN, 1)


def test_what_came_of_a_step_is_kept(rewarded):
    assert last_trained_step(rewarded, RUN) is None
    make_plan(rewarded, RUN, 0, ["g-0", "g-1"], {})
    plan = mark_trained(rewarded, RUN, 0, DONE)
    assert plan.state == "trained"
    assert plan.trained == DONE
    assert {row.state for row in groups_of(rewarded, plan)} == {"trained"}
    assert last_trained_step(rewarded, RUN) == 0


def test_a_step_that_is_trained_again_keeps_what_came_of_it_now(rewarded):
    make_plan(rewarded, RUN, 0, ["g-0"], {})
    mark_trained(rewarded, RUN, 0, DONE)
    plan = mark_trained(rewarded, RUN, 0, Trained("f2", 1, "/p", {"loss": math.nan}))
    assert plan.trained == Trained("f2", 1, "/p", {"loss": None})
    assert read_group(rewarded, "g-0").state == "trained"


def test_a_quarantined_plan_keeps_its_groups_and_frees_its_step(rewarded):
    make_plan(rewarded, RUN, 0, ["g-0", "g-1"], {})
    plan = quarantine(rewarded, RUN, 0, "it ended the engine twice")
    assert (plan.state, plan.reason, plan.groups) == (
        "quarantined",
        "it ended the engine twice",
        ("g-0", "g-1"),
    )
    assert [(row.state, row.reason) for row in groups_of(rewarded, plan)] == [
        ("quarantined", "it ended the engine twice")
    ] * 2
    assert living_plan(rewarded, RUN, 0) is None
    assert quarantined_plans(rewarded, RUN) == [plan]
    assert make_plan(rewarded, RUN, 0, ["g-2"], {}).groups == ("g-2",)


def test_a_trained_step_is_not_quarantined(rewarded):
    make_plan(rewarded, RUN, 0, ["g-0"], {})
    mark_trained(rewarded, RUN, 0, DONE)
    with pytest.raises(MoveError, match="step 0 of run letters is trained"):
        quarantine(rewarded, RUN, 0, "why")


def test_the_plans_to_be_sent_again_come_in_order(rewarded):
    for step in (2, 0, 1):
        make_plan(rewarded, RUN, step, [f"g-{step}"], {"step": step})
    mark_trained(rewarded, RUN, 0, DONE)
    mark_trained(rewarded, RUN, 1, DONE)
    make_plan(rewarded, RUN, 3, ["g-3"], {})
    quarantine(rewarded, RUN, 3, "why")
    assert [(plan.step, plan.state) for plan in plans_from(rewarded, RUN, 1)] == [
        (1, "trained"),
        (2, "planned"),
    ]
    assert plans_from(rewarded, "other", 0) == []
