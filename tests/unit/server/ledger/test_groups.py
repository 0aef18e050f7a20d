"""Groups: kept whole, found again, ended where nothing comes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.server.ledger.groups import (
    Echo,
    content_hash,
    count_groups,
    echo_of,
    expire_overdue,
    first_unused_draw,
    give_up,
    go_stale,
    groups_in,
    matching,
    opened,
    prune_records,
    read_group,
    read_record,
)
from groupwise.server.ledger.plans import Trained, make_plan, mark_trained, quarantine
from groupwise.server.ledger.runs import add_run, set_run_state
from groupwise.server.states import TABLE
from groupwise.types import Group, from_json
from groupwise.wire.problems import Refusal
from tests.unit.server.ledger.making import LEASE, RUN, begin, group, new, open_groups, post


def later(transaction, seconds: float):
    return replace(transaction, now=transaction.now + seconds, uptime=transaction.uptime + seconds)


def test_a_group_is_kept_to_the_last_bit(run):
    (row,) = opened(run, RUN, [new(7, step=3)], key_id="k1", lease=60.0)
    assert (row.id, row.run, row.draw, row.state, row.members) == ("g-7", RUN, 7, "open", 2)
    assert (row.sampled_step, row.version, row.fingerprint) == (3, 3, "f3")
    assert (row.key_id, row.opened_at, row.lease_end) == ("k1", run.now, run.uptime + 60)
    assert row.prompt == [{"role": "user", "content": "abc"}]
    assert (row.rewards, row.accepted, row.plan) == (None, None, None)
    assert read_group(run, "g-7") == row
    stored = read_record(run, "g-7")
    assert stored is not None
    assert from_json(Group, stored) == group(7)


def test_a_draw_is_taken_until_its_group_expires_or_is_given_up(run):
    open_groups(run, 0)
    with pytest.raises(Refusal, match="group g-0 of run letters has draw 0") as refused:
        opened(run, RUN, [new(0, name="g-b")], key_id="k", lease=LEASE)
    assert refused.value.code == "draw_taken"
    give_up(run, "g-0")
    opened(run, RUN, [new(0, name="g-b")], key_id="k", lease=LEASE)
    expire_overdue(later(run, LEASE))
    opened(run, RUN, [new(0, name="g-c")], key_id="k", lease=LEASE)


def test_draws_of_another_run_do_not_matter(run):
    open_groups(run, 0)
    set_run_state(run, RUN, "stopped")
    begin(run, "next")
    opened(run, "next", [new(0, name="g-next")], key_id="k", lease=LEASE)
    assert first_unused_draw(run, "next") == 1


def test_nothing_is_opened_for_a_run_that_has_ended(run):
    set_run_state(run, RUN, "finished")
    with pytest.raises(Refusal) as refused:
        open_groups(run, 0)
    assert refused.value.code == "finished"


@pytest.mark.parametrize(("taken", "expected"), [((), 0), ((0, 1, 2), 3), ((5,), 6)])
def test_the_first_unused_draw(run, taken, expected):
    open_groups(run, *taken)
    assert first_unused_draw(run, RUN) == expected


def test_a_draw_that_became_free_is_not_given_to_anybody_by_itself(run):
    open_groups(run, 0, 1, 2)
    give_up(run, "g-2")
    assert first_unused_draw(run, RUN) == 3


def test_groups_are_counted_and_listed_by_state(run):
    open_groups(run, 0, 1, 2, 3)
    post(run, "g-2")
    post(run, "g-1", include="hold")
    post(run, "g-0")
    assert count_groups(run, RUN) == dict.fromkeys(TABLE, 0) | {"open": 1, "held": 1, "rewarded": 2}
    assert count_groups(run, RUN, ["open"]) == {"open": 1}
    assert [row.id for row in groups_in(run, RUN, ["rewarded", "held"])] == ["g-2", "g-1", "g-0"]
    assert groups_in(run, "other", ["rewarded"]) == []


def test_the_oldest_open_group_of_an_echo_is_meant(run):
    echo = echo_of(group(0))
    assert matching(run, RUN, echo) is None
    opened(run, RUN, [new(0), new(1), new(2), new(3, text="other")], key_id="k", lease=LEASE)
    assert matching(run, RUN, echo).id == "g-0"
    post(run, "g-0")
    assert matching(run, RUN, echo).id == "g-1"
    post(run, "g-2")
    post(run, "g-1")
    assert matching(run, RUN, echo).id == "g-1", "the one that was rewarded last"
    assert matching(run, "other", echo) is None


def test_an_echo_prefers_what_still_takes_rewards(run):
    open_groups(run, 0)
    afterwards = later(run, LEASE)
    assert matching(afterwards, RUN, echo_of(group(0))).id == "g-0", "to be told that it is late"
    opened(afterwards, RUN, [new(1)], key_id="k", lease=LEASE)
    assert matching(afterwards, RUN, echo_of(group(0))).id == "g-1"


@pytest.mark.parametrize(
    "other",
    [
        Echo([{"role": "user", "content": "abd"}], ("abc0", "abc1"), ((3, 4), (4, 4))),
        Echo([{"role": "user", "content": "abc"}], ("abc0", "abc2"), ((3, 4), (4, 4))),
        Echo("abc", ("abc0", "abc1"), ((3, 4), (4, 4))),
    ],
)
def test_any_other_content_is_another_group(other):
    same = Echo([{"content": "abc", "role": "user"}], ("abc0", "abc1"), ((3, 4), (4, 4)))
    assert content_hash(same) == content_hash(echo_of(group(0)))
    assert content_hash(other) != content_hash(same)


def test_tokens_of_an_echo_count_where_they_are_sent(run):
    open_groups(run, 0)
    echo = echo_of(group(0))
    assert matching(run, RUN, replace(echo, completion_tokens=None)).id == "g-0"
    assert matching(run, RUN, echo).id == "g-0"
    assert matching(run, RUN, replace(echo, completion_tokens=((3, 4), (4, 5)))) is None


def test_giving_up(run):
    open_groups(run, 0, 1, 2, 3)
    assert give_up(run, "g-0").state == "given_up"
    assert give_up(run, "g-0").state == "given_up"
    post(run, "g-1", include="hold")
    assert give_up(run, "g-1").state == "given_up"
    post(run, "g-2")
    with pytest.raises(Refusal, match="g-2 is rewarded") as refused:
        give_up(run, "g-2")
    assert refused.value.code == "group_in_use"
    expire_overdue(later(run, LEASE))
    with pytest.raises(Refusal) as refused:
        give_up(run, "g-3")
    assert refused.value.code == "lease_expired"


@pytest.mark.parametrize("name", ["g-unknown", "", "\ud800", "x" * 10_000, "g-0\0"])
def test_an_unknown_group(run, name):
    open_groups(run, 0)
    with pytest.raises(Refusal, match="no group of this server") as refused:
        read_group(run, name)
    assert refused.value.code == "unknown_group"
    assert len(str(refused.value)) < 500


def test_what_is_overdue_expires_once_and_nothing_else(run):
    open_groups(run, 0, 1)
    opened(run, RUN, [new(2)], key_id="k", lease=LEASE + 1)
    post(run, "g-1")
    assert expire_overdue(later(run, LEASE - 0.01)) == []
    assert [row.id for row in expire_overdue(later(run, LEASE))] == ["g-0"]
    assert expire_overdue(later(run, LEASE)) == []
    assert [read_group(run, name).state for name in ("g-0", "g-1", "g-2")] == [
        "expired",
        "rewarded",
        "open",
    ]


def test_what_the_policy_has_outrun_goes_stale(run):
    for step in range(3):
        open_groups(run, 2 * step, 2 * step + 1, step=step)
        post(run, f"g-{2 * step}")
        post(run, f"g-{2 * step + 1}", include="hold")
    open_groups(run, 9, step=0)
    assert [row.id for row in go_stale(run, RUN, 1)] == ["g-0", "g-1"]
    assert go_stale(run, RUN, 1) == []
    row = read_group(run, "g-0")
    assert (row.state, row.reason) == ("stale", "sampled before step 1")
    assert read_group(run, "g-9").state == "open", "its client may still post"


def test_records_are_dropped_where_no_step_will_need_them(run):
    open_groups(run, *range(8))
    for draw in range(6):
        post(run, f"g-{draw}")
    trained = Trained("f", 1, "/p", {})
    for step in range(3):
        make_plan(run, RUN, step, [f"g-{step}"], {})
    mark_trained(run, RUN, 0, trained)
    mark_trained(run, RUN, 1, trained)
    make_plan(run, RUN, 3, ["g-3"], {})
    quarantine(run, RUN, 3, "it ended the engine")
    give_up(run, "g-6")
    assert prune_records(run, RUN, 1) == 2
    kept = [draw for draw in range(8) if read_record(run, f"g-{draw}") is not None]
    assert kept == [1, 2, 3, 4, 5, 7]
    assert prune_records(run, RUN, 1) == 0
    assert prune_records(run, RUN, 2) == 1
    assert read_group(run, "g-0").state == "trained", "the row stays"
    set_run_state(run, RUN, "stopped")
    add_run(run, "other", "/o", {}, {})
    assert prune_records(run, "other", 9) == 0
