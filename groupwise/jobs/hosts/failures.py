"""Classifies failures: turns the runner's exit record into a failure class, with the evidence that decided it.

The job itself writes its log, so the log is not trusted. It affects how often a job is retried and what users read, but never the
decision whether something still runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from groupwise.core.terminal.text import one_line, shorten
from groupwise.jobs.hosts.answers import ExitReason, ExitRecord


class FailureClass(StrEnum):
    """Why an attempt failed: the column `attempts.failure_class`."""

    GPU_OOM = "gpu_oom"
    """The GPU ran out of memory."""
    HOST_OOM = "host_oom"
    """The machine ran out of memory."""
    GPU_FAULT = "gpu_fault"
    """The GPU is faulty. If its machine reports the fault, or a second job shows it, the GPU gets no job until an operator has looked."""
    NETWORK = "network"
    """A network service, such as a model hub or a data source, could not be reached; also exit code 75."""
    PREEMPTION = "preemption"
    """The machine was taken away, with notice."""
    REBOOT = "reboot"
    """The machine was rebooted."""
    HOST_LOST = "host_lost"
    """An operator declared the machine lost, or the job's deadman ended it."""
    SUPERVISOR_LOST = "supervisor_lost"
    """The command's supervisor was killed, so it is not known how the command ended."""
    LAUNCH_FAILURE = "launch_failure"
    """The machine refused to start it; nothing ran."""
    NOT_PROVIDED = "not_provided"
    """The control plane lacks a secret or a file that the job needs; nothing ran, and no machine is at fault."""
    TIME_LIMIT = "time_limit"
    USER_ERROR = "user_error"
    """The job reports an invalid request: exit code 2, or 64 to 78 except 75. Or its own program cannot be executed."""
    KILLED = "killed"
    """Ended by signal 9 of unknown origin."""
    CRASHED = "crashed"
    """Any other exit code than 0."""
    ARTEFACTS = "artefacts"
    """The command succeeded, but its output files could not be fetched completely."""


def has_succeeded(record: ExitRecord) -> bool:
    """True if the command ended by itself with exit code 0. A command that exits with 0 because it was stopped has not done its work."""
    return record.code == 0 and record.reason is ExitReason.EXITED


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failure class and the evidence for it."""

    failure: FailureClass
    because: str


SIGKILL, SIGTERM = 9, 15
_TRY_LATER = 75
"""EX_TEMPFAIL of sysexits: a service did not answer, and may answer at the next try."""
_USER_CODES = frozenset({2, *range(64, 79)} - {_TRY_LATER})
"""Argument parsers exit with 2; 64 to 78 is the range of sysexits.h."""
_NOT_EXECUTABLE = frozenset({126, 127})
"""The runner's codes for a program that cannot be executed or found, although it began; 125 is a fault of the machine."""
_SHELL_KILLED = 128 + SIGKILL
_SHELL_TERMINATED = 128 + SIGTERM
_BY_REASON = {
    ExitReason.TIME_LIMIT: FailureClass.TIME_LIMIT,
    ExitReason.DEADMAN: FailureClass.HOST_LOST,
    ExitReason.SPAWN_FAILED: FailureClass.LAUNCH_FAILURE,
    ExitReason.CANCELLED: FailureClass.KILLED,
    ExitReason.EVICTED: FailureClass.PREEMPTION,
}
"""Failure classes if the runner itself ended the command, or could not start it."""

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
"""Most characters of a log line that is shown as the reason."""
_LAST_LINES = 20
"""How many lines at a log's end are searched for some causes: the job may have recovered from earlier connection errors."""


def classify(record: ExitRecord, *, gpu_problems: Sequence[str] = ()) -> Diagnosis:
    """Decide from its exit record why a command failed. `gpu_problems`: faults that the machine reports about the GPUs of the job."""
    if failure := _BY_REASON.get(record.reason):
        if record.reason is ExitReason.SPAWN_FAILED and record.code in _NOT_EXECUTABLE:
            failure = FailureClass.USER_ERROR
        return Diagnosis(failure, record.message or f"the runner says {record.reason}")
    by_code = f"exit code {record.code}"
    if record.code in _USER_CODES:
        return Diagnosis(FailureClass.USER_ERROR, _with_last_line(by_code, record))
    if record.code == _TRY_LATER:
        because = _with_last_line(f"{by_code}, it may succeed later", record)
        return Diagnosis(FailureClass.NETWORK, because)
    if gpu_problems:
        return Diagnosis(FailureClass.GPU_FAULT, gpu_problems[0])
    if record.oom_kill:
        because = f"the kernel killed {record.oom_kill} of its processes"
        return Diagnosis(FailureClass.HOST_OOM, because)
    if record.signal == SIGTERM or record.code == _SHELL_TERMINATED:
        by_signal = Diagnosis(
            FailureClass.PREEMPTION, "SIGTERM that the control plane had not sent"
        )
    elif record.signal == SIGKILL or record.code == _SHELL_KILLED:
        by_signal = Diagnosis(FailureClass.KILLED, "signal 9, and no sign of too little memory")
    elif record.signal is not None:
        by_signal = Diagnosis(FailureClass.CRASHED, f"signal {record.signal}")
    else:
        by_signal = None
    diagnosis = _classify_log(record) or by_signal
    return diagnosis or Diagnosis(FailureClass.CRASHED, _with_last_line(by_code, record))


def _classify_log(record: ExitRecord) -> Diagnosis | None:
    tail = record.tail
    last_lines = "\n".join(tail.splitlines()[-_LAST_LINES:])
    had_gpu = record.gpus != 0
    for pattern, text, failure in (
        (_GPU_FAULT, tail if had_gpu else "", FailureClass.GPU_FAULT),
        (_GPU_OOM, tail, FailureClass.GPU_OOM),
        (_PREEMPTED, tail, FailureClass.PREEMPTION),
        (_HOST_OOM, last_lines, FailureClass.HOST_OOM),
        (_NETWORK, last_lines, FailureClass.NETWORK),
    ):
        if match := pattern.search(text):
            start = text.rfind("\n", 0, match.start()) + 1
            line = text[start:].partition("\n")[0]
            return Diagnosis(failure, _shortened_line(line))
    return None


def _with_last_line(summary: str, record: ExitRecord) -> str:
    """Add the log's last line to an exit code, since the code alone says little. Programs that give up, and tracebacks, usually end with
    the reason."""
    last_line = next((line for line in reversed(record.tail.splitlines()) if line.strip()), None)
    return summary if last_line is None else f"{summary}: {_shortened_line(last_line)}"


def _shortened_line(line: str) -> str:
    return shorten(one_line(line.strip()), LONGEST_LINE)
