"""The states of jobs and attempts, and which may follow which: the one table that code and database obey.

A job waits (queued, pending, held), runs, and ends (completed, failed, cancelled). While it runs it has exactly one live attempt; an
attempt is one execution, identified by its epoch, and no epoch is used twice. `triggers.py` makes triggers of these tables, so no program,
and no user at a prompt, can make a transition that is not listed here.

    job       queued → pending → queued → running → completed | failed | cancelled | queued (again)
              queued | pending ⇄ held
    attempt   reserved → launching → running → collecting → ended

In addition to its state, an attempt has properties that are not states: whether its machine answers (`contact`), whether its cancellation
was requested, and whether its resources were found free again (`cleanup`). An attempt that has ended keeps its reservations until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class JobStatus(StrEnum):
    """The status of a job: the values of the column `jobs.status`."""

    QUEUED = "queued"
    """May be claimed, once its `not_before` has come."""
    PENDING = "pending"
    """No suitable machine or GPU is free; `blocked_reasons` holds the reasons. A change of capacity wakes it."""
    HELD = "held"
    """Waits because an operator, or the user who submitted it, put it on hold."""
    RUNNING = "running"
    """Has one live attempt."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    """The state of an attempt: the values of the column `attempts.state`."""

    RESERVED = "reserved"
    """Claimed in the database; no machine has been contacted."""
    LAUNCHING = "launching"
    """A launch request may have been sent; only the machine's runner knows whether it arrived."""
    RUNNING = "running"
    """The runners of all members have reported that it runs."""
    COLLECTING = "collecting"
    """The command has ended; log and artefacts are being fetched."""
    ENDED = "ended"


class Outcome(StrEnum):
    """How an attempt ended: the column `attempts.outcome`."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """It ended with a failure class."""
    CANCELLED = "cancelled"
    VOID = "void"
    """It never ran, and never will: the runner acknowledged `void`, or nothing was ever sent."""


class Cleanup(StrEnum):
    """Whether the resources of an attempt are free again: the column `attempts.cleanup`."""

    PENDING = "pending"
    CLEAN = "clean"
    LEAKING = "leaking"
    """The attempt still holds a GPU, which is not used again; the machine's operator is alerted."""


class Contact(StrEnum):
    """Whether a machine answers: the columns `vms.contact` and `attempts.contact`."""

    NEW = "new"
    OK = "ok"
    UNREACHABLE = "unreachable"
    UNTRUSTED = "untrusted"
    """Its host key is not pinned, or differs from the pinned one."""


class Observed(StrEnum):
    """The observed state of a GPU: the column `gpus.observed`. Anything but `ok` takes no new job."""

    OK = "ok"
    FOREIGN_BUSY = "foreign_busy"
    MISSING = "missing"
    DEGRADED = "degraded"
    MIG = "mig"


JOB_BEGINS = frozenset({JobStatus.QUEUED, JobStatus.HELD, JobStatus.FAILED})
"""Statuses that a new row may have; failed is for an invalid job, with its reason."""

JOB_MOVES: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.QUEUED: frozenset(
        {
            JobStatus.PENDING,
            JobStatus.RUNNING,
            JobStatus.HELD,
            JobStatus.CANCELLED,
            JobStatus.FAILED,
        }
    ),
    JobStatus.PENDING: frozenset({JobStatus.QUEUED, JobStatus.HELD, JobStatus.CANCELLED}),
    JobStatus.HELD: frozenset({JobStatus.QUEUED, JobStatus.CANCELLED}),
    JobStatus.RUNNING: frozenset(
        {JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.QUEUED}
    ),
    JobStatus.COMPLETED: frozenset(),
    JobStatus.FAILED: frozenset({JobStatus.QUEUED}),
    JobStatus.CANCELLED: frozenset({JobStatus.QUEUED}),
}
"""Only `retry` leads out of failed and cancelled, with a new generation: a trigger demands that `generation` rises by one."""

RETRIED_FROM = frozenset({JobStatus.FAILED, JobStatus.CANCELLED})
FINAL = frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED})
"""The final statuses of a generation."""

ATTEMPT_BEGINS = frozenset({AttemptState.RESERVED})

ATTEMPT_MOVES: Mapping[AttemptState, frozenset[AttemptState]] = {
    AttemptState.RESERVED: frozenset({AttemptState.LAUNCHING, AttemptState.ENDED}),
    AttemptState.LAUNCHING: frozenset({AttemptState.RUNNING, AttemptState.ENDED}),
    AttemptState.RUNNING: frozenset({AttemptState.COLLECTING, AttemptState.ENDED}),
    AttemptState.COLLECTING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}
