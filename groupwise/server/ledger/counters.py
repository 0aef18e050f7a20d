"""Counters of a run, raised in the transaction of the work that they count, so that a restart loses none.

The names that `/status` shows are `completion_requests_served` and `reward_requests_served`; refusals are counted as
`refused/<code of the problem>`.
"""

from __future__ import annotations

from groupwise.server.ledger.transaction import Transaction

COMPLETION_REQUESTS = "completion_requests_served"
REWARD_REQUESTS = "reward_requests_served"


def count(transaction: Transaction, run: str, name: str, by: int = 1) -> None:
    """Raise a counter of a run."""
    transaction.execute(
        """INSERT INTO counters (run, name, value) VALUES (?, ?, ?)
        ON CONFLICT (run, name) DO UPDATE SET value = value + excluded.value""",
        (run, name, by),
    )


def count_refusal(transaction: Transaction, run: str, code: str) -> None:
    """Count that a request was refused, by the code of the problem."""
    count(transaction, run, f"refused/{code}")


def counters_of(transaction: Transaction, run: str) -> dict[str, int]:
    """All counters of a run by name; one that was never raised is absent."""
    rows = transaction.all("SELECT name, value FROM counters WHERE run = ? ORDER BY name", (run,))
    return dict(rows)
