"""From exit records to failure classes."""

import pytest

from groupwise.jobs.hosts.answers import ExitReason, ExitRecord
from groupwise.jobs.hosts.failures import FailureClass, classify


def record(
    code: int | None = 1,
    *,
    signal: int | None = None,
    reason: ExitReason = ExitReason.EXITED,
    tail: str = "",
    oom_kill: int = 0,
    gpus: int | None = 1,
) -> ExitRecord:
    return ExitRecord(
        code=code, signal=signal, reason=reason, oom_kill=oom_kill, seconds=1.0, tail=tail, gpus=gpus
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        (record(1), FailureClass.CRASHED),
        (record(None, signal=11), FailureClass.CRASHED),
        (record(2), FailureClass.USER_ERROR),
        (record(78), FailureClass.USER_ERROR),
        (record(75), FailureClass.NETWORK),
        (record(75, reason=ExitReason.TIME_LIMIT), FailureClass.TIME_LIMIT),
        (record(None, signal=9), FailureClass.KILLED),
        (record(137), FailureClass.KILLED),
        (record(None, signal=9, oom_kill=1), FailureClass.HOST_OOM),
        (record(None, signal=15), FailureClass.PREEMPTION),
        (record(143), FailureClass.PREEMPTION),
        (record(None, signal=15, reason=ExitReason.TIME_LIMIT), FailureClass.TIME_LIMIT),
        (record(0, reason=ExitReason.TIME_LIMIT), FailureClass.TIME_LIMIT),
        (record(None, signal=15, reason=ExitReason.DEADMAN), FailureClass.HOST_LOST),
        (record(None, reason=ExitReason.SPAWN_FAILED), FailureClass.LAUNCH_FAILURE),
        (record(125, reason=ExitReason.SPAWN_FAILED), FailureClass.LAUNCH_FAILURE),
        (record(126, reason=ExitReason.SPAWN_FAILED), FailureClass.USER_ERROR),
        (record(None, signal=9, reason=ExitReason.CANCELLED), FailureClass.KILLED),
        (record(tail="torch.OutOfMemoryError: CUDA out of memory. Tried"), FailureClass.GPU_OOM),
        (record(tail="MemoryError\n"), FailureClass.HOST_OOM),
        (record(tail="RuntimeError: uncorrectable ECC error encountered"), FailureClass.GPU_FAULT),
        (record(tail="NVRM: Xid (PCI:0000:01:00): 79"), FailureClass.GPU_FAULT),
        (record(tail="GPU is lost", gpus=0), FailureClass.CRASHED),
        (record(tail="GPU is lost", gpus=None), FailureClass.GPU_FAULT),  # a runner of before does not say
        (record(tail="slurmstepd: CANCELLED AT x DUE TO PREEMPTION"), FailureClass.PREEMPTION),
        (record(tail="urllib3: Max retries exceeded with url: /x"), FailureClass.NETWORK),
        (record(tail="ConnectionResetError: once\n" + "step\n" * 30 + "AssertionError"), FailureClass.CRASHED),
        (record(64, tail="ConnectionError: hub"), FailureClass.USER_ERROR),
    ],
)  # fmt: skip
def test_classes(given: ExitRecord, failure: FailureClass) -> None:
    assert classify(given).failure is failure


def test_gpu_problems_of_the_machine_outrank_the_log() -> None:
    found = classify(record(tail="CUDA out of memory"), gpu_problems=["GPU 3 has vanished"])
    assert (found.failure, found.because) == (FailureClass.GPU_FAULT, "GPU 3 has vanished")


# what follows
