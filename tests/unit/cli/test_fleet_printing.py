"""Lists and states of a fleet in a terminal of eighty columns: no line is wider, and none is broken within a word."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len

from groupwise.cli.fleet_printing import (
    engine_line,
    print_job,
    print_jobs,
    print_machines,
    print_status,
)

WIDTH = 80
NOW = 1_800_000_000.0
BEFORE = "2027-01-15T06:12:13+00:00"
"""Some hours before."""
JOB: dict[str, Any] = {
    "job_id": "job-66pluv6gasxw",
    "project": "default",
    "name": "a night of sums",
    "status": "failed",
    "job_type": "COMMAND",
    "assigned_vm": "gpu-machine-of-the-third-floor",
    "gpu_index": "0,1,2,3",
    "created_at": BEFORE,
    "start_time": BEFORE,
    "end_time": None,
    "exit_code": 137,
    "cancel_requested_at": None,
    "failure_reason": "host_oom: the kernel killed 3 of its processes",
    "retry_count": 0,
}
VM: dict[str, Any] = {
    "vm_id": "gpu-1",
    "state": "untrusted",
    "transport": "ssh",
    "ip_address": "gpu-machine.of-the-third-floor.example.org",
    "port": 2222,
    "user": "groupwise",
    "total_gpus": 8,
    "available_gpus": 7,
    "gpus": [{"model": "NVIDIA H100 80GB HBM3", "held_by": []}],
    "cpu_slots_held_by": [],
    "projects": None,
    "facts": {"cpus": 192, "ram_mb": 2_000_000.0},
    "seen_fingerprint": "SHA256:hIcmdlS41SlyqC0Ac9BXa0q8cnJ1w1VvQ8V0Ru4Yl1c",
    "problem": None,
}


Printed = Callable[..., list[str]]
"""What prints, and what it is given -> the lines in a terminal."""


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    def lines(how: Callable[..., None], *what: Any) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(WIDTH))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        how(*what)
        found = capsys.readouterr().out.splitlines()
        assert max(map(cell_len, found)) <= WIDTH, "\n".join(found)
        return found

    return lines


def test_jobs(printed: Printed) -> None:
    short = {**JOB, "job_id": "job-2", "assigned_vm": "gpu-1", "gpu_index": None}
    wide = {**short, "job_id": "job-3", "project": "\u65e5\u672c" * 20, "name": "\u8a9e" * 60}
    for jobs in ([JOB], [JOB, short], [JOB, short, wide]):
        head, first, *others = printed(print_jobs, jobs, NOW)
        assert head.split()[:3] == ["job", "status", "kind"]
        assert first.startswith("job-66pluv6gasxw  failed (137)  COMMAND  ")
        assert " gpu-mac" in first
        assert re.search(r" \d+ h  .* \d+ h  |\d+ h  +\d+ h  ", first)
        assert first.endswith("\u2026")
        assert len(others) == len(jobs) - 1


def test_machines(printed: Printed) -> None:
    _, line = printed(print_machines, [VM])
    assert line.startswith("gpu-1    untrusted  groupwi…")
    assert " 2 TB " in line


def test_status(printed: Printed) -> None:
    host = "control-machine-of-the-third-floor"
    message = "h2 does not answer: [Errno 111] Connect call failed ('127.0.0.1', 22222), and its jobs are left as they are"
    remedy = "mend the machine or the network; `groupwise fleet vm lost h2` only if it never comes back to life, whatever it was"
    counts = ("queued", "pending", "held", "running", "completed", "failed", "cancelled")
    found = printed(
        print_status,
        {
            "jobs": dict.fromkeys(counts, 10_000),
            "machines": {"ready": 1, "total": 2, "gpus": 8, "gpus_available": 3},
            "processes": [
                {"role": role, "host": host, "pid": 4_194_304, "alive": True}
                for role in ("dispatcher", "poller")
            ],
            "alarms": [{"message": message, "remedy": remedy}],
        },
    )
    alarm = found.index(next(line for line in found if line.startswith("! ")))
    text = " ".join(line[2:].strip() for line in found[alarm:])
    assert text == f"{message} \u2192 {remedy}"
    assert found[1].startswith("          ")
    assert [line[:10].strip() for line in found if line[:1].isalpha()] == [
        "jobs",
        "machines",
        "running",
    ]


SHOWN = {
    **dict.fromkeys(("priority", "resources", "submitted_by", "generation", "log_path")),
    **JOB, "arguments": ["true"], "waiting": [], "attempts": [], "events": [],
}  # fmt: skip


def checkpoints_of(printed: Printed, **more: Any) -> list[str]:
    return [line for line in printed(print_job, {**SHOWN, **more}, NOW) if "mirrored" in line]


def test_what_a_job_would_go_on_from_is_shown(printed: Printed) -> None:
    step = {"step": 500, "mirrored_at": NOW - 180.0, "damaged_at": None}
    older, damaged = {**step, "step": 450}, {**step, "step": 510, "damaged_at": NOW}
    assert checkpoints_of(printed, checkpoints=[]) == []
    assert checkpoints_of(printed) == []  # of an API of before
    (line,) = checkpoints_of(printed, checkpoints=[damaged, step, older])
    assert line.split(maxsplit=1) == ["checkpoints", "step 500, mirrored 3 min ago; and 1 older"]


ELASTIC: dict[str, Any] = {
    **VM,
    "vm_id": "slurm",
    "state": "ok",
    "gpus": [],
    "total_gpus": 0,
    "engine": {
        "name": "slurm",
        "gpus": 4,
        "gpu_model": "a100",
        "gpu_memory_mb": 80_000,
        "options": ["--partition=gpu", "--comment=two words"],
    },
    "total_slots": 8,
    "available_slots": 6,
    "python": "/env/bin/python",
}


def test_what_stands_behind_a_machine(printed: Printed) -> None:
    _, line = printed(print_machines, [ELASTIC])
    assert " 6/8 slots " in line
    assert " a100 " in line
    assert engine_line(ELASTIC) == (
        "slurm: 6 of 8 slots free, GPUs for a job: 4, a100, 80 GB, --partition=gpu '--comment=two words'"
    )
    assert engine_line({**ELASTIC, "engine": {"name": "slurm"}}) == (
        "slurm: 6 of 8 slots free, GPUs for a job: none"
    )
    assert engine_line(VM) is None
