"""Finding and signalling the processes of an attempt, including those that left its process tree."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.cgroups import Cgroups
from groupwise.jobs.hosts.runner.files import read_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from groupwise.jobs.hosts.runner.root import Attempt, Root

ATTEMPT_VARIABLE = "GROUPWISE_ATTEMPT"
FOLDER_VARIABLE = "GROUPWISE_RUNNER_FOLDER"
"""Needed in addition to the attempt's name: two roots on one machine may have members of the same attempt."""
LONGEST_MARK = 200
USUAL_PATH = "/usr/local/sbin /usr/local/bin /usr/sbin /usr/bin /sbin /bin".split()


def boot_clock() -> float:
    """Seconds since the machine started, including time in suspend. No process can set this clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """The kernel's boot id, which differs after each start of the machine."""
    return read_text("/proc/sys/kernel/random/boot_id").strip()


class Process:
    """A process: the fields of /proc/<pid>/stat that are used here."""

    def __init__(self, pid: int, fields: list[str]) -> None:
        self.pid = pid
        # A process whose first thread has ended looks like a zombie while other threads run: count the threads (field 17).
        self.zombie = fields[0] in "ZX" and int(fields[17]) <= 1
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.ticks = int(fields[19])
        """Start time of the process in clock ticks since boot. Together with the boot id it distinguishes a process from a later one with
        the same pid."""


def read_process(pid: int) -> Process | None:
    """The process with this pid, or None."""
    text = read_text(f"/proc/{pid}/stat")
    try:
        return Process(pid, text[text.rindex(")") + 2 :].split())
    except (ValueError, IndexError):
        return None


def list_processes() -> Iterator[Process]:
    """All processes except this one, including zombies."""
    me = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != me:
            process = read_process(int(name))
            if process:
                yield process


def marker_of(pid: int, root: Root) -> str | None:
    """The attempt named in the environment that a process was started with, if the attempt belongs to this root. None if the environment
    cannot be read, e.g. of another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    environment = dict(e.split(b"=", 1) for e in entries if b"=" in e)
    name = environment.get(ATTEMPT_VARIABLE.encode())
    if name is None:
        return None
    folder = environment.get(FOLDER_VARIABLE.encode())
    text = name[:LONGEST_MARK].decode("utf-8", "replace")
    is_ours = folder is None or os.fsdecode(folder) == root.at("attempts", text)
    return text if is_ours else None


def has_open(pid: int, path: str) -> bool:
    """True if a process has the file open. This also finds programs that overwrite their environment in memory to set their process
    title."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}") == path:
                return True
        except OSError:
            continue
    return False


def send_signal(pid: int, ticks: int, signum: int) -> None:
    """Signal a process. If its start ticks differ, its pid was reused: then nothing is sent."""
    opener = getattr(os, "pidfd_open", None)  # from Python 3.9
    try:
        fd = opener(pid) if opener else None
    except ProcessLookupError:
        return
    except OSError:  # a kernel before 5.3, or a seccomp filter
        fd = None
    try:
        process = read_process(pid)
        if process is None or process.ticks != ticks or process.zombie:
            return
        if fd is None:
            os.kill(pid, signum)
        else:
            signal.pidfd_send_signal(fd, signum)  # novermin: Python 3.9 has both
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        if fd is not None:
            os.close(fd)


class AttemptProcesses:
    """The processes that belong to an attempt, looked up again on each call."""

    def __init__(
        self, attempt: Attempt, state: dict[str, Any], supervisor: int | None = None
    ) -> None:
        self.attempt = attempt
        self.cgroups = Cgroups.from_record(state.get("cgroup"))
        self.supervisor = supervisor
        self.child = (state.get("pid"), state.get("start_ticks"))
        self.same_boot = state.get("boot_id") == boot_id()

    def alive(self) -> dict[int, Process]:
        """Living processes by pid. If none is found, look again: while /proc is listed, a process may fork and end, and its child may be
        missed."""
        return self.scan() or self.scan()

    def scan(self) -> dict[int, Process]:
        """List /proc once; may miss a process that forks and ends meanwhile."""
        living = {p.pid: p for p in list_processes() if not p.zombie}
        descendants = self._descendants(living) if self.supervisor else ()
        cgroup_pids = self.cgroups.pids()
        return {
            pid: p
            for pid, p in living.items()
            if pid in descendants
            or pid in cgroup_pids
            or (self.same_boot and (p.pid, p.ticks) == self.child)
            or marker_of(pid, self.attempt.root) == self.attempt.name
            or has_open(pid, self.attempt.at("tether"))
        }

    def _descendants(self, living: dict[int, Process]) -> frozenset[int]:
        children: dict[int, list[int]] = {}
        for p in living.values():
            children.setdefault(p.parent, []).append(p.pid)
        descendants: set[int] = set()
        todo = [self.supervisor or 0]
        while todo:
            unseen = [pid for pid in children.get(todo.pop(), []) if pid not in descendants]
            descendants.update(unseen)
            todo.extend(unseen)
        return frozenset(descendants)

    def terminate(self, except_session: int) -> None:
        """Send TERM to all processes except those in the session `except_session`, which got it before: some programs react differently to
        a second TERM."""
        for p in self.alive().values():
            if p.session != except_session:
                send_signal(p.pid, p.ticks, signal.SIGTERM)

    def kill(self, timeout: float) -> dict[int, Process]:
        """Send KILL repeatedly until no process is left or `timeout` seconds have passed; returns the remaining processes."""
        deadline = time.monotonic() + timeout
        while True:
            self.cgroups.kill()
            remaining = self.alive()
            for p in remaining.values():
                send_signal(p.pid, p.ticks, signal.SIGKILL)
            if not remaining or time.monotonic() > deadline:
                return remaining
            time.sleep(0.02)


def reap_adopted(except_pid: int | None = None) -> None:
    """Reap orphans that this process has adopted. `except_pid`: the pid of a child that must stay a zombie."""
    while True:
        try:
            exit_info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if exit_info is None or exit_info.si_pid == except_pid:
            return
        os.waitpid(exit_info.si_pid, os.WNOHANG)


def command_of(pid: int) -> str:
    """The name of a process's program, without its arguments."""
    return read_text(f"/proc/{pid}/comm").strip()


def find_program(program: str, path: str) -> str | None:
    """The program's path, searched as a shell does; None if it is not found."""
    folders = [""] if "/" in program else path.split(":")
    for folder in folders:
        if not folder.startswith("/") and "/" not in program:
            continue  # skip relative entries of PATH: the job could place a program in the working folder
        candidate = os.path.join(folder, program)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def path_of(python: object) -> str:
    """PATH of the command: first the folder of the machine's Python, then the runner's own PATH, at last the usual folders, which a
    start-up file of the login shell may have left out."""
    folders = [folder for folder in os.environ.get("PATH", "").split(":") if folder]
    if isinstance(python, str) and "/" in python:
        home = os.path.expanduser("~")
        folders.insert(0, os.path.dirname(os.path.join(home, os.path.expanduser(python))))
    return ":".join([*folders, *(folder for folder in USUAL_PATH if folder not in folders)])


def python_of(python: object, path: str) -> str:
    """The machine's interpreter for jobs, by its path; None in the row, or a bare name, is looked up."""
    name = python if isinstance(python, str) and python else "python3"
    if "/" in name:
        return os.path.join(os.path.expanduser("~"), os.path.expanduser(name))
    return find_program(name, path) or name
