"""Events: numbered without gaps, read from any number on, the old ones dropped."""

from __future__ import annotations

from groupwise.server.ledger import events
from groupwise.server.ledger.events import add_event, add_event_once, events_after, last_event


def test_events_are_read_in_order_from_any_number_on(ledger):
    assert (last_event(ledger), events_after(ledger, 0, 10)) == (0, [])
    ids = [add_event(ledger, "r", "step", {"step": step}) for step in range(5)]
    add_event(ledger, None, "started", {})
    assert ids == [1, 2, 3, 4, 5]
    assert last_event(ledger) == 6
    assert [event.id for event in events_after(ledger, 0, 2)] == [1, 2]
    third, *_, last = events_after(ledger, 2, 10)
    assert (third.run, third.kind, third.data, third.at) == ("r", "step", {"step": 2}, ledger.now)
    assert (last.id, last.run) == (6, None)
    assert events_after(ledger, 2**70, 10) == []


def test_only_the_newest_are_kept_and_no_id_is_used_twice(ledger, monkeypatch):
    monkeypatch.setattr(events, "KEPT", 3)
    for number in range(5):
        add_event(ledger, "r", "n", {"number": number})
    assert [event.id for event in events_after(ledger, 0, 10)] == [3, 4, 5]
    ledger.execute("DELETE FROM events")
    assert add_event(ledger, "r", "n", {}) == 6


def test_the_same_is_told_once_of_each_run(ledger):
    told = {"step": 2, "data": {"address": "r@2"}}
    for run in ("r", "r", "s"):
        add_event_once(ledger, run, "checkpoint", told)
    add_event_once(ledger, "r", "checkpoint", {**told, "step": 4})
    add_event_once(ledger, "r", "other", told)
    found = [(event.run, event.kind) for event in events_after(ledger, 0, 10)]
    assert found == [("r", "checkpoint"), ("s", "checkpoint"), ("r", "checkpoint"), ("r", "other")]
