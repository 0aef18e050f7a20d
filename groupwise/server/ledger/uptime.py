"""Tracks how long a server has been up with this ledger, over all its processes. Leases are measured in this time.

It continues from the last stored value, so nothing expires while a server is down. The server calls `tick` every few seconds; after a kill
-9 the time since the last tick is not counted, so leases last slightly longer.
"""

from __future__ import annotations

import json
import sqlite3

from groupwise.server.ledger.transaction import Transaction

TICK_SECONDS = 2.0
"""Seconds between calls of `tick`: a kill -9 extends leases by at most this much."""


def tick(transaction: Transaction) -> float:
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
