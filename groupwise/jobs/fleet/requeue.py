"""The requeue manager: once a minute it looks for inconsistent rows and repairs them.

Every change of a job's status is written in one transaction together with its cause, so in a healthy fleet there is nothing to find.
Inconsistent rows are left by mistakes: a row that was changed by hand, free capacity that was not announced, a bug. The manager is
level-triggered and keeps no state between two sweeps. Each repair checks again under the row's lock before it writes: a process at work on
a row is not disturbed, and several managers do each repair once.

    running without a live attempt    moves on according to its newest attempt; back into the queue if there is none
    pending, and could start          into the queue
    never admitted                    is admitted, or fails with its reason
    reserved for an attempt that is   closed: its machine was seen to hold nothing of it
      over and clean
    with an untracked attempt on a    held back for longer: the machine may be silent, and still run it
      machine
    waits longer than any pause       may start now: the database's clock was set back
    silent beyond its deadman         reported to the operator: its controller should have ended it

It never connects to a machine, and never touches a job that has a live attempt.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from typing import Any

from sqlalchemy import exists, func, select, update
from sqlalchemy.orm import Session

from groupwise.core.errors import RunError
from groupwise.jobs.fleet.attempts.decide import DEADMAN_MARGIN, Move
from groupwise.jobs.fleet.attempts.ending import verdict_on
from groupwise.jobs.fleet.queue import admission, requeue_pending, untracked_processes
from groupwise.jobs.fleet.queue.failures import BACKOFF_CAP, JobFacts, after_end
from groupwise.jobs.fleet.secrets import DEFAULT_SECRETS, AllowedSecrets
from groupwise.jobs.fleet.states import FINAL, AttemptState, Cleanup, Contact, JobStatus, Outcome
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database, clock, database_time
from groupwise.jobs.fleet.store.tables import Attempt, Event, Job, Member, Reservation
from groupwise.jobs.hosts.failures import FailureClass

INTERVAL = 60.0
"""Seconds between two sweeps."""
LONGEST_PAUSE = max(BACKOFF_CAP, untracked_processes.HELD_BACK) + 5.0
"""Longest time in seconds until a job may start, regardless of the reason for waiting."""
AT_ONCE = 100
"""Rows of one kind that are repaired in one transaction; the rest follow at once."""
ADMITTED_LATE = 120.0
"""Seconds after the end of an attempt's deadman within which its driver should have noticed."""
ACTOR = "requeue"

logger = logging.getLogger(__name__)


class RequeueManager:
    """Sweeps until it is cancelled."""

    def __init__(
        self,
        database: Database,
        *,
        interval: float = INTERVAL,
        rng: random.Random | None = None,
        secrets: AllowedSecrets = DEFAULT_SECRETS,
    ) -> None:
        self._database = database
        self._secrets = secrets
        self._interval = interval
        self._rng = rng or random.Random()

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await self.sweep()
            await asyncio.sleep(self._interval * self._rng.uniform(0.9, 1.1))

    async def sweep(self) -> dict[str, int]:
        """Repair inconsistent rows; returns how many of each kind. A repair that fails does not prevent the others."""
        repairs: dict[str, Callable[[Session], int]] = {
            "running without a live attempt": lambda s: move_strays(s, self._rng),
            "reserved for what is over": close_leaked,
            "never admitted": lambda s: min(
                admission.admit_new(s, AT_ONCE, self._secrets), AT_ONCE - 1
            ),
            "waiting although they could begin": wake_waiting,
            "still running on a machine as an attempt that no table has": hold_back,
            "waiting longer than any pause": shorten_pauses,
            "silent beyond its deadman": report_overdue,
        }
        counts: dict[str, int] = {}
        for kind, repair in repairs.items():
            try:
                counts[kind] = count = await self._database.in_thread(repair)
                while count >= AT_ONCE:
                    count = await self._database.in_thread(repair)
                    counts[kind] += count
            except RunError as error:
                logger.warning("not repaired, %s: %s", kind, error)
            except Exception:  # a fault in one kind of repair must not end the others
                logger.exception("not repaired, %s", kind)
        if any(counts.values()):
            logger.info("repaired: %s", ", ".join(f"{n} {kind}" for kind, n in counts.items() if n))
        return counts


# --- running without a live attempt ---------------------------------------------------------------


def move_strays(session: Session, rng: random.Random) -> int:
    """Give jobs that are running without a live attempt their next status; returns how many."""
    has_live_attempt = exists().where(
        Attempt.job_id == Job.job_id, Attempt.state != AttemptState.ENDED
    )
    jobs = session.scalars(
        select(Job)
        .where(Job.status == JobStatus.RUNNING, ~has_live_attempt)
        .order_by(Job.job_id)
        .limit(AT_ONCE)
        .with_for_update(skip_locked=True, key_share=True)
    ).all()
    # Between query and lock a dispatcher may have claimed one; a second query, with the lock held, sees that.
    job_ids = [job.job_id for job in jobs]
    busy_ids = set(
        session.scalars(
            select(Attempt.job_id).where(
                Attempt.job_id.in_(job_ids), Attempt.state != AttemptState.ENDED
            )
        )
    )
    strays = [job for job in jobs if job.job_id not in busy_ids]
    for job in strays:
        _set_next_status(session, job, rng)
    session.flush()
    if any(job.status in FINAL for job in strays):
        requeue_pending.wake(session, actor=ACTOR)  # others may wait for them
    return len(strays)


def _set_next_status(session: Session, job: Job, rng: random.Random) -> None:
    """Set the job's next status as the end of its newest attempt would have, or as if a void attempt had ended."""
    attempt = session.scalars(
        select(Attempt)
        .where(Attempt.job_id == job.job_id, Attempt.generation == job.generation)
        .order_by(Attempt.epoch.desc())
        .limit(1)
    ).first()
    if attempt is None or attempt.outcome is None:
        facts = JobFacts(job.cancel_requested_at is not None, job.spent)
        reason = "it was running without an attempt"
        verdict = after_end(facts, Outcome.VOID, None, reason, rng)
    else:
        because = str(attempt.evidence.get("because") or "its attempt has ended")
        failure = FailureClass(attempt.failure_class) if attempt.failure_class else None
        outcome, evidence = Outcome(attempt.outcome), attempt.evidence
        move = Move(AttemptState.ENDED, outcome, failure, because, evidence)
        verdict = verdict_on(session, job, attempt, move, rng)
    now = database_time(session)
    status_before, job.status = job.status, verdict.status
    job.spent = dict(verdict.spent)
    if verdict.status is JobStatus.QUEUED:
        job.not_before = max(job.not_before, now + verdict.delay)
        job.waiting_since, job.blocked_reasons = now, None
        job.retry_count += int(verdict.counts_as_retry)
    if verdict.status is JobStatus.FAILED:
        job.failure_reason = verdict.reason
    if verdict.status in FINAL:
        job.end_time = func.now()  # pyright: ignore[reportAttributeAccessIssue] — the database's clock
    events.append(
        session,
        actor=ACTOR,
        kind=f"job.{verdict.status}",
        job_id=job.job_id,
        epoch=None if attempt is None else attempt.epoch,
        before={"status": status_before},
        after={"status": verdict.status},
        detail={
            "why": "it was running without a live attempt",
            "exit_code": job.exit_code,
            "outcome": None if attempt is None else attempt.outcome,
            "failure_class": None if attempt is None else attempt.failure_class,
            "reason": verdict.reason,
            "delay": round(verdict.delay, 3),
        },
    )


# --- other repairs --------------------------------------------------------------------------------


def close_leaked(session: Session) -> int:
    """Close reservations of attempts that are over and have left nothing on any machine; returns how many."""
    leaked = (
        select(Reservation.reservation_id, Reservation.epoch, Reservation.vm_id, Attempt.job_id)
        .join(Attempt, Attempt.epoch == Reservation.epoch)
        .where(
            Reservation.released_at.is_(None),
            Attempt.state == AttemptState.ENDED,
            Attempt.cleanup == Cleanup.CLEAN,
        )
        .order_by(Reservation.reservation_id)
        .limit(AT_ONCE)
        .with_for_update(skip_locked=True, key_share=True, of=Reservation)
    )
    rows = session.execute(leaked).all()
    if not rows:
        return 0
    reservation_ids = [row.reservation_id for row in rows]
    session.execute(
        update(Reservation)
        .where(Reservation.reservation_id.in_(reservation_ids), Reservation.released_at.is_(None))
        .values(released_at=clock())
    )
    for row in rows:
        events.append(
            session,
            actor=ACTOR,
            kind=events.RESERVATION_CLOSED,
            job_id=row.job_id,
            epoch=row.epoch,
            vm_id=row.vm_id,
            detail={"why": "its attempt is over, and its machine holds nothing of it"},
        )
    requeue_pending.wake(session, vm_ids={row.vm_id for row in rows}, actor=ACTOR)
    return len(rows)


def wake_waiting(session: Session) -> int:
    """Wake jobs that could start now and were not woken; one batch in each sweep."""
    return min(requeue_pending.wake(session, actor=ACTOR), AT_ONCE - 1)


def hold_back(session: Session) -> int:
    """Hold back jobs of untracked attempts that were last seen on machines now silent. Counts as no repair, to avoid repeated reports."""
    silent_attempts = untracked_processes.on_machines(session, silent=True)
    untracked_processes.hold_back(session, {attempt["job_id"] for _, attempt in silent_attempts})
    return 0


def shorten_pauses(session: Session) -> int:
    """Shorten pauses that were set before the database's clock was set back; returns how many, until none is left."""
    now = database_time(session)
    late_jobs = select(Job.job_id).where(
        Job.status.in_((JobStatus.QUEUED, JobStatus.PENDING, JobStatus.HELD)),
        Job.not_before > now + LONGEST_PAUSE,
    )
    ids = session.scalars(
        late_jobs.order_by(Job.job_id)
        .limit(AT_ONCE)
        .with_for_update(skip_locked=True, key_share=True)
    ).all()
    session.execute(update(Job).where(Job.job_id.in_(ids)).values(not_before=now))
    return len(ids)


def report_overdue(session: Session) -> int:
    """Report attempts that are live although their deadman has ended them for certain; each is reported once."""
    # Events are selected by job, since there are many and no index covers their epochs.
    is_reported = exists().where(
        Event.job_id == Attempt.job_id,
        Event.epoch == Attempt.epoch,
        Event.kind == events.ATTEMPT_OVERDUE,
    )
    rows = session.execute(
        select(Attempt.job_id, Attempt.epoch, Member.vm_id, Member.handle)
        .join(Member, Member.epoch == Attempt.epoch)
        .where(
            Attempt.state != AttemptState.ENDED,
            Attempt.contact == Contact.UNREACHABLE,
            ~is_reported,
        )
        .order_by(Attempt.epoch, Member.rank)
    ).all()
    now = database_time(session)
    overdue = {
        row.epoch: row
        for row in reversed(rows)
        if _is_overdue(row.handle, now)
        and now - _adopted_at(session, row.job_id, row.epoch) > _silence_limit(row.handle)
    }
    for row in overdue.values():
        logger.error(
            "attempt %s.%d on %s is silent beyond its deadman, and no dispatcher ends it; is one running?",
            row.job_id,
            row.epoch,
            row.vm_id,
        )
        events.append(
            session,
            actor=ACTOR,
            kind=events.ATTEMPT_OVERDUE,
            job_id=row.job_id,
            epoch=row.epoch,
            vm_id=row.vm_id,
            detail={"why": "silent beyond its deadman, and not ended by a dispatcher"},
        )
    return min(len(overdue), AT_ONCE - 1)


def _is_overdue(handle: dict[str, Any], now: float) -> bool:
    since = handle.get("silent_since")
    return "deadman" in handle and since is not None and now > since + _silence_limit(handle)


def _silence_limit(handle: dict[str, Any]) -> float:
    return (handle.get("deadman") or math.inf) + DEADMAN_MARGIN + ADMITTED_LATE


def _adopted_at(session: Session, job_id: str, epoch: int) -> float:
    """Time when the attempt was last adopted, since its new owner measures silence from then; 0.0: never."""
    last_adopted = select(func.max(Event.at)).where(
        Event.job_id == job_id, Event.epoch == epoch, Event.kind == events.ATTEMPT_ADOPTED
    )
    return session.scalar(last_adopted) or 0.0
