"""The runs of a server, of which at most one is active."""

from __future__ import annotations

import pytest

from groupwise.server.ledger.runs import (
    active_run,
    add_run,
    list_runs,
    need_active,
    new_incarnation,
    read_run,
    set_run_state,
)
from groupwise.wire.problems import Refusal
from tests.unit.server.ledger.making import RUN, begin


def test_a_run_is_kept_as_it_was_begun(ledger):
    assert active_run(ledger) is None
    begin(ledger)
    row = read_run(ledger, RUN)
    assert (row.run, row.folder, row.state, row.incarnation) == (RUN, "/runs/letters", "active", 0)
    assert row.settings == {"model_id": "tiny"}
    assert row.config == {"run": {"name": RUN}}
    assert (row.started_at, row.ended_at) == (ledger.now, None)
    assert active_run(ledger) == row


@pytest.mark.parametrize("state", ["stopped", "finished", "failed", "replaced"])
def test_a_run_ends_with_a_reason_and_makes_room_for_the_next(run, state):
    ended = set_run_state(run, RUN, state, "it was \ud800 enough")
    assert (ended.state, ended.reason, ended.ended_at) == (state, r"it was \ud800 enough", run.now)
    assert active_run(run) is None
    with pytest.raises(Refusal, match=rf"the run letters is {state} \(it was") as refused:
        need_active(run, RUN)
    assert refused.value.code == "finished"
    add_run(run, "next", "/n", {}, {})
    assert [row.run for row in list_runs(run)] == [RUN, "next"]


def test_a_second_active_run_is_refused(run):
    with pytest.raises(Refusal, match="the run letters is active") as refused:
        add_run(run, "b", "/b", {}, {})
    assert refused.value.code == "run_active"
    set_run_state(run, RUN, "stopped")
    add_run(run, "b", "/b", {}, {})
    with pytest.raises(Refusal, match="the run b is active"):
        set_run_state(run, RUN, "active")


def test_a_run_goes_on(run):
    set_run_state(run, RUN, "failed", "no memory")
    again = set_run_state(run, RUN, "active")
    assert (again.state, again.reason, again.ended_at) == ("active", None, None)
    need_active(run, RUN)


def test_incarnations_are_counted(run):
    assert [new_incarnation(run, RUN), new_incarnation(run, RUN)] == [1, 2]
    assert read_run(run, RUN).incarnation == 2


def test_an_unknown_run_is_named_with_those_there_are(run):
    with pytest.raises(Refusal, match="its runs are: letters") as refused:
        read_run(run, "other\ud800")
    assert refused.value.code == "unknown_run"
