"""Numbered events of the server, for clients that follow it live; and counters of a run.

An event is added in the transaction of the change that it reports, so clients never see an event whose change is not on disk. Ids increase
by one; a client that asks for events after an id and finds a gap knows that some are no longer kept.

The counters of a run are increased in the same way, in the transaction of the work that they count, so a restart loses none. `/status`
shows `completion_requests_served` and `reward_requests_served`; refusals are counted as `refused/<problem code>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.runs.encoding import pack_json, unpack_json
from groupwise.server.ledger.transaction import LARGEST_INTEGER, Transaction

MAX_EVENTS = 10_000
"""Number of events kept; a client that was away for longer reads the status again."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    id: int
    run: str | None
    """None: it belongs to no run."""
    kind: str
    data: dict[str, Any]
    at: float
    """Seconds since 1970."""


def add_event(transaction: Transaction, run: str | None, kind: str, data: Mapping[str, Any]) -> int:
    """Add an event; returns its id."""
    added = transaction.insert(
        "events", run=run, kind=kind, data=pack_json(data), at=transaction.now
    )
    transaction.execute("DELETE FROM events WHERE id <= ?", (added - MAX_EVENTS,))
    return added


def add_event_once(transaction: Transaction, run: str, kind: str, data: Mapping[str, Any]) -> None:
    """Add an event, unless the run already has an equal one among the kept events."""
    existing = transaction.first(
        "SELECT 1 FROM events WHERE run = ? AND kind = ? AND data = ?", (run, kind, pack_json(data))
    )
    if existing is None:
        add_event(transaction, run, kind, data)


def events_after(transaction: Transaction, event: int, limit: int) -> list[Event]:
    """Up to `limit` events after this one, oldest first; 0 starts with the first."""
    rows = transaction.all(
        "SELECT id, run, kind, data, at FROM events WHERE id > ? ORDER BY id LIMIT ?",
        (min(event, LARGEST_INTEGER), limit),
    )
    return [Event(number, run, kind, unpack_json(data), at) for number, run, kind, data, at in rows]


def newest_events(transaction: Transaction, limit: int) -> list[Event]:
    """The newest events, newest first."""
    return events_after(transaction, max(last_event(transaction) - limit, 0), limit)[::-1]


def last_event(transaction: Transaction) -> int:
    """The id of the newest event; 0 before the first."""
    return transaction.value("SELECT coalesce(max(id), 0) FROM events")


COMPLETION_REQUESTS = "completion_requests_served"
REWARD_REQUESTS = "reward_requests_served"


def count(transaction: Transaction, run: str, name: str, by: int = 1) -> None:
    """Increase a counter of a run."""
    transaction.execute(
        """INSERT INTO counters (run, name, value) VALUES (?, ?, ?)
        ON CONFLICT (run, name) DO UPDATE SET value = value + excluded.value""",
        (run, name, by),
    )


def counters_of(transaction: Transaction, run: str) -> dict[str, int]:
    """All counters of a run by name, without those that were never increased."""
    rows = transaction.all("SELECT name, value FROM counters WHERE run = ? ORDER BY name", (run,))
    return dict(rows)
