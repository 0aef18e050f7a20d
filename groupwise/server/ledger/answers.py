"""Answers by Idempotency-Key: a request that is sent again within a day gets the answer that it got the first time.

A key counts per API key and route. The answer is written in the transaction of the work (`once`), so there is never one without the
other. Refusals are not kept: the same request may be made again when what was in its way is gone. A request that waits for a step is
kept as accepted; a repeat waits for the same step.

`UnderWay` is for the time between: a request with the key of one that is still being answered waits for that answer. If the first is
refused, or its client goes away, the next in line does the work itself. Work before the transaction (sampling) may still be done twice,
by two servers or after a kill; the ledger keeps the work of the first that gets here, and gives its answer to both.
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
"""Server uptime in seconds for which an answer is kept, so a clock that jumps loses none. Earlier servers wrote wall time."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The answer that a client received."""

    status: int
    body: bytes


def stored_answer(transaction: Transaction, caller: Caller) -> StoredResponse | None:
    """The answer that this request got before; None also if it has no key. Refused as `idempotency_key_reused` if the body was
    another."""
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
    """Do the work and keep its answer, both or none; if the request was answered before, return that answer instead.

    Work that raises, or returns None, leaves no answer: the request may be sent again. Without a key the work is just done.
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
    """Delete the answers that are kept no longer; returns how many."""
    return transaction.execute(
        "DELETE FROM answers WHERE made_at <= ? OR made_at > ?",
        (transaction.uptime - KEPT_SECONDS, transaction.uptime),
    ).rowcount


class UnderWay:
    """The requests with an Idempotency-Key that are being answered, in one event loop."""

    def __init__(self) -> None:
        self._first: dict[
            tuple[str, str, str], tuple[str, asyncio.Future[StoredResponse | None]]
        ] = {}
        """Hash of the body, and the answer to be, by API key, route and Idempotency-Key."""

    async def answer(self, caller: Caller) -> StoredResponse | None:
        """Wait for the answer to the first request with this key; None if none is under way, and the caller must do the work.

        Refused as `idempotency_key_reused` if the first one has another body.
        """
        while (key := caller.answer_key) and (first := self._first.get(_name(caller, key))):
            body_hash, answer = first
            _check_body(key, body_hash)
            if (given := await asyncio.shield(answer)) is not None:
                return given
        return None

    @asynccontextmanager
    async def first(self, caller: Caller) -> AsyncGenerator[asyncio.Future[StoredResponse | None]]:
        """Register as the request that others wait for. The caller puts its answer, if any, into the future."""
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
