"""Members of a group that are given to one call each, and rewarded one by one."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.server.ledger import members
from groupwise.server.ledger.groups import add_groups, give_up, read_group
from groupwise.server.ledger.members import (
    CompletionId,
    GroupKey,
    Member,
    accept_post,
    hand_out,
    next_member,
    share_group,
)
from groupwise.server.ledger.rewards import Include, Post
from groupwise.server.ledger.runs import set_run_state
from tests.unit.server.ledger.making import LEASE, RUN, new

WHERE = GroupKey(RUN, "k", "name:a", "hash")


def begin(ledger, draw=0, step=0, where=WHERE):
    add_groups(ledger, RUN, [new(draw, step)], key_id=where.key_id, lease=LEASE)
    return share_group(ledger, where, f"g-{draw}")


def following(ledger, oldest=0) -> Member:
    """The next member, which there is."""
    member = next_member(ledger, WHERE, oldest)
    assert member is not None
    return member


def both(ledger, draw=0):
    """Both members given."""
    begin(ledger, draw)
    assert hand_out(ledger, following(ledger))


def post(ledger, name, *rewards, include: Include = "next", step=0):
    answer = {"model_version": [RUN, step], "status": "held" if include == "hold" else "accepted"}
    return accept_post(ledger, RUN, Post(name, rewards, answer, include))


def expect_refusal(code, work, *args, **kwargs):
    with pytest.raises(Refusal) as raised:
        work(*args, **kwargs)
    assert raised.value.code == code
    return raised.value


def test_the_group_is_rewarded_with_its_last_member(run):
    both(run)
    first = post(run, "chatcmpl-g-0-1", 0.5, step=1)
    assert (first.group, first.accepted, first.state) == ("g-0", True, "open")
    again = post(run, "g-0-1", 0.5, step=2)
    assert (again.accepted, again.answer) == (False, first.answer)
    assert post(run, "cmpl-g-0-0", None).state == "rewarded"
    assert read_group(run, "g-0").rewards == (None, 0.5)
    assert post(run, "g-0", None, 0.5).accepted is False
    for member, reward in enumerate((None, 0.5)):
        assert post(run, f"g-0-{member}", reward).accepted is False
    with pytest.raises(sqlite3.IntegrityError, match="accepted rewards stand"):
        run.execute("UPDATE member_rewards SET reward = 2")


def test_an_acknowledged_reward_outlives_the_lease(run):
    both(run, 0)
    both(run, 1)
    post(run, "g-0-1", 0.5)
    assert members.settle_overdue(run) == []
    later = replace(run, uptime=run.uptime + LEASE)
    expect_refusal("lease_expired", post, later, "g-0-0", 1.0)
    (settled,) = members.settle_overdue(later)
    assert (settled.id, settled.state, settled.rewards) == ("g-0", "rewarded", (None, 0.5))
    assert members.settle_overdue(later) == []
    assert post(later, "g-0-1", 0.5).accepted is False
    expect_refusal("already_rewarded", post, later, "g-0-0", 1.0)
    assert read_group(later, "g-1").state == "open"


def test_each_call_gets_a_member_until_all_are_given_apart_by_run_key_and_name(run):
    assert next_member(run, WHERE, 0) is None
    assert begin(run).index == 0
    for key, value in {"run": "other", "key_id": "other", "name": "name:b"}.items():
        assert next_member(run, replace(WHERE, **{key: value}), 0) is None
    expect_refusal("settings_conflict", next_member, run, replace(WHERE, request_hash="other"), 0)
    second = following(run)
    assert (second.row.id, second.index) == ("g-0", 1)
    assert hand_out(run, second)
    assert not hand_out(run, second)
    assert next_member(run, WHERE, 0) is None


def test_held_members_hold_the_group_and_those_of_what_has_ended_are_refused(run):
    for draw in range(3):
        both(run, draw)
        post(run, f"g-{draw}-0", 1.0, include="hold" if draw == 0 else "next")
    assert post(run, "g-0-1", 0.0).state == "held"
    assert post(run, "g-0", 1.0, 0.0).state == "rewarded"
    give_up(run, "g-1")
    expect_refusal("group_given_up", post, run, "g-1-1", 1.0)
    set_run_state(run, RUN, "stopped")
    expect_refusal("finished", post, run, "g-2-1", 1.0)
    assert post(run, "g-2-0", 1.0).accepted is False
    assert members.settle_overdue(replace(run, uptime=run.uptime + LEASE)) == []


def test_a_group_that_is_over_or_too_old_gives_nothing(run):
    begin(run, 0, step=3)
    assert next_member(run, WHERE, 4) is None
    assert next_member(replace(run, uptime=run.uptime + LEASE), WHERE, 3) is None
    waiting = following(run, 3)
    give_up(run, "g-0")
    assert (hand_out(run, waiting), next_member(run, WHERE, 3)) == (False, None)


def test_unknown_members_and_changed_rewards_are_refused(run):
    ids = ("g-0a", "g-0a-12", "chatcmpl-g-0a-0", "cmpl-g-0a", "chatcmpl-0a", "g-0a-x", "g-0a-1-2")
    assert [members.parse_id(id) for id in ids] == [
        *(
            CompletionId("g-0a"),
            CompletionId("g-0a", 12),
            CompletionId("g-0a", 0),
            CompletionId("g-0a"),
        ),
        *(CompletionId("chatcmpl-0a"), CompletionId("g-0a-x"), CompletionId("g-0a", 1, "g-0a-1-2")),
    ]
    begin(run)
    add_groups(run, RUN, [new(1)], key_id="k", lease=LEASE)
    for name in ("g-0-1", "g-0-7", "g-1-0", "g-9-0", "g-9"):
        expect_refusal("unknown_group", post, run, name, 1.0)
    expect_refusal("invalid_request", post, run, "g-0-0", 1.0, 2.0)
    hand_out(run, following(run))
    post(run, "g-0-0", 1.0)
    for name, rewards in {"g-0-0": [2.0], "chatcmpl-g-0": [None, 0.0]}.items():
        assert "g-0-0" in expect_refusal("already_rewarded", post, run, name, *rewards).detail
    assert post(run, "g-0", 1.0, 0.0).state == "rewarded"
    assert post(run, "g-0-1", 0.0).accepted is False
    expect_refusal("already_rewarded", post, run, "g-0-1", 1.0)
