"""Answers by Idempotency-Key: the same within a day, together with the work or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.server.ledger.answers import (
    KEPT_SECONDS,
    Request,
    StoredResponse,
    forget_old_answers,
    once,
    stored_answer,
)
from groupwise.server.ledger.counters import count, counters_of
from groupwise.server.ledger.writer import Ledger

REQUEST = Request("key-1", "POST /rewards", "abc", "hash-1")


def work(transaction) -> StoredResponse:
    count(transaction, "r", "done")
    return StoredResponse(200, b'{"done": %d}' % counters_of(transaction, "r")["done"])


def test_an_answer_is_kept_for_a_day(ledger):
    first = once(ledger, REQUEST, work)
    soon = replace(ledger, uptime=ledger.uptime + KEPT_SECONDS - 1)
    for jump in (-1e7, 1e7):  # of the machine's clock
        assert forget_old_answers(replace(soon, now=soon.now + jump)) == 0
        assert once(replace(soon, now=soon.now + jump), REQUEST, work) == first
    tomorrow = replace(ledger, uptime=ledger.uptime + KEPT_SECONDS)
    assert once(tomorrow, replace(REQUEST, body_hash="hash-2"), work).body == b'{"done": 2}'
    assert forget_old_answers(tomorrow) == 0
    assert forget_old_answers(replace(tomorrow, uptime=tomorrow.uptime + KEPT_SECONDS)) == 1


async def test_a_refused_request_leaves_neither_work_nor_answer(tmp_path):
    def refuse(transaction) -> StoredResponse:
        work(transaction)
        raise Refusal("finished")

    opened = Ledger.open(tmp_path / "server.db")
    with pytest.raises(Refusal):
        await opened.do(once, REQUEST, refuse)
    assert await opened.do(counters_of, "r") == {}
    assert (await opened.do(once, REQUEST, work)).status == 200
    await opened.close()


def test_the_same_request_of_the_same_caller_is_done_once(ledger):
    assert stored_answer(ledger, REQUEST) is None
    first = once(ledger, REQUEST, work)
    assert once(ledger, REQUEST, work) == stored_answer(ledger, REQUEST) == first
    with pytest.raises(Refusal) as refused:
        once(ledger, replace(REQUEST, body_hash="hash-2"), work)
    assert refused.value.code == "idempotency_key_reused"
    assert counters_of(ledger, "r") == {"done": 1}
    others = [{"key_id": "key-2"}, {"route": "POST /start"}, {"key": "abd"}]
    requests = [replace(REQUEST, **other, body_hash="hash-2") for other in others]
    found = [once(ledger, each, work).body for each in (*requests, None, None)]
    assert found == [b'{"done": %d}' % number for number in range(2, 7)]
