"""Epochs, which number attempts: from a sequence of the database, so that a later one is always higher.

A database that was restored from a backup would give out again what machines have seen already, and two attempts of one job could have
one name. Whoever meets a number on a machine that this database has not reached raises the sequence above it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sqlalchemy import text
from sqlalchemy.orm import Session

MOST_AHEAD = 10_000_000
"""More attempts than that since the backup are not believed: numbers end, and a job may make a folder with any number."""

log = logging.getLogger(__name__)

_LAST = {
    "sqlite": "SELECT COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'attempts'), 0)",
    "postgresql": "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM attempts_epoch_seq",
}


def raise_above(session: Session, told: Iterable[int]) -> bool:
    """Whether any of these epochs, which a machine knows, had not been given out here; from now on they count as if they had.

    One that is not believed hides none of the others.
    """
    numbers = [epoch for epoch in told if epoch > 0]
    if not numbers:
        return False
    kind = session.get_bind().dialect.name
    last: int = session.execute(text(_LAST[kind])).scalar_one()
    seen = max((epoch for epoch in numbers if epoch <= last + MOST_AHEAD), default=last)
    if seen <= last:
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
