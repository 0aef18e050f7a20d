"""Kills a worker with its whole process tree, and ends a process together with its parent.

A worker leads its own process group, so one signal reaches everything that it forked. A process that left the group (`setsid`, daemons)
is found on Linux by a marker in its environment, which children inherit. Not covered: a process that left the group *and*
was started with another environment; on systems other than Linux, any process that left the group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

MARK = "GROUPWISE_REWARD_WORKER"
"""The environment variable that marks a worker and its descendants; its value is unique for each worker."""

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
PLAIN = {
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONHASHSEED": "0",  # the order of a set, and hash(text), are the same in every worker and every run
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of a helper process: one computing thread, and deterministic hashing."""
ENVIRONMENT = {**PLAIN, **NO_GPU}
"""Environment of a worker."""

_PR_SET_PDEATHSIG = 1
_ROUNDS = 20
"""How often the process table is searched again for processes started meanwhile."""


def kill_process_tree(leader: int, mark: str) -> None:
    """Kill the process group of `leader` (not yet reaped) and every process with this `mark`."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    kill_marked(mark)


def kill_marked(mark: str) -> None:
    """Kill every process with this `mark`, except this one."""
    for _ in range(_ROUNDS):
        marker, own_id = f"{MARK}={mark}".encode(), str(os.getpid())
        process_ids: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile, or is another user's
                if folder.name != own_id and marker in (folder / "environ").read_bytes().split(
                    b"\0"
                ):
                    process_ids.append(int(folder.name))
        for process_id in process_ids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, signal.SIGKILL)
        if not process_ids:
            return


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True if it has ended. Does not reap it: its process id must stay taken until its group is killed."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    if process.returncode is not None:
        return True
    try:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, flags) is not None
    except ChildProcessError:  # other code in this program reaps every child
        return True


def describe_exit(code: int | None) -> str:
    """Describes a return code in words, for messages."""
    if code is None:
        return "it does not react to being killed"
    if code >= 0:
        return f"exit code {code}"
    signal_numbers = {s.value for s in signal.Signals}
    name = signal.Signals(-code).name if -code in signal_numbers else f"signal {-code}"
    return f"{name}, perhaps because memory ran out" if name == "SIGKILL" else name


def tie_to_parent(parent: int, mark: str) -> None:
    """Make this worker, and everything that it will start, end when `parent` does, even if either of them is killed.

    On Linux the kernel kills this process when its parent has ended. A forked guard waits for the end of this process
    and then kills the rest. On other systems a worker only notices that its socket was closed.
    """
    if not sys.platform.startswith("linux"):
        return
    # If memory runs out, this process ends before its parent, which reports it.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    guarded = os.getpid()
    guard = os.fork()
    if guard == 0:
        try:
            # Blocked first: sigwait then cannot miss it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
                with suppress(OSError):
                    os.close(descriptor)
            signal_when_parent_ends(signal.SIGTERM, guarded)
            signal.sigwait({signal.SIGTERM})
        finally:
            kill_marked(mark)
            os._exit(0)
    os.setpgid(guard, guard)  # the guard must outlive the group that is killed
    signal_when_parent_ends(signal.SIGKILL, parent)


def signal_when_parent_ends(number: int, parent: int) -> None:
    """Make the kernel send this process a signal when the thread of `parent` that started it ends. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os.kill(os.getpid(), number)
