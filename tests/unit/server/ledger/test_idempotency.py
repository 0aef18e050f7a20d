"""Answers by Idempotency-Key: the same within a day, together with the work or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.api.schemas.idempotency import AnswerKey
from groupwise.api.schemas.keys import Caller, Role
from groupwise.api.schemas.problems import Refusal
from groupwise.server.ledger import idempotency
from groupwise.server.ledger.events import count, counters_of
from groupwise.server.ledger.idempotency import (
    RETENTION_SECONDS,
    StoredResponse,
    delete_expired,
    stored_response,
)
from groupwise.server.ledger.transaction import TICK_SECONDS, Transaction
from groupwise.server.ledger.writer import Ledger

KEY = AnswerKey("POST /rewards", "abc", "hash-1")
CALLER = Caller("key-1", Role.TRAIN, answer_key=KEY)


def asking(**changes: str) -> Caller:
    """The same caller with another key, or key of its own."""
    return replace(CALLER, answer_key=replace(KEY, **changes))


def once(transaction: Transaction, caller: Caller) -> StoredResponse:
    def work() -> StoredResponse:
        count(transaction, "r", "done")
        return StoredResponse(200, b'{"done": %d}' % counters_of(transaction, "r")["done"])

    answer = idempotency.run_idempotent(transaction, caller, work)
    assert answer is not None
    return answer


def test_an_answer_is_kept_for_a_day(ledger):
    first = once(ledger, CALLER)
    soon = replace(ledger, uptime=ledger.uptime + RETENTION_SECONDS - 1)
    for jump in (-1e7, 1e7):  # of the machine's clock
        assert delete_expired(replace(soon, now=soon.now + jump)) == 0
        assert once(replace(soon, now=soon.now + jump), CALLER) == first
    tomorrow = replace(ledger, uptime=ledger.uptime + RETENTION_SECONDS)
    assert once(tomorrow, asking(body_hash="hash-2")).body == b'{"done": 2}'
    assert delete_expired(tomorrow) == 0
    assert delete_expired(replace(tomorrow, uptime=tomorrow.uptime + RETENTION_SECONDS)) == 1


def test_an_answer_of_the_last_moments_before_a_kill_is_kept(ledger):
    first = once(ledger, CALLER)
    after_kill = replace(ledger, uptime=ledger.uptime - TICK_SECONDS)
    assert delete_expired(after_kill) == 0
    assert once(after_kill, CALLER) == first


async def test_a_refused_request_leaves_neither_work_nor_answer(tmp_path):
    def refuse(transaction: Transaction) -> StoredResponse | None:
        def work() -> StoredResponse:
            count(transaction, "r", "done")
            raise Refusal("finished")

        return idempotency.run_idempotent(transaction, CALLER, work)

    opened = Ledger.open(tmp_path / "server.db")
    with pytest.raises(Refusal):
        await opened.do(refuse)
    assert await opened.do(counters_of, "r") == {}
    assert await opened.do(idempotency.run_idempotent, CALLER, lambda: None) is None
    assert (await opened.do(once, CALLER)).status == 200
    await opened.close()


def test_the_same_request_of_the_same_caller_is_done_once(ledger):
    assert stored_response(ledger, CALLER) is None
    first = once(ledger, CALLER)
    assert once(ledger, CALLER) == stored_response(ledger, CALLER) == first
    with pytest.raises(Refusal) as refused:
        once(ledger, asking(body_hash="hash-2"))
    assert refused.value.code == "idempotency_key_reused"
    assert counters_of(ledger, "r") == {"done": 1}
    others = [asking(route="POST /start"), asking(key="abd"), replace(CALLER, key_id="key-2")]
    others += [replace(CALLER, answer_key=None)] * 2
    bodies = [once(ledger, each).body for each in others]
    assert bodies == [b'{"done": %d}' % number for number in range(2, 7)]
