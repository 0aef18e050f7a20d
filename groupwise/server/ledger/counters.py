"""Counters of a run, increased in the transaction of the work that they count, so a restart loses none.

`/status` shows `completion_requests_served` and `reward_requests_served`; refusals are counted as `refused/<problem code>`.
"""

from __future__ import annotations

from groupwise.server.ledger.transaction import Transaction

COMPLETION_REQUESTS = "completion_requests_served"
REWARD_REQUESTS = "reward_requests_served"


def count(transaction: Transaction, run: str, name: str, by: int = 1) -> None:
    """Increase a counter of a run."""
    transaction.execute(
        """INSERT INTO counters (run, name, value) VALUES (?, ?, ?)
        ON CONFLICT (run, name) DO UPDATE SET value = value + excluded.value""",
        (run, name, by),
    )


def count_refusal(transaction: Transaction, run: str, code: str) -> None:
    """Count a refused request by its problem code."""
    count(transaction, run, f"refused/{code}")


def counters_of(transaction: Transaction, run: str) -> dict[str, int]:
    """All counters of a run by name, without those that were never increased."""
    rows = transaction.all("SELECT name, value FROM counters WHERE run = ? ORDER BY name", (run,))
    return dict(rows)
