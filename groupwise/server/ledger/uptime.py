"""Tracks how long a server has been up with this ledger, over all its processes. Leases are measured by it.

It continues from the last stored value, so that nothing expires while a server is down. The server calls `tick` every few seconds; a
kill -9 loses the time since the last one, in the clients' favour.
"""

from __future__ import annotations

import json
import sqlite3

from groupwise.server.ledger.transaction import Transaction

TICK_SECONDS = 2.0
"""How often a server should call `tick`: so much of a lease is given away for nothing by a kill -9."""


def tick(transaction: Transaction) -> float:
    """Keep the uptime as it is now; returns it."""
    transaction.execute(
        "INSERT OR REPLACE INTO meta (key, value) VALUES ('uptime', ?)",
        (json.dumps(transaction.uptime),),
    )
    return transaction.uptime


def stored(connection: sqlite3.Connection) -> float:
    """The last stored uptime in seconds; 0 in a new ledger."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'uptime'").fetchone()
    return 0.0 if row is None else json.loads(row[0])
