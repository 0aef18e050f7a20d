"""Retries: the next status of a job whose attempt has failed. Pure functions.

A runner leaves an exit record and the last bytes of the log; the control plane knows which machine was lost or rebooted. From these comes a
failure class (`groupwise.jobs.hosts.failures`). In the transaction that ends the attempt, `after_end` decides the job's next status:
completed, cancelled, failed for good, or queued again, with a delay.

A failure is charged if the job may be at fault: two such retries are allowed. Losing a machine, a GPU or a race for one is not the job's
fault and is not charged, but is counted as well, because a job that brings down every machine must come to an end.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.core.retry import doubled
from groupwise.jobs.fleet.states import JobStatus, Outcome
from groupwise.jobs.hosts.failures import FailureClass


@dataclass(frozen=True, slots=True)
class Budget:
    """The number of retries after a class of failure."""

    charged: bool
    """True if it counts towards the retries that a job has for all failures that may be its own fault."""
    most: int | None = None
    """Retries after this class; None: as many as the charged ones allow."""


BUDGETS: Mapping[FailureClass, Budget] = {
    FailureClass.GPU_OOM: Budget(charged=True, most=1),
    FailureClass.HOST_OOM: Budget(charged=True),
    FailureClass.GPU_FAULT: Budget(charged=False, most=4),  # on other GPUs, if there are any
    FailureClass.NETWORK: Budget(charged=False, most=5),
    FailureClass.PREEMPTION: Budget(charged=False),
    FailureClass.REBOOT: Budget(charged=True),
    FailureClass.HOST_LOST: Budget(charged=False),
    FailureClass.SUPERVISOR_LOST: Budget(charged=True),
    FailureClass.LAUNCH_FAILURE: Budget(charged=False, most=5),
    FailureClass.NOT_PROVIDED: Budget(charged=False, most=5),  # a secret may be put back
    FailureClass.TIME_LIMIT: Budget(charged=False, most=0),
    FailureClass.USER_ERROR: Budget(charged=False, most=0),
    FailureClass.KILLED: Budget(charged=True, most=1),
    FailureClass.CRASHED: Budget(charged=True),
    FailureClass.ARTEFACTS: Budget(charged=False, most=0),
}
CHARGED_RETRIES = 2
FREE_RETRIES = 30
"""Failures of machines within one generation after which the job is taken to be their cause."""
REFUSED_LAUNCH = frozenset({FailureClass.LAUNCH_FAILURE, FailureClass.NOT_PROVIDED})
"""Failures to launch: nothing has run, so even a job that is to run once may be launched again."""
TAKEN = "taken"
"""Key in `jobs.spent` in addition to the classes: launches that found their GPUs taken. Their number is not limited; it sets the delay."""
BACKOFF_BASE, BACKOFF_CAP = 10.0, 600.0
"""Backoff after the first failure, and its maximum, in seconds."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retries that a job's submitter allows."""

    charged: int = CHARGED_RETRIES
    per_class: Mapping[FailureClass, int] = field(default_factory=dict[FailureClass, int])
    """Overrides of `Budget.most`."""
    smaller_batch: bool = False
    """True: it may start again with a smaller batch when the GPU's memory was too small."""
    once: bool = False
    """True: once its command has started, it is never started again, no matter how it ended."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The facts that decide the job's next status when its attempt has ended."""

    cancel_requested: bool = False
    spent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The column `jobs.spent`: failures of this generation by class, `charged` and `free`."""
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    hopeless: bool = False
    """The launch was refused for a reason that lies in the job, and is the same on every machine."""
    same_machine: bool = False
    """The machine that refused the launch had refused it before: while the others are busy, a machine that starts nothing is the only
    choice."""
    taken: bool = False
    """Another attempt holds the resources of this one and will release them: this is not a failure."""
    steps_back: bool = False
    """The checkpoint to resume from is damaged. The next attempt uses the one before, or none; checkpoints are few, so this ends."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job's next status and its reason; written in one transaction with the end of its attempt."""

    status: JobStatus
    reason: str | None = None
    """The reason as a message, stored in `jobs.failure_reason`."""
    delay: float = 0.0
    """Seconds before it may be claimed again."""
    charged: bool = False
    spent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    counts_as_retry: bool = False
    """The next attempt follows a failure: `retry_count` rises."""


def after_end(
    job: JobFacts,
    outcome: Outcome,
    failure: FailureClass | None,
    because: str,
    rng: random.Random,
) -> Verdict:
    """Decide the job's next status. A success remains one, even if cancellation was requested meanwhile."""
    if outcome is Outcome.SUCCEEDED:
        return Verdict(JobStatus.COMPLETED, spent=job.spent)
    if job.cancel_requested or outcome is Outcome.CANCELLED:
        return Verdict(JobStatus.CANCELLED, spent=job.spent)
    if failure is None:
        # It never ran, and nothing is at fault.
        return Verdict(JobStatus.QUEUED, because, spent=job.spent)
    if job.hopeless:
        return Verdict(
            JobStatus.FAILED,
            f"{failure}: {because} (never tried again: it would be refused for the same reason)",
            spent=counted(job.spent, failure),
        )
    has_run = outcome is not Outcome.VOID
    if job.steps_back and not _retry_forbidden(job.policy, has_run):
        reason = f"{failure}: {because}"
        return Verdict(JobStatus.QUEUED, reason, spent=job.spent, counts_as_retry=True)
    if job.taken and not _retry_forbidden(job.policy, has_run):
        spent = {**job.spent, TAKEN: job.spent.get(TAKEN, 0) + 1}
        return Verdict(
            JobStatus.QUEUED,
            f"{failure}: {because}",
            delay=backoff(spent[TAKEN], rng),
            spent=spent,
            counts_as_retry=True,
        )
    is_same_machine = job.same_machine and failure is FailureClass.LAUNCH_FAILURE
    spent = counted(job.spent, failure, again=is_same_machine)
    if refusal := _retry_forbidden(job.policy, has_run) or _budget_exhausted(
        job.policy, failure, spent
    ):
        return Verdict(
            JobStatus.FAILED,
            f"{failure}: {because} ({refusal})",
            charged=BUDGETS[failure].charged,
            spent=spent,
        )
    return Verdict(
        JobStatus.QUEUED,
        f"{failure}: {because}",
        delay=backoff(spent["free"] if is_same_machine else spent[failure], rng),
        charged=BUDGETS[failure].charged,
        spent=spent,
        counts_as_retry=True,
    )


def counted(
    spent: Mapping[str, Any], failure: FailureClass, *, again: bool = False
) -> dict[str, Any]:
    """`jobs.spent` after one more failure of this class. `again`: it counts among all failures, but not for its class."""
    kind = "charged" if BUDGETS[failure].charged else "free"
    return {
        **spent,
        str(failure): spent.get(failure, 0) + (0 if again else 1),
        kind: spent.get(kind, 0) + 1,
    }


def _retry_forbidden(policy: RetryPolicy, has_run: bool) -> str | None:
    """The reason why a job that has run is not run again, even if its machine was at fault; None: it may, since it never started."""
    return "the job allows no second execution" if policy.once and has_run else None


def _budget_exhausted(
    policy: RetryPolicy, failure: FailureClass, spent: Mapping[str, Any]
) -> str | None:
    """The reason why there is no further attempt; None: there is one. `spent` includes the failure that has just happened."""
    budget = BUDGETS[failure]
    if failure is FailureClass.GPU_OOM and not policy.smaller_batch:
        return "not tried again: the same batch would not fit either, and the job does not allow a smaller one"
    max_retries = policy.per_class.get(failure, budget.most)
    if max_retries == 0:
        return "never tried again"
    if max_retries is not None and spent[failure] > max_retries:
        return (
            "its one retry after this failure is used"
            if max_retries == 1
            else f"retries after this failure: all {max_retries} used"
        )
    if budget.charged and spent["charged"] > policy.charged:
        if policy.charged == 0:
            return "no retries are allowed"
        return (
            "its one retry is used"
            if policy.charged == 1
            else f"retries: all {policy.charged} used"
        )
    free_limits = (most for name, most in policy.per_class.items() if not BUDGETS[name].charged)
    if not budget.charged and spent["free"] > max(FREE_RETRIES, *free_limits, 0):
        return f"machines have failed under it {spent['free']} times; it is taken to be the cause"
    return None


def backoff(failures: int, rng: random.Random) -> float:
    """Seconds to wait after the n-th failure of a kind: full jitter, to separate jobs that failed together."""
    return rng.uniform(0.0, doubled(BACKOFF_BASE, failures, BACKOFF_CAP))
