"""Epochs, which number attempts: from a sequence of the database, so that a later one is always higher.

A database that was restored from a backup would give out again what machines have seen already, and two attempts of one job could have
one name. Whoever meets a number on a machine that this database has not reached raises the sequence above it.
"""

from __future__ import annotations

import logging

from sqlalchemy import text
from sqlalchemy.orm import Session

MOST_AHEAD = 10_000_000
"""A machine that tells of more than so many attempts since the backup is not believed: numbers end."""

log = logging.getLogger(__name__)

_LAST = {
    "sqlite": "SELECT COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'attempts'), 0)",
    "postgresql": "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM attempts_epoch_seq",
}


def raise_above(session: Session, seen: int) -> bool:
    """Whether `seen`, the highest epoch that a machine knows, had not been given out here; from now on it counts as if it had."""
    kind = session.get_bind().dialect.name
    last: int = session.execute(text(_LAST[kind])).scalar_one()
    if not last < seen <= last + MOST_AHEAD:
        return False
    if kind == "postgresql":
        # One at a time: an epoch is a primary key, so that whoever is given one meanwhile is refused at worst.
        session.execute(text("SELECT pg_advisory_xact_lock(hashtext('groupwise.epochs'))"))
        session.execute(
            text(
                "SELECT setval('attempts_epoch_seq', GREATEST(last_value, :seen)) FROM attempts_epoch_seq"
            ),
            {"seen": seen},
        )
    else:
        # Only of use where there is a line; the first attempt makes it.
        raised = text(
            "UPDATE sqlite_sequence SET seq = :seen WHERE name = 'attempts' RETURNING seq"
        )
        if session.execute(raised, {"seen": seen}).first() is None:
            made = text("INSERT INTO sqlite_sequence (name, seq) VALUES ('attempts', :seen)")
            session.execute(made, {"seen": seen})
    log.warning(
        "a machine has seen attempt %d, and this database had given out %d: it was set back, and goes on above that",
        seen,
        last,
    )
    return True
