"""Answers by Idempotency-Key: a request that comes again within a day is answered as the first time.

A key counts per API key and route. The answer is kept in the same transaction as the work that it tells of (`once`), so that there is
never the one without the other. Two requests with one key at the same time may both do what comes before (sampling); the ledger keeps
the work of the first that gets here, and gives its answer to both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from groupwise.api.schemas.problems import Refusal
from groupwise.server.ledger.transaction import Transaction

KEPT_SECONDS = 24 * 3600.0
"""Server uptime in seconds for which an answer is kept, so a clock that jumps loses none. Earlier servers wrote wall time."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that names itself."""

    key_id: str
    """The API key that sent it."""
    route: str
    """Method and path: `POST /rewards`."""
    key: str
    """Its Idempotency-Key."""
    body_hash: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The answer that a client received."""

    status: int
    body: bytes


def stored_answer(transaction: Transaction, request: Request) -> StoredResponse | None:
    """The answer that was given to this request before. Refused as `idempotency_key_reused` if the body was another."""
    row = transaction.first(
        """SELECT body_hash, status, body FROM answers
        WHERE key_id = ? AND route = ? AND key = ? AND made_at > ? AND made_at <= ?""",
        (
            *(request.key_id, request.route, request.key),
            *(transaction.uptime - KEPT_SECONDS, transaction.uptime),
        ),
    )
    if row is None:
        return None
    body_hash, status, body = row
    if body_hash != request.body_hash:
        raise Refusal(
            "idempotency_key_reused",
            f"the Idempotency-Key {request.key[:80]!r} came with another body of {request.route} within 24 hours. "
            "Make a new key for each new request.",
        )
    return StoredResponse(status, body)


def once(
    transaction: Transaction, request: Request | None, work: Callable[[Transaction], StoredResponse]
) -> StoredResponse:
    """Do the work and keep its answer, both or none; if the request was answered before, give that answer instead.

    What the work raises is not kept: a refused request may be sent again. Without a request the work is just done.
    """
    if request is None:
        return work(transaction)
    if (before := stored_answer(transaction, request)) is not None:
        return before
    answer = work(transaction)
    transaction.execute(
        "INSERT OR REPLACE INTO answers (key_id, route, key, body_hash, status, body, made_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            request.key_id,
            request.route,
            request.key,
            request.body_hash,
            answer.status,
            answer.body,
            transaction.uptime,
        ),
    )
    return answer


def forget_old_answers(transaction: Transaction) -> int:
    """Delete the answers that are kept no longer; returns how many."""
    return transaction.execute(
        "DELETE FROM answers WHERE made_at <= ? OR made_at > ?",
        (transaction.uptime - KEPT_SECONDS, transaction.uptime),
    ).rowcount
