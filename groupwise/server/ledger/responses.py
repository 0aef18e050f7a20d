"""Conversations of /v1/responses: each response that is kept, with all messages up to it, so that another can go on from it.

A response belongs to the API key that asked for it, and is kept for a day of the server's uptime, like answers by Idempotency-Key.
"""

from __future__ import annotations

from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import FieldError, Refusal
from groupwise.runs.encoding import pack_json, unpack_json
from groupwise.server.ledger.idempotency import RETENTION_SECONDS
from groupwise.server.ledger.transaction import Transaction
from groupwise.tasks.openai.responses import KeptResponse


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
        "SELECT response, messages FROM responses WHERE id = ? AND key_id = ? AND made_at > ? AND made_at <= ?",
        (id, caller.key_id, transaction.uptime - RETENTION_SECONDS, transaction.uptime),
    )
    if row is None:
        problem = (
            f"there is no response {id[:200]!r} of this key: it was never kept (`store: false`), was deleted, or is older than a day. "
            "Repeat the conversation as `input`"
        )
        error = FieldError(field=field, message=problem)
        raise Refusal("unknown_response", f"{field}: {problem}.", errors=[error])
    return KeptResponse(unpack_json(row[0]), unpack_json(row[1]))


def delete_response(transaction: Transaction, caller: Caller, id: str) -> None:
    """Delete a kept response; those that went on from it stay. Refuses with `unknown_response`."""
    read_response(transaction, caller, id)
    transaction.execute("DELETE FROM responses WHERE id = ?", (id,))
