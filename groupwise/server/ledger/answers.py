"""Answers by Idempotency-Key: a request repeated within a day gets the same answer as the first time.

A key is unique per API key and route. The answer is written in the transaction of the work (`once`), so there is never one without the
other. Refusals are not stored: the same request may succeed once their cause is gone. For a request that waits for a step, `accepted` is
stored; a repeated request waits for the same step.

`UnderWay` covers the time before that transaction: a request waits if one with the same key is already being answered. If the first request
is refused, or its client disconnects, the next one does the work itself. Work before the transaction (sampling) may still be done twice, by
two servers or after a kill; the ledger keeps the result that is stored first, and gives its answer to both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from groupwise.api.schemas.idempotency import AnswerKey
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.server.ledger.transaction import Transaction

KEPT_SECONDS = 24 * 3600.0
"""Seconds of server uptime for which an answer is kept, so that clock jumps do not expire answers. Rows of earlier servers hold wall time;
`made_at > uptime` finds them.
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The response that a client received."""

    status: int
    body: bytes


def stored_answer(transaction: Transaction, caller: Caller) -> StoredResponse | None:
    """The stored answer to this request; None if there is none, or if the request has no key. Refuses with `idempotency_key_reused` if the
    body was different.
    """
    key = caller.answer_key
    if key is None:
        return None
    row = transaction.first(
        """SELECT body_hash, status, body FROM answers
        WHERE key_id = ? AND route = ? AND key = ? AND made_at > ? AND made_at <= ?""",
        (
            *(caller.key_id, key.route, key.key),
            *(transaction.uptime - KEPT_SECONDS, transaction.uptime),
        ),
    )
    if row is None:
        return None
    body_hash, status, body = row
    _check_body(key, body_hash)
    return StoredResponse(status, body)


def once(
    transaction: Transaction, caller: Caller, work: Callable[[], StoredResponse | None]
) -> StoredResponse | None:
    """Do the work and store its answer, both or neither; if the request was answered before, return that answer instead.

    If the work raises or returns None, nothing is stored and the request may be repeated. Without a key the work is done unconditionally.
    """
    key = caller.answer_key
    if (before := stored_answer(transaction, caller)) is not None:
        return before
    answer = work()
    if key is not None and answer is not None:
        transaction.execute(
            "INSERT OR REPLACE INTO answers (key_id, route, key, body_hash, status, body, made_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(caller.key_id, key.route, key.key, key.body_hash),
                *(answer.status, answer.body, transaction.uptime),
            ),
        )
    return answer


def forget_old_answers(transaction: Transaction) -> int:
    """Delete the expired answers; returns their number."""
    return transaction.execute(
        "DELETE FROM answers WHERE made_at <= ? OR made_at > ?",
        (transaction.uptime - KEPT_SECONDS, transaction.uptime),
    ).rowcount


class UnderWay:
    """The requests with an Idempotency-Key that are currently being answered, in one event loop."""

    def __init__(self) -> None:
        self._first: dict[
            tuple[str, str, str], tuple[str, asyncio.Future[StoredResponse | None]]
        ] = {}
        """Hash of the body and future of the answer, by API key, route and Idempotency-Key."""

    async def answer(self, caller: Caller) -> StoredResponse | None:
        """Wait for the answer to a request in progress with this key; None if there is none, so the caller must do the work.

        Refuses with `idempotency_key_reused` if that request has a different body.
        """
        while (key := caller.answer_key) and (first := self._first.get(_name(caller, key))):
            body_hash, answer = first
            _check_body(key, body_hash)
            # Several requests may wait for this future, so one that is cancelled must not cancel it.
            if (given := await asyncio.shield(answer)) is not None:
                return given
        return None

    @asynccontextmanager
    async def first(self, caller: Caller) -> AsyncGenerator[asyncio.Future[StoredResponse | None]]:
        """Register as the request that others with this key wait for. The caller sets its answer, if any, in the future."""
        answer: asyncio.Future[StoredResponse | None] = asyncio.get_running_loop().create_future()
        key = caller.answer_key
        if key is not None:
            self._first[_name(caller, key)] = (key.body_hash, answer)
        try:
            yield answer
        finally:
            if key is not None:
                del self._first[_name(caller, key)]
            if not answer.done():
                answer.set_result(None)


def _name(caller: Caller, key: AnswerKey) -> tuple[str, str, str]:
    return (caller.key_id, key.route, key.key)


def _check_body(key: AnswerKey, body_hash: str) -> None:
    if body_hash != key.body_hash:
        raise Refusal(
            "idempotency_key_reused",
            f"the Idempotency-Key {key.key[:80]!r} came with another body of {key.route} within 24 hours. "
            "Make a new key for each new request.",
        )
