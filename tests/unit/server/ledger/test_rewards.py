"""Rewards: one defined answer for each post.

1. The first post decides; the same one again is a duplicate with the answer of the first, whatever has become of the group since.
2. Another second post is refused, and changes nothing.
3. Held groups are released by the same rewards with `next`, once.
4. Of several posts all are accepted or none.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.server.ledger.groups import (
    Echo,
    echo_of,
    expire_overdue,
    give_up,
    mark_stale,
    read_group,
)
from groupwise.server.ledger.plans import Trained, make_plan, mark_trained, quarantine
from groupwise.server.ledger.rewards import Post, accept_rewards
from groupwise.server.ledger.runs import set_run_state
from tests.unit.server.ledger.making import LEASE, REWARDS, RUN, group, open_groups, post


def expect_refusal(transaction, name, rewards=REWARDS, **more) -> Refusal:
    before = transaction.all("SELECT * FROM groups")
    with pytest.raises(Refusal) as refusal:
        post(transaction, name, rewards, **more)
    assert transaction.all("SELECT * FROM groups") == before
    return refusal.value


def train(run) -> None:
    make_plan(run, RUN, 0, ["g-0"], {})
    mark_trained(run, RUN, 0, Trained("f", 1, "/p", {}))


def put_aside(run) -> None:
    make_plan(run, RUN, 0, ["g-0"], {})
    quarantine(run, RUN, 0, "why")


BECOMES = {
    "rewarded": lambda run: None,
    "planned": lambda run: make_plan(run, RUN, 0, ["g-0"], {}),
    "trained": train,
    "quarantined": put_aside,
    "stale": lambda run: mark_stale(run, RUN, 5),
    "of a run that has ended": lambda run: set_run_state(run, RUN, "finished"),
    "long over its lease": lambda run: expire_overdue(replace(run, uptime=run.uptime + 9 * LEASE)),
}


def test_several_posts_are_answered_in_order_and_may_repeat_each_other(run):
    open_groups(run, 0, 1)
    posts = [Post(name, REWARDS, {"n": n}) for n, name in enumerate(["g-1", "g-0", "g-1"])]
    posted = [accept_rewards(run, RUN, each) for each in posts]
    assert [(each.group, each.accepted, each.answer["n"]) for each in posted] == [
        ("g-1", True, 0), ("g-0", True, 1), ("g-1", False, 0),
    ]  # fmt: skip


def test_the_long_form_takes_the_oldest_open_group_then_repeats_the_last_answer(run):
    open_groups(run, 0, 1)
    echo = echo_of(group(0))
    posted = [accept_rewards(run, RUN, Post(echo, REWARDS, {"n": n})) for n in range(3)]
    outcomes = [(each.group, each.accepted, each.answer["n"]) for each in posted]
    assert outcomes == [("g-0", True, 0), ("g-1", True, 1), ("g-1", False, 1)]
    for other, rewards, code in (
        (echo, (0.0, 0.0), "already_rewarded"),
        (Echo("abc", (), ()), REWARDS, "unknown_group"),
    ):
        with pytest.raises(Refusal) as refusal:
            accept_rewards(run, RUN, Post(other, rewards, {}))
        assert refusal.value.code == code


@pytest.mark.parametrize("rewards", [(1.0, 0.1 + 0.2), (None, -1e9), (None, None), (3, 0)])
def test_rewards_are_kept_to_the_last_bit_in_the_order_of_their_acceptance(run, rewards):
    open_groups(run, 0, 1, 2)
    for name in ("g-1", "g-0", "g-2", "g-1"):
        posted = post(run, name, rewards)
    assert (posted.group, posted.accepted, posted.state) == ("g-1", False, "rewarded")
    assert not post(run, "g-0", tuple(r if r is None else float(r) for r in rewards)).accepted
    rows = [read_group(run, f"g-{draw}") for draw in range(3)]
    assert [(each.accepted, each.rewards) for each in rows] == [
        (place, rewards) for place in (2, 1, 3)
    ]


@pytest.mark.parametrize("fate", BECOMES)
def test_a_duplicate_gets_the_first_answer_whatever_has_become_of_the_group(run, fate):
    open_groups(run, 0)
    first = post(run, "g-0")
    BECOMES[fate](run)
    state = read_group(run, "g-0").state
    much_later = replace(run, now=run.now + 1e6, uptime=run.uptime + 1e6)
    for include in ("next", "hold"):
        again = post(much_later, "g-0", include=include)
        assert (again.accepted, again.answer, again.state) == (False, first.answer, state)
    assert expect_refusal(much_later, "g-0", (1.0, None)).code == "already_rewarded"


def test_rewards_of_a_group_that_takes_none_are_refused_with_the_reason(run):
    open_groups(run, 0, 1, 2, 3)
    give_up(run, "g-0")
    post(run, "g-2", include="hold")
    late = replace(run, uptime=run.uptime + LEASE)
    assert expect_refusal(late, "g-1").code == "lease_expired"
    jumped = replace(run, uptime=run.uptime + LEASE - 0.01, now=run.now + 1e7)
    assert post(jumped, "g-3").accepted, "whatever the machine's clock says"
    expire_overdue(replace(late, now=run.now - 1e7))
    codes = [expect_refusal(run, f"g-{draw}").code for draw in (0, 1, 9)]
    set_run_state(run, RUN, "replaced")
    codes.append(expect_refusal(run, "g-2").code)
    assert codes == ["group_given_up", "lease_expired", "unknown_group", "finished"]
