"""Responses by Idempotency-Key: a request repeated within a day gets the same response as the first time.

A client that only counts its retries gets a key of the server's (`InFlightRequests.key_for`): a retry has the key of an earlier request
with the same body, whose response did not reach its client.

A key is unique per API key and route. The response is written in the transaction of the work (`run_idempotent`), so there is never one
without the other. Errors are not stored, so a retry can succeed once their cause is gone. If a request waits for a step, its stored
response is 202 Accepted; a retry waits for the same step.

`InFlightRequests` covers the time before the response is committed: a request waits if one with the same key is already being handled. If
the first request is refused, or its client disconnects, the next one does the work itself. Work before the transaction (sampling) may still
be done twice, by two servers or after a kill; the ledger keeps the result that is stored first, and gives its response to both.

The conversations of /v1/responses are kept as long: each response with all messages up to it, so that another can go on from it. A
response belongs to the API key that asked for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from operator import itemgetter

from groupwise.api.schemas.idempotency import AnswerKey
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.runs.encoding import pack_json, unpack_json
from groupwise.server.ledger.transaction import Transaction
from groupwise.tasks.openai.responses import KeptResponse

RETENTION_SECONDS = 24 * 3600.0
"""How long a response is kept, in seconds of server uptime, which clock jumps do not change. The column `made_at` is uptime too; after a
kill -9 it may be some seconds ahead of the uptime, which continues from the last stored value.
"""

MAX_UNDELIVERED = 1000
"""Limit on the requests without a delivered response whose retries are awaited; the oldest are forgotten."""

Claim = Callable[[AnswerKey], Awaitable[str | None]]
"""Finds the stored response that a retry repeats, and gives its key to this retry alone; see `storing.claim_answer`."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The response that a client received."""

    status: int
    body: bytes


def stored_response(transaction: Transaction, caller: Caller) -> StoredResponse | None:
    """The stored response to this request; None if there is none, or if the request has no key. Refuses with `idempotency_key_reused` if
    the body was different.
    """
    key = caller.answer_key
    if key is None:
        return None
    row = transaction.first(
        """SELECT body_hash, status, body FROM answers
        WHERE key_id = ? AND route = ? AND key = ? AND made_at > ?""",
        (caller.key_id, key.route, key.key, transaction.uptime - RETENTION_SECONDS),
    )
    if row is None:
        return None
    body_hash, status, body = row
    _check_body(key, body_hash)
    return StoredResponse(status, body)


def run_idempotent(
    transaction: Transaction, caller: Caller, work: Callable[[], StoredResponse | None]
) -> StoredResponse | None:
    """Do the work and store its response, both or neither; if a response to the request is stored already, return that one instead.

    If the work raises or returns None, nothing is stored and the request may be repeated. Without a key the work is done unconditionally.
    """
    key = caller.answer_key
    if (stored := stored_response(transaction, caller)) is not None:
        return stored
    response = work()
    if key is not None and response is not None:
        transaction.execute(
            """INSERT OR REPLACE INTO answers (key_id, route, key, body_hash, retries, status, body, made_at)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?)""",
            (
                *(caller.key_id, key.route, key.key, key.body_hash, key.retries),
                *(response.status, response.body, transaction.uptime),
            ),
        )
    return response


def delete_expired(transaction: Transaction) -> int:
    """Delete the expired answers, and the expired responses of `/v1/responses`; returns their number."""
    oldest = transaction.uptime - RETENTION_SECONDS
    return sum(
        transaction.execute(f"DELETE FROM {table} WHERE made_at <= ?", (oldest,)).rowcount
        for table in ("answers", "responses")
    )


class InFlightRequests:
    """The requests with an Idempotency-Key that are being handled now, in one event loop."""

    def __init__(self) -> None:
        self._requests: dict[
            tuple[str, str, str], tuple[AnswerKey, asyncio.Future[StoredResponse | None]]
        ] = {}
        """Key and future of the response, by API key, route and Idempotency-Key."""
        self._undelivered: dict[tuple[str, str, str], AnswerKey] = {}
        """Likewise the keys made here of requests that were refused, or whose client disconnected before the whole response was sent, and
        that were not sent again yet.
        """

    def note_delivery(self, caller: Caller, key: AnswerKey, delivered: bool) -> None:
        """Note that the request with this key, made here, has ended; unless its response was delivered, a retry may have its key."""
        if not delivered:
            self._undelivered[_request_id(caller, key)] = key
            if len(self._undelivered) > MAX_UNDELIVERED:
                del self._undelivered[next(iter(self._undelivered))]

    async def key_for(
        self, caller: Caller, sent: AnswerKey, claim: Claim, *, lost_only: bool
    ) -> str | None:
        """The key of the request that `sent` repeats; None if there is none that was answered.

        First come requests whose response was not delivered, the most often sent before the others. With `lost_only` there are no others:
        separate calls may have this body, and a response that was delivered belongs to one of them. Else come, newest first, responses that
        are still to be rewarded, then requests under way, whose end is awaited.
        """
        assert sent.retries, "it is a retry"
        while True:
            lost = [
                (key.retries or 0, id)
                for id, key in self._undelivered.items()
                if _is_repeated_by(id, key, caller, sent)
            ]
            if lost:
                _, id = max(lost, key=itemgetter(0))
                key = self._undelivered.pop(id)
                return await claim(replace(sent, key=key.key))
            if lost_only:
                return None
            # Taken before the claim: a request that ends while the claim is looked for is awaited too, and its response is then found.
            repeated = self._repeated_by(caller, sent)
            if (claimed := await claim(replace(sent, key=""))) is not None:
                return claimed
            under_way = repeated or self._repeated_by(caller, sent)
            if under_way is None:
                return None
            await asyncio.shield(under_way)

    def _repeated_by(
        self, caller: Caller, sent: AnswerKey
    ) -> asyncio.Future[StoredResponse | None] | None:
        """The future response of the first request under way that `sent` repeats; None if there is none."""
        for id, (key, future) in self._requests.items():
            if _is_repeated_by(id, key, caller, sent):
                return future
        return None

    async def wait_for_first(self, caller: Caller) -> StoredResponse | None:
        """Wait for the response to a request in progress with this key; None if there is none, so the caller must do the work.

        Refuses with `idempotency_key_reused` if that request has a different body.
        """
        while (key := caller.answer_key) and (
            entry := self._requests.get(_request_id(caller, key))
        ):
            first, future = entry
            _check_body(key, first.body_hash)
            # Several requests may wait for this future, so one that is cancelled must not cancel it.
            if (response := await asyncio.shield(future)) is not None:
                return response
        return None

    @asynccontextmanager
    async def register(
        self, caller: Caller
    ) -> AsyncGenerator[asyncio.Future[StoredResponse | None]]:
        """Register as the request that others with this key wait for. The caller sets its response, if any, in the future."""
        future: asyncio.Future[StoredResponse | None] = asyncio.get_running_loop().create_future()
        key = caller.answer_key
        if key is not None:
            self._requests[_request_id(caller, key)] = (key, future)
        try:
            yield future
        finally:
            if key is not None:
                del self._requests[_request_id(caller, key)]
            if not future.done():
                future.set_result(None)


def _request_id(caller: Caller, key: AnswerKey) -> tuple[str, str, str]:
    return (caller.key_id, key.route, key.key)


def _is_repeated_by(
    id: tuple[str, str, str], key: AnswerKey, caller: Caller, sent: AnswerKey
) -> bool:
    return (
        id[:2] == (caller.key_id, sent.route)
        and key.body_hash == sent.body_hash
        and key.retries is not None
        and key.retries < (sent.retries or 0)
    )


def _check_body(key: AnswerKey, body_hash: str) -> None:
    if body_hash != key.body_hash:
        raise Refusal(
            "idempotency_key_reused",
            f"the Idempotency-Key {key.key[:80]!r} came with another body of {key.route} within 24 hours. "
            "Make a new key for each new request.",
        )


def keep_response(transaction: Transaction, caller: Caller, kept: KeptResponse) -> None:
    """Keep a response, in the transaction that its completion is stored in."""
    transaction.execute(
        "INSERT OR REPLACE INTO responses (id, key_id, response, messages, made_at) VALUES (?, ?, ?, ?, ?)",
        (
            *(kept.response["id"], caller.key_id),
            *(pack_json(kept.response), pack_json(kept.messages), transaction.uptime),
        ),
    )


def read_response(
    transaction: Transaction, caller: Caller, id: str, field: str = "response_id"
) -> KeptResponse:
    """A kept response. Refuses with `unknown_response`, which names `field`."""
    row = transaction.first(
        "SELECT response, messages FROM responses WHERE id = ? AND key_id = ? AND made_at > ?",
        (id, caller.key_id, transaction.uptime - RETENTION_SECONDS),
    )
    if row is None:
        problem = (
            f"there is no response {id[:200]!r} of this key: it was never kept (`store: false`), was deleted, or is older than a day. "
            "Repeat the conversation as `input`"
        )
        raise Refusal("unknown_response", f"{field}: {problem}.", field=field, problem=problem)
    return KeptResponse(unpack_json(row[0]), unpack_json(row[1]))


def delete_response(transaction: Transaction, caller: Caller, id: str) -> None:
    """Delete a kept response; those that went on from it stay. Refuses with `unknown_response`."""
    read_response(transaction, caller, id)
    transaction.execute("DELETE FROM responses WHERE id = ?", (id,))
