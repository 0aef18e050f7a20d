"""Why an attempt failed, and what follows for its job: pure functions of what the runner wrote down.

A runner leaves an exit record and the last bytes of the log; the control plane knows which machine was lost or rebooted. `classify` makes
a failure class of that, with the line that it believed. When the attempt ends, in the same transaction, `after_end` says where the job
goes: completed, cancelled, failed for good, or back into the queue, and not before when.

A failure is charged where the job may be at fault: two such retries are given. Losing a machine, a GPU or a race for one is not the job's
fault and costs it nothing, but it is counted as well, because a job that brings down every machine it meets must come to an end.

The log is text of the job's own making. It decides how often a job is tried again, and never whether something still runs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from groupwise.display.text import one_line, shorten
from groupwise.fleet.states import JobStatus, Outcome
from groupwise.hosts.answers import ExitReason, ExitRecord


class FailureClass(StrEnum):
    """Why an attempt failed: the column `attempts.failure_class`."""

    GPU_OOM = "gpu_oom"
    """The GPU's memory was too small."""
    HOST_OOM = "host_oom"
    """The machine's memory was."""
    GPU_FAULT = "gpu_fault"
    """The GPU is broken. It gets no job until an operator has looked, where its machine says so or a second job does."""
    NETWORK = "network"
    """A hub or a data source could not be reached; exit code 75 says so too."""
    PREEMPTION = "preemption"
    """The machine was taken away, with notice."""
    REBOOT = "reboot"
    """The machine has booted since."""
    HOST_LOST = "host_lost"
    """An operator said that the machine does not come back, or its deadman ended the job."""
    SUPERVISOR_LOST = "supervisor_lost"
    """What watched over the command was killed, so that nobody knows how it ended."""
    LAUNCH_FAILURE = "launch_failure"
    """The machine would not start it; nothing ran."""
    NOT_PROVIDED = "not_provided"
    """The control machine does not have what the job needs, a secret or a file; nothing ran, and no machine is to blame."""
    TIME_LIMIT = "time_limit"
    USER_ERROR = "user_error"
    """The job says that it was asked for something impossible: exit code 2, or 64 to 78 but 75."""
    KILLED = "killed"
    """Signal 9 from somebody unknown."""
    CRASHED = "crashed"
    """Anything else than exit code 0."""
    ARTEFACTS = "artefacts"
    """It succeeded, but what it left behind could not be fetched whole."""


def succeeded(record: ExitRecord) -> bool:
    """The command ended by itself, and well. One that says 0 because it was told to stop has not done its work."""
    return record.code == 0 and record.reason is ExitReason.EXITED


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A class, and what it was believed for."""

    failure: FailureClass
    because: str


# ---------------------------------------------------------------------------------------------------------------------------------------
# From what was seen to a class
# ---------------------------------------------------------------------------------------------------------------------------------------

SIGKILL, SIGTERM = 9, 15
_TRY_LATER = 75
"""EX_TEMPFAIL of sysexits: a hub or another service did not answer, and may the next time."""
_USER_CODES = frozenset({2, *range(64, 79)} - {_TRY_LATER})
"""2 is what argument parsers say, 64 to 78 is the band of sysexits."""
_SHELL_KILLED = 128 + SIGKILL
_SHELL_TERMINATED = 128 + SIGTERM

_GPU_FAULT = re.compile(
    r"fallen off the bus|GPU is lost|uncorrectable (?:NVLink |double.bit )?(?:ECC )?error|ECC error"
    r"|NVRM: Xid|\bXid \("
    r"|Unable to determine the device handle|hardware stack error",
    re.IGNORECASE,
)
_GPU_OOM = re.compile(
    r"CUDA out of memory|OutOfMemoryError: (?:CUDA|HIP)|CUDA error: out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUDA_ERROR_OUT_OF_MEMORY",
    re.IGNORECASE,
)
_HOST_OOM = re.compile(
    r"^MemoryError\b|Cannot allocate memory|DefaultCPUAllocator: .*(?:can't|not enough) memory|std::bad_alloc",
    re.MULTILINE,
)
_PREEMPTED = re.compile(
    r"DUE TO PREEMPTION|spot instance interruption|preemption notice", re.IGNORECASE
)
_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Could not resolve host|Max retries exceeded with url"
    r"|Connection(?:Error|ResetError|RefusedError)\b|ConnectTimeout|ReadTimeout|Network is unreachable|No route to host"
    r"|HTTP(?:Status)?Error.*\b(?:429|50[0234])\b|\b(?:502 Bad Gateway|503 Service Unavailable|504 Gateway Time-?out)\b"
)
LONGEST_LINE = 300
"""Characters of a line that is given as a reason."""
_LAST_LINES = 20
"""A log speaks of connections that were lost and found again; only what stands at its end ended the job."""


def classify(record: ExitRecord, *, gpu_problems: Sequence[str] = ()) -> Diagnosis:
    """Why a command failed that left this record. `gpu_problems`: what its machine says is wrong with the GPUs that it held."""
    return (
        _by_reason(record)
        or _by_code(record)
        or _by_machine(record, gpu_problems)
        or _by_log(record)
        or _by_signal(record)
        or Diagnosis(FailureClass.CRASHED, _with_last_line(f"exit code {record.code}", record))
    )


def _by_reason(record: ExitRecord) -> Diagnosis | None:
    """Where the runner itself ended it, or could not begin."""
    classes = {
        ExitReason.TIME_LIMIT: FailureClass.TIME_LIMIT,
        ExitReason.DEADMAN: FailureClass.HOST_LOST,
        ExitReason.SPAWN_FAILED: FailureClass.LAUNCH_FAILURE,
        ExitReason.CANCELLED: FailureClass.KILLED,
    }
    if failure := classes.get(record.reason):
        return Diagnosis(failure, record.message or f"the runner says {record.reason}")
    return None


def _by_code(record: ExitRecord) -> Diagnosis | None:
    if record.code in _USER_CODES:
        said = _with_last_line(f"exit code {record.code}", record)
        return Diagnosis(FailureClass.USER_ERROR, said)
    if record.code == _TRY_LATER:
        said = _with_last_line(f"exit code {record.code}, it may succeed later", record)
        return Diagnosis(FailureClass.NETWORK, said)
    return None


def _by_machine(record: ExitRecord, gpu_problems: Sequence[str]) -> Diagnosis | None:
    if gpu_problems:
        return Diagnosis(FailureClass.GPU_FAULT, gpu_problems[0])
    if record.oom_kill:
        return Diagnosis(
            FailureClass.HOST_OOM, f"the kernel killed {record.oom_kill} of its processes"
        )
    return None


def _by_log(record: ExitRecord) -> Diagnosis | None:
    tail = record.tail
    last = "\n".join(tail.splitlines()[-_LAST_LINES:])
    had_gpu = record.gpus != 0
    for pattern, text, failure in (
        (_GPU_FAULT, tail if had_gpu else "", FailureClass.GPU_FAULT),
        (_GPU_OOM, tail, FailureClass.GPU_OOM),
        (_PREEMPTED, tail, FailureClass.PREEMPTION),
        (_HOST_OOM, last, FailureClass.HOST_OOM),
        (_NETWORK, last, FailureClass.NETWORK),
    ):
        if match := pattern.search(text):
            return Diagnosis(failure, _line_of(text, match.start()))
    return None


def _by_signal(record: ExitRecord) -> Diagnosis | None:
    if record.signal == SIGTERM or record.code == _SHELL_TERMINATED:
        return Diagnosis(FailureClass.PREEMPTION, "SIGTERM that the control plane had not sent")
    if record.signal == SIGKILL or record.code == _SHELL_KILLED:
        return Diagnosis(FailureClass.KILLED, "signal 9, and no sign of too little memory")
    if record.signal is not None:
        return Diagnosis(FailureClass.CRASHED, f"signal {record.signal}")
    return None


def _line_of(text: str, position: int) -> str:
    begin = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return _shown(text[begin : end if end >= 0 else len(text)])


def _with_last_line(said: str, record: ExitRecord) -> str:
    """A code alone says little, and the last line is what programs end with that give up, a traceback's message too."""
    last = next((line for line in reversed(record.tail.splitlines()) if line.strip()), None)
    return said if last is None else f"{said}: {_shown(last)}"


def _shown(line: str) -> str:
    return shorten(one_line(line.strip()), LONGEST_LINE)


# ---------------------------------------------------------------------------------------------------------------------------------------
# From a class to what follows
# ---------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """How often a class of failure is tried again."""

    charged: bool
    """Counts towards the retries that a job has for everything that may be its own fault."""
    most: int | None = None
    """Retries after this class; None: as many as the charged ones allow."""


BUDGETS: Mapping[FailureClass, Budget] = {
    FailureClass.GPU_OOM: Budget(charged=True, most=1),
    FailureClass.HOST_OOM: Budget(charged=True),
    FailureClass.GPU_FAULT: Budget(charged=False, most=4),  # on other GPUs, where there are any
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
"""Of one generation: so often may machines fail under a job before it is taken to be the cause."""
TAKEN = "taken"
"""Beside the classes in `jobs.spent`: launches that found taken what they were to have. There is no end to them, they only space out."""
BACKOFF_BASE, BACKOFF_CAP = 10.0, 600.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What a job's submitter said about retries."""

    charged: int = CHARGED_RETRIES
    per_class: Mapping[FailureClass, int] = field(default_factory=dict[FailureClass, int])
    """Overrides of `Budget.most`."""
    smaller_batch: bool = False
    """May begin again with a smaller batch when the GPU's memory was too small."""
    once: bool = False
    """Once its command has begun it is never begun again, whatever became of it."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What decides where a job goes when its attempt has ended."""

    cancel_requested: bool = False
    spent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The column `jobs.spent`: failures of this generation by class, `charged` and `free`."""
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    hopeless: bool = False
    """Why it was not started is a matter of the job, and the same everywhere that it could go."""
    same_machine: bool = False
    """The machine that would not start it had refused it before: while the others are busy, one that starts nothing is all there is."""
    taken: bool = False
    """Some other attempt has what it was placed on, and gives it back one day: nobody has failed."""
    steps_back: bool = False
    """The checkpoint that it was to go on from is damaged. It begins with the one before, or without: there are only so many of them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a job goes, to be written together with the end of its attempt."""

    status: JobStatus
    reason: str | None = None
    """For people: `jobs.failure_reason`."""
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
    chance: random.Random,
) -> Verdict:
    """What follows for the job. Success is success, however late somebody wanted it cancelled."""
    if outcome is Outcome.SUCCEEDED:
        return Verdict(JobStatus.COMPLETED, spent=job.spent)
    if job.cancel_requested or outcome is Outcome.CANCELLED:
        return Verdict(JobStatus.CANCELLED, spent=job.spent)
    if failure is None:
        return Verdict(
            JobStatus.QUEUED, because, spent=job.spent
        )  # it never ran, by nobody's fault
    if job.hopeless:
        return Verdict(
            JobStatus.FAILED,
            f"{failure}: {because} (never tried again: it would be refused for the same reason)",
            spent=counted(job.spent, failure),
        )
    ran = outcome is not Outcome.VOID
    if job.steps_back and not _not_again(job.policy, ran):
        reason = f"{failure}: {because}"
        return Verdict(JobStatus.QUEUED, reason, spent=job.spent, counts_as_retry=True)
    if job.taken and not _not_again(job.policy, ran):
        spent = {**job.spent, TAKEN: job.spent.get(TAKEN, 0) + 1}
        return Verdict(
            JobStatus.QUEUED,
            f"{failure}: {because}",
            delay=backoff(spent[TAKEN], chance),
            spent=spent,
            counts_as_retry=True,
        )
    again = job.same_machine and failure is FailureClass.LAUNCH_FAILURE
    spent = counted(job.spent, failure, again=again)
    if spent_up := _not_again(job.policy, ran) or _spent_up(job.policy, failure, spent):
        return Verdict(
            JobStatus.FAILED,
            f"{failure}: {because} ({spent_up})",
            charged=BUDGETS[failure].charged,
            spent=spent,
        )
    return Verdict(
        JobStatus.QUEUED,
        f"{failure}: {because}",
        delay=backoff(spent["free"] if again else spent[failure], chance),
        charged=BUDGETS[failure].charged,
        spent=spent,
        counts_as_retry=True,
    )


def counted(
    spent: Mapping[str, Any], failure: FailureClass, *, again: bool = False
) -> dict[str, Any]:
    """`jobs.spent` after one more failure of this class. `again`: it counts among all failures, but not of its class."""
    kind = "charged" if BUDGETS[failure].charged else "free"
    return {
        **spent,
        str(failure): spent.get(failure, 0) + (0 if again else 1),
        kind: spent.get(kind, 0) + 1,
    }


def _not_again(policy: RetryPolicy, ran: bool) -> str | None:
    """Why what has run is not run again though its machine was to blame; what was never begun may be begun elsewhere."""
    return "the job allows no second execution" if policy.once and ran else None


def _spent_up(policy: RetryPolicy, failure: FailureClass, spent: Mapping[str, Any]) -> str | None:
    """Why there is no further attempt; `spent` counts the failure that has just happened."""
    budget = BUDGETS[failure]
    if failure is FailureClass.GPU_OOM and not policy.smaller_batch:
        return "not tried again: the same batch would not fit either, and the job does not allow a smaller one"
    most = policy.per_class.get(failure, budget.most)
    if most == 0:
        return "never tried again"
    if most is not None and spent[failure] > most:
        return (
            "its one retry after this failure is used"
            if most == 1
            else f"retries after this failure: all {most} used"
        )
    if budget.charged and spent["charged"] > policy.charged:
        return _charged_are_used(policy.charged)
    if not budget.charged and spent["free"] > FREE_RETRIES:
        return f"machines have failed under it {spent['free']} times; it is taken to be the cause"
    return None


def _charged_are_used(most: int) -> str:
    if most == 0:
        return "no retries are allowed"
    return "its one retry is used" if most == 1 else f"retries: all {most} used"


def backoff(failures: int, chance: random.Random) -> float:
    """Seconds to wait after the n-th failure of a kind: full jitter, so that jobs that failed together do not come back together."""
    return chance.uniform(0.0, min(BACKOFF_CAP, BACKOFF_BASE * 2.0 ** min(failures - 1, 10)))
