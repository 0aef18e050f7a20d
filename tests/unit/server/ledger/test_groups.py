"""Groups: stored whole, found again, ended if they are not rewarded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.core.types import Group, from_json
from groupwise.server.ledger.groups import (
    add_groups,
    echo_of,
    find_by_echo,
    first_unused_draw,
    give_up,
    prune_records,
    read_group,
    read_record,
)
from groupwise.server.ledger.plans import Trained, make_plan, mark_trained, quarantine
from groupwise.server.ledger.runs import add_run, set_run_state
from tests.unit.server.ledger.making import LEASE, RUN, begin, group, new, open_groups, post


def test_a_group_is_kept_to_the_last_bit(run):
    (row,) = add_groups(run, RUN, [new(7, step=3)], key_id="k1", lease=60.0)
    assert (row.id, row.run, row.draw, row.state, row.members) == ("g-7", RUN, 7, "open", 2)
    assert (row.sampled_step, row.version, row.fingerprint) == (3, 3, "f3")
    assert (row.key_id, row.opened_at, row.lease_end) == ("k1", run.now, run.uptime + 60)
    assert row.prompt == [{"role": "user", "content": "abc"}]
    assert (row.rewards, row.accepted, row.plan) == (None, None, None)
    assert read_group(run, "g-7") == row
    stored = read_record(run, "g-7")
    assert stored is not None
    assert from_json(Group, stored) == group(7)


def test_an_echo_prefers_what_still_takes_rewards_and_counts_tokens_where_they_are_sent(run):
    echo = echo_of(group(0))
    assert find_by_echo(run, RUN, echo) is None
    add_groups(run, RUN, [new(0), new(1), new(3, text="other")], key_id="k", lease=LEASE)
    assert find_by_echo(run, RUN, replace(echo, completion_tokens=None)).id == "g-0"
    assert find_by_echo(run, RUN, replace(echo, completion_tokens=((3, 4), (4, 5)))) is None
    assert find_by_echo(run, "other", echo) is None
    post(run, "g-0")
    assert find_by_echo(run, RUN, echo).id == "g-1"
    afterwards = replace(run, now=run.now + LEASE, uptime=run.uptime + LEASE)
    add_groups(afterwards, RUN, [new(2)], key_id="k", lease=LEASE)
    assert find_by_echo(afterwards, RUN, echo).id == "g-2"


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


def test_the_first_unused_draw_is_one_after_the_last_of_the_run(run):
    assert first_unused_draw(run, RUN) == 0
    open_groups(run, 5)
    give_up(run, "g-5")
    assert first_unused_draw(run, RUN) == 6
    set_run_state(run, RUN, "stopped")
    with pytest.raises(Refusal) as refused:
        open_groups(run, 6)
    assert refused.value.code == "finished"
    begin(run, "next")
    add_groups(run, "next", [new(0, name="g-next")], key_id="k", lease=LEASE)
    assert first_unused_draw(run, "next") == 1
