"""The record of clients' sessions and of the models that they trained; it stays when a session ends.

The tables of `calls.py` hold what open sessions need and are emptied when a session ends. These two are only added to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.runs.encoding import pack_json, unpack_json
from groupwise.server.ledger.transaction import Row, Transaction


@dataclass(frozen=True, slots=True)
class TrainingRunRow:
    """A model that a client has trained."""

    id: str
    owner: str
    """Id of the API key that opened its session; empty if an earlier version of this server recorded it."""
    spec: dict[str, Any]
    user_metadata: dict[str, str] | None
    last_request_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A client's session, open or ended."""

    id: str
    display_name: str | None
    user_metadata: dict[str, str] | None
    training_runs: list[str]
    samplers: list[str]
    """Only of an open session."""


def record_session(
    transaction: Transaction,
    id: str,
    owner: str,
    display_name: str | None,
    user_metadata: Mapping[str, str] | None,
) -> None:
    """Record a new session."""
    transaction.insert(
        "session_history",
        id=id,
        owner=owner,
        display_name=display_name,
        user_metadata=None if user_metadata is None else pack_json(user_metadata),
        created_at=transaction.now,
    )


def record_training_run(
    transaction: Transaction,
    id: str,
    session: str,
    spec: Mapping[str, Any],
    user_metadata: Mapping[str, str] | None,
) -> None:
    """Record a created model; repeating it is harmless."""
    metadata = None if user_metadata is None else pack_json(user_metadata)
    transaction.execute(
        """INSERT OR IGNORE INTO training_runs (id, session, spec, user_metadata, created_at, last_request_at)
        SELECT ?, id, ?, ?, ?, ? FROM session_history WHERE id = ?""",
        (id, pack_json(spec), metadata, transaction.now, transaction.now, session),
    )


def record_request(transaction: Transaction, id: str) -> None:
    """Note that a client has sent a request to a model; ids of samplers change nothing."""
    transaction.execute(
        "UPDATE training_runs SET last_request_at = ? WHERE id = ?", (transaction.now, id)
    )


_RUN_COLUMNS = """SELECT runs.id, session_history.owner, runs.spec, runs.user_metadata, runs.last_request_at
    FROM training_runs runs JOIN session_history ON session_history.id = runs.session"""


def training_run(transaction: Transaction, id: str) -> TrainingRunRow | None:
    """One model; None if there never was one of this id."""
    row = transaction.first(f"{_RUN_COLUMNS} WHERE runs.id = ?", (id,))
    return None if row is None else _training_run(row)


def training_runs(
    transaction: Transaction, limit: int, offset: int
) -> tuple[list[TrainingRunRow], int]:
    """A part of all models, the newest first, and the number of all."""
    rows = transaction.all(
        f"{_RUN_COLUMNS} ORDER BY runs.position DESC LIMIT ? OFFSET ?", (limit, offset)
    )
    return [_training_run(row) for row in rows], transaction.value(
        "SELECT count(*) FROM training_runs"
    )


def session(transaction: Transaction, id: str) -> SessionRow | None:
    """One session, also if it has ended; None if there never was one of this id."""
    row = transaction.first(
        "SELECT display_name, user_metadata FROM session_history WHERE id = ?", (id,)
    )
    if row is None:
        return None
    runs, samplers = (
        [row_id for (row_id,) in transaction.all(query, (id,))]
        for query in (
            "SELECT id FROM training_runs WHERE session = ? ORDER BY position",
            "SELECT id FROM verb_samplers WHERE session = ? ORDER BY position",
        )
    )
    name, metadata = row
    return SessionRow(id, name, None if metadata is None else unpack_json(metadata), runs, samplers)


def session_ids(transaction: Transaction, limit: int, offset: int) -> list[str]:
    """Ids of a part of all sessions, open and ended, the newest first."""
    rows = transaction.all(
        "SELECT id FROM session_history ORDER BY position DESC LIMIT ? OFFSET ?", (limit, offset)
    )
    return [id for (id,) in rows]


def _training_run(row: Row) -> TrainingRunRow:
    id, owner, spec, metadata, last_request_at = row
    return TrainingRunRow(
        id,
        owner,
        unpack_json(spec),
        None if metadata is None else unpack_json(metadata),
        last_request_at,
    )
