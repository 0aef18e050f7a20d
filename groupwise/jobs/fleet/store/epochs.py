"""Epochs number attempts. They come from a sequence of the database, so a later one is always higher.

A database that was restored from a backup would assign numbers again that machines have seen already, and two attempts of one job could
have one name. So when a machine reports a number that this database has not reached, the sequence is raised above it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sqlalchemy import text
from sqlalchemy.orm import Session

MAX_AHEAD = 10_000_000
"""Epochs further ahead than this are ignored: numbers are finite, and a job may create a folder with any number."""

log = logging.getLogger(__name__)

_LAST = {
    "sqlite": "SELECT COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'attempts'), 0)",
    "postgresql": "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM attempts_epoch_seq",
}


def raise_above(session: Session, epochs: Iterable[int]) -> bool:
    """Raise the sequence above the epochs that a machine knows; returns whether any of them had not been assigned here.

    An epoch that is too far ahead is ignored, and does not hide the others.
    """
    numbers = [epoch for epoch in epochs if epoch > 0]
    if not numbers:
        return False
    kind = session.get_bind().dialect.name
    last_assigned: int = session.execute(text(_LAST[kind])).scalar_one()
    highest = max(
        (epoch for epoch in numbers if epoch <= last_assigned + MAX_AHEAD), default=last_assigned
    )
    if highest <= last_assigned:
        return False
    if kind == "postgresql":
        # One at a time: an epoch is a primary key, so a job that gets the same one meanwhile is refused at worst.
        session.execute(text("SELECT pg_advisory_xact_lock(hashtext('groupwise.epochs'))"))
        session.execute(
            text(
                "SELECT setval('attempts_epoch_seq', GREATEST(last_value, :seen)) FROM attempts_epoch_seq"
            ),
            {"seen": highest},
        )
    else:
        # The row exists only once SQLite has numbered the first attempt; else it is inserted below.
        raise_sequence = text(
            "UPDATE sqlite_sequence SET seq = :seen WHERE name = 'attempts' RETURNING seq"
        )
        if session.execute(raise_sequence, {"seen": highest}).first() is None:
            insert_sequence = text(
                "INSERT INTO sqlite_sequence (name, seq) VALUES ('attempts', :seen)"
            )
            session.execute(insert_sequence, {"seen": highest})
    log.warning(
        "a machine has seen attempt %d, and this database had given out %d: it was set back, and counts on from there",
        highest,
        last_assigned,
    )
    return True
