"""The open transaction and the current time, passed to each operation on the ledger.

An operation is a plain function whose first parameter is a `Transaction`. It may call other operations; all their changes are committed
together, or not at all. It must not keep a reference to the transaction, start or end one, or wait for anything.

Leases are measured in uptime: how long a server has been up with this ledger, over all its processes. It continues from the last stored
value, so nothing expires while a server is down. The server calls `store_uptime` every few seconds; after a kill -9 the time since the last
call is not counted, so leases last slightly longer.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

Row = tuple[Any, ...]

LARGEST_INTEGER = 2**63 - 1
"""SQLite's largest integer."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """An open transaction on the ledger. All operations of one commit see the same two times."""

    connection: sqlite3.Connection
    now: float
    """Seconds since 1970."""
    uptime: float
    """Seconds for which a server has been up with this ledger, over all its processes. Leases are measured in this time."""

    def execute(self, statement: str, values: Row = ()) -> sqlite3.Cursor:
        """Run one statement."""
        return self.connection.execute(statement, values)

    def all(self, query: str, values: Row = ()) -> list[Row]:
        """All rows of a query."""
        return self.connection.execute(query, values).fetchall()

    def first(self, query: str, values: Row = ()) -> Row | None:
        """The first row of a query, or None."""
        return self.connection.execute(query, values).fetchone()

    def value(self, query: str, values: Row = ()) -> Any:
        """The first column of the first row; None if there is no row."""
        row = self.first(query, values)
        return None if row is None else row[0]

    def insert(self, table: str, **columns: Any) -> int:
        """Add one row; returns its row id."""
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        added = self.execute(
            f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(columns.values())
        ).lastrowid
        assert added is not None
        return added


TICK_SECONDS = 2.0
"""Seconds between calls of `store_uptime`: a kill -9 extends leases by at most this much."""


def store_uptime(transaction: Transaction) -> float:
    """Store the current uptime; returns it."""
    transaction.execute(
        "INSERT OR REPLACE INTO meta (key, value) VALUES ('uptime', ?)",
        (json.dumps(transaction.uptime),),
    )
    return transaction.uptime


def stored_uptime(connection: sqlite3.Connection) -> float:
    """The last stored uptime in seconds; 0 in a new ledger."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'uptime'").fetchone()
    return 0.0 if row is None else json.loads(row[0])
