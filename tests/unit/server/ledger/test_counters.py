"""Counters of a run."""

from __future__ import annotations

from groupwise.server.ledger.counters import REWARD_REQUESTS, count, count_refusal, counters_of


def test_counters_rise_apart_for_each_run(ledger):
    assert counters_of(ledger, "a") == {}
    count(ledger, "a", REWARD_REQUESTS)
    count(ledger, "a", REWARD_REQUESTS, by=2)
    count_refusal(ledger, "a", "lease_expired")
    count(ledger, "b", REWARD_REQUESTS)
    assert counters_of(ledger, "a") == {"refused/lease_expired": 1, "reward_requests_served": 3}
    assert counters_of(ledger, "b") == {"reward_requests_served": 1}
