"""The events of a fleet: appended in the transaction that causes them, read in order, never changed.

Every change of a job, an attempt, a machine or a key appends an event, so the audit is complete or the change did not happen. Readers
(the tracker, webhooks, pages) store the number of the last event that they have handled, and ask for those `after` it.

PostgreSQL assigns numbers when rows are written, but other sessions see the rows only after commit. Number 7 may therefore become visible
before number 6, and a reader that continues from 7 would never see 6. Making writers wait for each other would cost them one flush of the
disk each. So instead, before its first event, a transaction takes a shared advisory lock whose key is the highest number assigned so far:
all its own numbers will be higher. A reader looks up the highest assigned number, then the lowest key held, and then reads no further than
either: every transaction with a number below that has ended, and its committed events are visible. The reader waits for no writer, and an
unrelated long transaction does not delay it. Numbers of transactions that were rolled back stay unused. SQLite has one writer at a time,
and its numbers follow the order of commits.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Table, func, insert, select, text
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.states import JobStatus, Observed
from groupwise.jobs.fleet.store.database import clock
from groupwise.jobs.fleet.store.engine import READS
from groupwise.jobs.fleet.store.tables import GPU, Cursor, Event

JOB_QUEUED = "job.queued"
JOB_PENDING = "job.pending"
JOB_HELD = "job.held"
JOB_RUNNING = "job.running"
JOB_COMPLETED = "job.completed"
JOB_FAILED = "job.failed"
JOB_CANCELLED = "job.cancelled"
"""The kinds up to here are `job.` and the status."""
ENDS: Mapping[str, JobStatus] = {
    JOB_COMPLETED: JobStatus.COMPLETED,
    JOB_FAILED: JobStatus.FAILED,
    JOB_CANCELLED: JobStatus.CANCELLED,
}
"""The kinds of events that end a job."""
JOB_SUBMITTED = "job.submitted"
JOB_CANCEL_REQUESTED = "job.cancel_requested"
JOB_RETRIED = "job.retried"
JOB_PRUNED = "job.pruned"
JOB_CHECKPOINT_DAMAGED = "job.checkpoint_damaged"
"""The job's next attempt resumes from an older checkpoint, or starts from scratch."""
JOB_CHECKPOINT_NOT_MIRRORED = "job.checkpoint_not_mirrored"
"""A checkpoint could not be mirrored, so the job could not resume from it on another machine."""
ATTEMPT_RESERVED = "attempt.reserved"
ATTEMPT_LAUNCHING = "attempt.launching"
ATTEMPT_RUNNING = "attempt.running"
ATTEMPT_COLLECTING = "attempt.collecting"
ATTEMPT_ENDED = "attempt.ended"
"""The kinds from `attempt.reserved` to here are `attempt.` and the state."""
ATTEMPT_ADOPTED = "attempt.adopted"
ATTEMPT_CLEAN = "attempt.clean"
ATTEMPT_LEAKING = "attempt.leaking"
ATTEMPT_UNREACHABLE = "attempt.unreachable"
ATTEMPT_REACHABLE = "attempt.reachable"
ATTEMPT_STUCK = "attempt.stuck"
ATTEMPT_UNTRACKED = "attempt.untracked"
"""A machine runs an attempt that is in no table."""
ATTEMPT_OVERDUE = "attempt.overdue"
"""The attempt has no controller, and its deadman has ended it for certain."""
RESERVATION_CLOSED = "reservation.closed"
"""A reservation had been left open by mistake."""
VM_ADDED = "vm.added"
VM_REMOVED = "vm.removed"
VM_TRUSTED = "vm.trusted"
VM_DRAINING = "vm.draining"
VM_UNDRAINED = "vm.undrained"
VM_CHANGED = "vm.changed"
VM_LOST = "vm.lost"
VM_RETURNED = "vm.returned"
"""The machine had been lost, answers, and holds nothing of given-up attempts."""
VM_UNREACHABLE = "vm.unreachable"
VM_REACHABLE = "vm.reachable"
VM_REBOOTED = "vm.rebooted"
VM_UNTRUSTED = "vm.untrusted"
GPU_REPORTED = "gpu.reported"
"""A job's log reports that the GPU is broken; another job, or its machine, must confirm that."""
GPU_QUARANTINED = "gpu.quarantined"
GPU_CLEARED = "gpu.cleared"
GPU_OBSERVED = "gpu.observed"
"""The GPU became busy with another program, went missing, or came back."""
PROJECT_CHANGED = "project.changed"
KEY_MADE = "key.made"
KEY_REVOKED = "key.revoked"

_KIND = re.compile(r"[a-z]+\.[a-z_]+")
_ANNOUNCED = "groupwise_events"
_LATER = "groupwise_events_later"
_TAG = 0x4757
"""The highest 16 bits of the keys of our advisory locks; the other 48 are the number of an event."""

_GIVEN = text("SELECT last_value - (NOT is_called)::int FROM events_event_id_seq")
_ANNOUNCE = text(
    "SELECT pg_advisory_xact_lock_shared((CAST(:tag AS bigint) << 48) | (last_value - (NOT is_called)::int)) "
    "FROM events_event_id_seq"
)
_LOWEST_HELD = text(
    "SELECT min((classid::bigint & 65535) << 32 | objid::bigint) FROM pg_locks "
    "WHERE locktype = 'advisory' AND objsubid = 1 AND classid::bigint >> 16 = :tag "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def append(
    session: Session,
    *,
    actor: str,
    kind: str,
    job_id: str | None = None,
    epoch: int | None = None,
    vm_id: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    detail: Mapping[str, Any] | None = None,
) -> int | None:
    """Append an event. Returns its number, or None within `batch`, where it has none yet. `actor` caused it (`user:ada`,
    `dispatcher:<owner>`); `before` and `after` are the changed values as JSON, without secrets."""
    assert _KIND.fullmatch(kind), f"{kind!r}: a kind of event reads like job.queued"
    row = {
        "actor": actor,
        "kind": kind,
        "job_id": job_id,
        "epoch": epoch,
        "vm_id": vm_id,
        "before": before,
        "after": after,
        "detail": detail,
    }
    if (postponed := session.info.get(_LATER)) is not None:
        postponed.append(row)
        return None
    _announce(session)
    return session.execute(_APPEND, row).scalar_one()


_TABLE: Table = Event.__table__  # pyright: ignore[reportAssignmentType] — a mapped class's table is a Table
_APPEND = insert(_TABLE).values(at=clock()).returning(_TABLE.c.event_id)
"""Built once: no other statement is executed as often."""


@contextmanager
def batch(session: Session) -> Generator[None, None, None]:
    """Collect the events appended within the block, and write them at its end, in one statement and in the same order."""
    later: list[dict[str, Any]] = []
    session.info[_LATER] = later
    try:
        yield
    finally:
        del session.info[_LATER]
    append_many(session, later)


def append_many(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append many events with one statement. Each row has `actor` and `kind`, and any of the other columns."""
    if (postponed := session.info.get(_LATER)) is not None:
        postponed.extend(rows)
    elif rows:
        _announce(session)
        now = session.execute(select(clock())).scalar_one()
        empty_row = dict.fromkeys(("job_id", "epoch", "vm_id", "before", "after", "detail"))
        # Insert into the table, not the class: the ORM would split the rows into a statement for each set of columns.
        session.execute(insert(_TABLE), [{**empty_row, "at": now, **row} for row in rows])


def append_of_jobs(
    session: Session,
    ids: Iterable[str],
    before: JobStatus,
    after: JobStatus,
    actor: str,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Append the event of this change of status for each of these jobs."""
    common_fields = {
        "actor": actor,
        "kind": f"job.{after}",
        "before": {"status": before},
        "after": {"status": after},
        "detail": detail,
    }
    append_many(session, [{**common_fields, "job_id": job_id} for job_id in ids])


def after(session: Session, position: int, limit: int) -> list[Event]:
    """The next events after `position`, at most `limit`, oldest first. A reader that continues after the last of them misses none.

    Call it within `Database.run`: a transaction with a snapshot of one moment cannot tell which numbers were committed at that moment.
    """
    query = select(Event).where(Event.event_id > position).order_by(Event.event_id).limit(limit)
    if session.get_bind().dialect.name == "postgresql":
        query = query.where(Event.event_id <= _settled_up_to(session))
    return list(session.scalars(query))


def newest(session: Session, before: float) -> int:
    """The last event that is older than `before`, in seconds since 1970. A reader that continues after it misses no later one. Call it
    like `after`.
    """
    newest_id = session.scalar(select(func.max(Event.event_id)).where(Event.at < before)) or 0
    return (
        min(newest_id, _settled_up_to(session))
        if session.get_bind().dialect.name == "postgresql"
        else newest_id
    )


def first_end_after(session: Session, reader: str) -> float | None:
    """The time when the first job ended whose end a reader has not handled; None: there is none, or no such reader."""
    position = select(Cursor.position).where(Cursor.name == reader).scalar_subquery()
    query = select(Event.at).where(Event.event_id > position, Event.kind.in_(ENDS))
    return session.scalar(query.order_by(Event.event_id).limit(1))


def recent(
    session: Session, *, job_id: str | None = None, vm_id: str | None = None, limit: int
) -> list[dict[str, Any]]:
    """The newest events of a job or a machine, oldest first, as plain data."""
    query = select(*Event.__table__.columns).order_by(Event.event_id.desc()).limit(limit)
    if job_id is not None:
        query = query.where(Event.job_id == job_id)
    if vm_id is not None:
        query = query.where(Event.vm_id == vm_id)
    return [dict(row) for row in reversed(session.execute(query).mappings().all())]


def _announce(session: Session) -> None:
    """Take the advisory lock, once in a transaction. One taken within a savepoint ends with it, and so is taken each time there."""
    if session.get_bind().dialect.name != "postgresql" or session.info.get(_ANNOUNCED):
        return
    session.execute(_ANNOUNCE, {"tag": _TAG})
    session.info[_ANNOUNCED] = not session.in_nested_transaction()


def _settled_up_to(session: Session) -> int:
    """The number up to which all transactions have ended. The order matters: numbers assigned, then locks, then the events."""
    connection = session.connection()
    assert not connection.get_execution_options().get(READS, False), (
        "events are read in Database.run: Database.read shows one moment, in which it cannot be known whether a number is still to come"
    )
    last_assigned = session.execute(_GIVEN).scalar_one()
    lowest_held = session.execute(_LOWEST_HELD, {"tag": _TAG}).scalar_one()
    return last_assigned if lowest_held is None else min(last_assigned, lowest_held)


def note_observed(
    session: Session,
    gpu: GPU,
    now: Observed,
    reason: str | None,
    *,
    actor: str,
    job_id: str | None = None,
    epoch: int | None = None,
) -> bool:
    """Record the state of a GPU that a poller or a runner observed; returns whether it is a change. Every change is an event."""
    observed_before, gpu.detail = gpu.observed, reason
    if observed_before == now:
        return False
    gpu.observed = now
    append(
        session,
        actor=actor,
        kind=GPU_OBSERVED,
        job_id=job_id,
        epoch=epoch,
        vm_id=gpu.vm_id,
        before={"observed": observed_before},
        after={"observed": now},
        detail={"index": gpu.index, "uuid": gpu.uuid, "why": reason},
    )
    return True
