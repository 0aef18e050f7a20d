"""Sessions, models, samplers and calls of clients that train through the Tinker API, with each call's outcome; see
`groupwise.server.tinker`.

A call is stored before it is acknowledged, and its result before the client gets it. A client's loop therefore survives the end of any
process: the engine's models are recreated from their last kept state by repeating the calls that followed it (`calls_to_repeat`); a new
server restores the sessions, models and samplers, and does the calls that still wait.

A call's content is deleted once it will not be repeated; its outcome is deleted when its session ends or too many are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.runs.encoding import pack_json, unpack_json
from groupwise.server.ledger.training_runs import (
    record_request,
    record_session,
    record_training_run,
)
from groupwise.server.ledger.transaction import Transaction

CallState = Literal["waiting", "answered", "failed"]


@dataclass(frozen=True, slots=True)
class StepRow:
    """An update of a model."""

    learning_rate: float
    grad_norm: float | None
    """None: it was not finite."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call."""

    state: CallState
    media_type: str
    """Media type of the answer; for a failure, the party at fault: `user` or `server`."""
    body: bytes
    """The answer; for a failure, the message."""
    changed: bool = False
    """True if the call changed the model; it is then repeated after an engine loss, even if it failed."""
    kept: int | None = None
    """The number of this call, if the model's state was kept after it."""
    step: StepRow | None = None
    """The update, if the call was one."""
    sums: Mapping[str, float] | None = None
    """Sums of the model's gradient passes since its last update, after this call; None: as before."""


@dataclass(frozen=True, slots=True)
class CallRow:
    """An accepted call. The fields are in the order of `CALL_COLUMNS`."""

    id: str
    session: str
    line: str
    """The model or sampler within which `sequence` is unique."""
    sequence: int
    kind: str
    digest: bytes
    content: bytes | None
    state: CallState = "waiting"
    media_type: str | None = None
    body: bytes | None = None


CALL_COLUMNS = "id, session, line, sequence, kind, digest, content, state, media_type, body"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A created model."""

    id: str
    session: str
    spec: dict[str, Any]
    kept: int | None
    done: int
    """Number of its last call that has a result; -1 if there is none."""
    sums: dict[str, float]
    """Sums of its gradient passes since the last update."""


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """A created sampler."""

    id: str
    session: str
    base: str
    weights: dict[str, Any] | None
    """Model, kind and name of the saved weights; None: the base without an adapter."""


def add_session(
    transaction: Transaction,
    id: str,
    name: str | None,
    owner: str = "",
    display_name: str | None = None,
    user_metadata: Mapping[str, str] | None = None,
) -> str:
    """Open a session. Returns the id of an earlier session with the same `name` (Idempotency-Key), if there is one. `owner` is the id of
    the API key.
    """
    existing = transaction.value("SELECT id FROM verb_sessions WHERE name = ?", (name,))
    if existing is None:
        transaction.insert("verb_sessions", id=id, name=name)
        record_session(transaction, id, owner, display_name, user_metadata)
    return existing or id


def end_session(transaction: Transaction, id: str) -> None:
    """Delete a session with its models, samplers and calls; the models' steps stay."""
    transaction.execute("DELETE FROM verb_sessions WHERE id = ?", (id,))


def add_model(
    transaction: Transaction,
    id: str,
    session: str,
    spec: Mapping[str, Any],
    user_metadata: Mapping[str, str] | None = None,
) -> None:
    """Record a created model; repeating it is harmless."""
    transaction.execute(
        "INSERT OR IGNORE INTO verb_models (id, session, spec) SELECT ?, id, ? FROM verb_sessions WHERE id = ?",
        (id, pack_json(spec), session),
    )
    record_training_run(transaction, id, session, spec, user_metadata)


def add_sampler(
    transaction: Transaction, id: str, session: str, base: str, weights: Mapping[str, str] | None
) -> None:
    """Record a created sampler; repeating it is harmless."""
    transaction.execute(
        "INSERT OR IGNORE INTO verb_samplers (id, session, base, weights) SELECT ?, id, ?, ? FROM verb_sessions WHERE id = ?",
        (id, base, None if weights is None else pack_json(weights), session),
    )


def insert_call(transaction: Transaction, call: CallRow) -> None:
    """Store a call. It is ignored if its session has ended meanwhile."""
    transaction.execute(
        """INSERT INTO verb_calls (id, session, line, sequence, kind, digest, content)
        SELECT ?, id, ?, ?, ?, ?, ? FROM verb_sessions WHERE id = ?""",
        (call.id, call.line, call.sequence, call.kind, call.digest, call.content, call.session),
    )
    record_request(transaction, call.line)


def record_outcome(transaction: Transaction, id: str, outcome: Outcome) -> None:
    """Store a call's outcome, and delete contents that need not be repeated any more."""
    row = transaction.first("SELECT line, sequence FROM verb_calls WHERE id = ?", (id,))
    if row is None:  # its session has ended
        return
    queue, sequence = row
    transaction.execute(
        """UPDATE verb_calls SET state = ?, changed = ?, media_type = ?, body = ?,
        content = CASE WHEN ? THEN content END WHERE id = ?""",
        (
            *(outcome.state, outcome.changed, outcome.media_type, outcome.body),
            *(outcome.changed, id),
        ),
    )
    if (step := outcome.step) is not None:
        transaction.insert(
            "verb_steps",
            model=queue,
            step=transaction.value("SELECT count(*) FROM verb_steps WHERE model = ?", (queue,)),
            learning_rate=step.learning_rate,
            grad_norm=step.grad_norm,
            metrics=pack_json(step.metrics),
            at=transaction.now,
        )
    if outcome.sums is not None:
        sums = pack_json(outcome.sums)
        transaction.execute("UPDATE verb_models SET sums = ? WHERE id = ?", (sums, queue))
    if outcome.kept is not None:
        transaction.execute("UPDATE verb_models SET kept = ? WHERE id = ?", (outcome.kept, queue))
        transaction.execute(
            "UPDATE verb_calls SET content = NULL WHERE line = ? AND sequence <= ? AND content IS NOT NULL AND state <> 'waiting'",
            (queue, sequence),
        )


def calls_to_repeat(transaction: Transaction, model: str, after: int) -> list[tuple[str, bytes]]:
    """Kind and content of the calls after this number that changed the model, in order."""
    rows = transaction.all(
        """SELECT kind, content FROM verb_calls
        WHERE line = ? AND sequence > ? AND changed AND state <> 'waiting' ORDER BY sequence""",
        (model, after),
    )
    return [(kind, content) for kind, content in rows]


def delete_answers(transaction: Transaction, ids: Sequence[str]) -> None:
    """Delete answers that are no longer needed. Calls that may be repeated stay, and so does the last call of each line, whose number
    `all_models` reads.
    """
    for id in ids:
        transaction.execute(
            """DELETE FROM verb_calls WHERE id = ? AND content IS NULL AND EXISTS
            (SELECT 1 FROM verb_calls later WHERE later.line = verb_calls.line AND later.sequence > verb_calls.sequence
            AND later.state <> 'waiting')""",
            (id,),
        )


def steps_of(transaction: Transaction, model: str) -> list[StepRow]:
    """The recorded updates of a model, in order."""
    rows = transaction.all(
        "SELECT learning_rate, grad_norm, metrics FROM verb_steps WHERE model = ? ORDER BY step",
        (model,),
    )
    return [StepRow(rate, norm, unpack_json(metrics)) for rate, norm, metrics in rows]


def steps_done(transaction: Transaction) -> dict[str, int]:
    """Number of updates, by model."""
    return dict(transaction.all("SELECT model, count(*) FROM verb_steps GROUP BY model"))


# --- read by a new server, each in order of arrival -----------------------------------------------


def all_sessions(transaction: Transaction) -> list[str]:
    """Ids of the open sessions."""
    return [id for (id,) in transaction.all("SELECT id FROM verb_sessions ORDER BY position")]


def all_models(transaction: Transaction) -> list[ModelRow]:
    """The models of all open sessions."""
    rows = transaction.all(
        """SELECT id, session, spec, kept, coalesce(
            (SELECT max(sequence) FROM verb_calls WHERE line = verb_models.id AND state <> 'waiting'), -1), sums
        FROM verb_models ORDER BY position"""
    )
    return [
        ModelRow(id, session, unpack_json(spec), kept, done, unpack_json(sums) if sums else {})
        for id, session, spec, kept, done, sums in rows
    ]


def all_samplers(transaction: Transaction) -> list[SamplerRow]:
    """The samplers of all open sessions."""
    rows = transaction.all("SELECT id, session, base, weights FROM verb_samplers ORDER BY position")
    return [
        SamplerRow(id, session, base, None if weights is None else unpack_json(weights))
        for id, session, base, weights in rows
    ]


def all_calls(transaction: Transaction) -> list[CallRow]:
    """The calls of all open sessions, with and without an outcome."""
    rows = transaction.all(f"SELECT {CALL_COLUMNS} FROM verb_calls ORDER BY position")
    return [CallRow(*row) for row in rows]
