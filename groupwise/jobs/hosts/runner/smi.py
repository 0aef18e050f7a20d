"""Runs the vendors' tools that list GPUs, and defines the form in which their readers (`nvidia_smi.py`, `amd_smi.py`) report them.

`Probe` calls a tool with a time limit, and several commands of it at once. A tool may be missing, hang, or print errors instead of numbers:
`ProbeOutput` and `GpuReport` say which.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.locks import take_lock
from groupwise.jobs.hosts.runner.processes import find_program

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from groupwise.jobs.hosts.runner.root import Root

MAX_ROUNDS = 4
"""Rounds of the probe that may run at once on a machine."""
TOOL_FOLDERS = "/usr/bin:/usr/sbin:/usr/local/bin:/opt/rocm/bin:/usr/lib/wsl/lib"
"""Searched after PATH: a login over SSH often lacks the last two, where ROCm and WSL have their tools."""
NUMBER = re.compile(r"(\d{1,9})(?:\.\d*)?\s*(?:MiB|MB|%|C|W)?", re.IGNORECASE)


def normalize_cell(cell: str) -> str:
    """The cell in lower case without spaces and brackets."""
    return cell.strip().strip("[]").strip().lower()


def parse_number(cell: str) -> int | None:
    """The cell as a non-negative integer, with or without a unit; None if it is not one."""
    match = NUMBER.fullmatch(cell.strip().strip("[]").strip())
    return int(match.group(1)) if match else None


def in_mb(mib: int | None) -> int | None:
    """MiB, which the tools print, as MB of a million bytes, in which jobs ask for memory."""
    return None if mib is None else mib * 2**20 // 10**6


def machine_memory_mb() -> int:
    """The memory of the machine in MB, which an integrated GPU uses too."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**6


def gpu_record(vendor: str, index: int, uuid: str, **more: Any) -> dict[str, Any]:
    """A GPU as answers show it. `visible`: its name in variables such as CUDA_VISIBLE_DEVICES. Other values are None if they are unknown;
    `problems` lists those whose absence is a fault."""
    record: dict[str, Any] = {"vendor": vendor, "index": index, "uuid": uuid, "visible": str(index)}
    unknown = ("model", "memory_mb", "memory_used_mb", "utilisation", "temperature")
    record.update(dict.fromkeys(unknown), mig=False, integrated=False, problems=[])
    record.update(more)
    total_mb, used_mb = record["memory_mb"], record["memory_used_mb"]
    if total_mb is not None and used_mb is not None and used_mb > total_mb:
        record["problems"].append(f"memory.used: {used_mb} of {total_mb} MB")
        record["memory_used_mb"] = None
    return record


class GpuReport:
    """GPUs and the processes on them, as far as a tool reported them."""

    def __init__(self, tool: str, status: str = "absent", stderr: str = "") -> None:
        self.tool, self.status, self.apps_status, self.stderr = tool, status, status, stderr
        self.gpus: list[dict[str, Any]] = []
        self.apps: list[dict[str, Any]] = []
        self.unreadable: list[str] = []
        self.lost: list[str] = []
        """Lines by which the tool says that it cannot reach a GPU."""
        self.exit: int | None = None

    def gpu(self, uuid: str) -> dict[str, Any] | None:
        """The GPU with this UUID; None if it is missing or could not be read."""
        return next((g for g in self.gpus if g["uuid"] == uuid), None)

    def summary(self) -> dict[str, Any]:
        """The outcome of the probe in the form that answers use."""
        return {
            "tool": self.tool,
            "status": self.status,
            "apps": self.apps_status,
            "lines_not_read": self.unreadable[:20],
            "lost": self.lost[:20],
            "exit": self.exit,
            "said": self.stderr.strip()[:500],
        }


def find_tool(name: str) -> str | None:
    """The path of a tool; None if the machine does not have it."""
    return find_program(name, f"{os.environ.get('PATH', os.defpath)}:{TOOL_FOLDERS}")


class ProbeOutput:
    """The outcome of one command."""

    def __init__(
        self, status: str, stdout: str = "", stderr: str = "", exit: int | None = None
    ) -> None:
        self.status, self.stdout, self.stderr, self.exit = status, stdout, stderr, exit
        """status ∈ ok, absent, failed, hung."""


class Probe:
    """Calls a tool. A process that hangs in the kernel cannot be killed, so their number is limited (MAX_ROUNDS)."""

    def __init__(self, root: Root, command: list[str], timeout: float) -> None:
        self.root, self.command, self.timeout = root, command, timeout
        self.deadline = 0.0

    def run(self, *questions: Sequence[str]) -> list[ProbeOutput]:
        """Run one command for each question, concurrently, within the timeout."""
        deadline = time.monotonic() + self.timeout
        while True:
            locks = (take_lock(self.root.lock(f"probe-{n}.lock")) for n in range(MAX_ROUNDS))
            lock = next((fd for fd in locks if fd is not None), None)
            if lock is not None:
                break
            if time.monotonic() > deadline:
                complaint = "earlier calls of it still hang"
                return [ProbeOutput("hung", stderr=complaint) for _ in questions]
            time.sleep(0.02)
        self.deadline = time.monotonic() + self.timeout
        try:
            return self._run_commands(questions, lock)
        finally:
            os.close(lock)

    def _seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _run_commands(self, questions: Sequence[Sequence[str]], lock: int) -> list[ProbeOutput]:
        import subprocess

        program = find_tool(self.command[0])
        if program is None:
            return [
                ProbeOutput("absent", stderr=f"there is no {self.command[0]}") for _ in questions
            ]
        # The tools of AMD leave out GPUs by such variables, which may come from the login's shell.
        outer = {k: v for k, v in os.environ.items() if not k.endswith("_VISIBLE_DEVICES")}
        running: list[subprocess.Popen[bytes]] = []
        try:
            for question in questions:
                running.append(  # noqa: PERF401  (one that cannot be started must not hide those before it)
                    subprocess.Popen(
                        [program, *self.command[1:], *question],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        env={**outer, "LC_ALL": "C"},
                        start_new_session=True,
                        pass_fds=(lock,),  # locked as long as any of the processes lives
                    )
                )
        except OSError as error:
            for process in running:
                end_probe(process)
            return [ProbeOutput("failed", stderr=str(error)) for _ in questions]
        streams = [s for process in running for s in (process.stdout, process.stderr) if s]
        outputs = {s.fileno(): b"" for s in streams}
        poller = select.poll()
        waiting = set(outputs)
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while waiting and self._seconds_left():
            for fd, _ in poller.poll(self._seconds_left() * 1000):
                data = os.read(fd, 65536)
                outputs[fd] += data
                if not data or len(outputs[fd]) > 1 << 22:
                    poller.unregister(fd)
                    waiting.discard(fd)
        return [self._process_output(process, outputs) for process in running]

    def _process_output(self, process: Any, outputs: dict[int, bytes]) -> ProbeOutput:
        """The outcome of one process. A process that exceeds the timeout is killed and not waited for: hanging in the kernel, it may never
        end."""
        stdout, stderr = (
            outputs[stream.fileno()].decode("utf-8", "replace")
            for stream in (process.stdout, process.stderr)
        )
        while process.poll() is None and self._seconds_left():
            time.sleep(0.005)
        code = process.poll()
        end_probe(process)
        if code is None:
            return ProbeOutput("hung", stdout, stderr)
        return ProbeOutput("failed" if code else "ok", stdout, stderr, code)


def end_probe(process: Any) -> None:
    """Kill the probe's process group and close its streams."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 0.2
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
    process.stdout.close()
    process.stderr.close()
    if process.returncode is None:
        process.returncode = -9  # suppresses Popen's warning about a child that was not waited for
