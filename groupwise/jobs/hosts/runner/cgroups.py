"""Control groups of an attempt, if this user may create them: they find and kill its processes, and limit and count their memory."""

from __future__ import annotations

import hashlib
import os
import re
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import read_text, write_once
from groupwise.jobs.hosts.runner.locks import is_locked
from groupwise.jobs.hosts.runner.root import attempt_by_name

if TYPE_CHECKING:
    from typing import Any

    from groupwise.jobs.hosts.runner.root import Attempt, Root

UNIT = re.compile(r"groupwise-(.+\.[0-9]+)-[0-9a-f]{8}")
SCOPE_TIMEOUT = 5.0


class Cgroups:
    """The control groups of one attempt: a v2 group, through which its processes are found and killed, and one that limits its memory.
    Either may be missing, and they may be the same."""

    def __init__(self, v2: str | None = None, memory: str | None = None) -> None:
        self.v2, self.memory = v2, memory

    @staticmethod
    def from_record(record: dict[str, Any] | None) -> Cgroups:
        """Build the groups that a state file names."""
        return Cgroups((record or {}).get("v2"), (record or {}).get("memory"))

    def record(self) -> dict[str, Any]:
        """The groups in the form that the state file contains."""
        return {"v2": self.v2, "memory": self.memory}

    def folders(self) -> list[str]:
        """The folders of the existing groups, without duplicates."""
        return [f for f in dict.fromkeys((self.v2, self.memory)) if f]

    def add_process(self, pid: int) -> None:
        """Move a process into both groups. A group that rejects it is removed and no longer used."""
        for name in ("v2", "memory"):
            folder = getattr(self, name)
            if folder and not write_once(os.path.join(folder, "cgroup.procs"), str(pid)):
                remove_cgroup(folder)
                setattr(self, name, None)

    def limit(self, ram_mb: int | None) -> None:
        """Limit the memory, if there is a memory group."""
        if not self.memory or ram_mb is None:
            return
        size = str(ram_mb * 10**6)
        for name, value in (
            ("memory.limit_in_bytes", size),
            ("memory.max", size),
            ("memory.swap.max", "0"),
        ):
            if os.path.exists(os.path.join(self.memory, name)):
                write_once(os.path.join(self.memory, name), value)

    def oom_kills(self) -> int | None:
        """How many of the attempt's processes the kernel has killed for lack of memory; None if that is not counted."""
        if not self.memory:
            return None
        for name in ("memory.events", "memory.oom_control"):
            match = re.search(
                r"^oom_kill (\d+)$", read_text(os.path.join(self.memory, name)), re.MULTILINE
            )
            if match:
                return int(match.group(1))
        return None

    def pids(self) -> frozenset[int]:
        """Pids of the processes in the groups and in groups below them, which the command may have made."""
        pids: set[int] = set()
        for folder in self.folders():
            for below, _, _ in os.walk(folder):
                entries = read_text(os.path.join(below, "cgroup.procs")).split()
                pids.update(int(pid) for pid in entries)
        return frozenset(pids)

    def kill(self) -> None:
        """Kill all processes at once, even while they fork. Kernels before 5.14 cannot do this; there the caller's signals must suffice."""
        if self.v2:
            write_once(os.path.join(self.v2, "cgroup.kill"), "1")

    def remove(self) -> None:
        """Remove the groups if they are empty."""
        for folder in self.folders():
            remove_cgroup(folder)


def remove_cgroup(folder: str) -> None:
    """Remove a group and the groups below it; the kernel refuses while they contain processes."""
    for below, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(below)
        except OSError:
            return


def current_cgroups() -> dict[str, str]:
    """Folders of this process's control groups: "v2", and "memory" if the memory controller is of v1."""
    paths: dict[str, str] = {}
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update((name, path) for name in controllers.split(",") or [""])
    folders: dict[str, str] = {}
    for line in read_text("/proc/self/mounts").splitlines():
        _, mount, kind, options = line.split(" ")[:4]
        mount = mount.replace("\\040", " ")
        if kind == "cgroup2" and "" in paths:
            folders.setdefault("v2", mount + paths[""].rstrip("/"))
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in paths:
            folders.setdefault("memory", mount + paths["memory"].rstrip("/"))
    return {name: folder for name, folder in folders.items() if os.path.isdir(folder)}


def is_cgroup_of(attempt: Attempt, folder: object) -> bool:
    """True if a supervisor may have made this control group for the attempt. This is checked because all processes below a folder that a
    state file names are killed."""
    if not isinstance(folder, str) or os.path.normpath(folder) != folder:
        return False
    mounts = [line.split(" ")[1:3] for line in read_text("/proc/self/mounts").splitlines()]
    cgroup_mounts = [mount for mount, kind in mounts if kind in ("cgroup", "cgroup2")]
    mount_points = tuple(mount.replace("\\040", " ").rstrip("/") + "/" for mount in cgroup_mounts)
    return os.path.basename(folder) == unit_name(attempt) and folder.startswith(mount_points)


def unit_name(attempt: Attempt) -> str:
    """The name of the attempt's control groups. It includes a hash of the path: two roots on one machine may have members of the same
    attempt."""
    return f"groupwise-{attempt.name}-{hashlib.sha256(os.fsencode(attempt.path)).hexdigest()[:8]}"


def remove_stray_cgroups(root: Root) -> None:
    """Remove empty groups of this root's attempts that have no supervisor: it was killed before it could record their folders."""
    for parent in current_cgroups().values():
        for name in os.listdir(parent):
            match = UNIT.fullmatch(name)
            attempt = attempt_by_name(root, match.group(1)) if match else None
            ours = attempt is not None and unit_name(attempt) == name
            if attempt and ours and not is_locked(attempt.at("supervisor.lock")):
                remove_cgroup(os.path.join(parent, name))


def make_cgroups(name: str, scope: str | None = None) -> Cgroups:
    """Create control groups below this process's group, or below `scope`, as far as permitted."""
    parents = {**current_cgroups(), **({"v2": scope} if scope else {})}
    v2 = make_cgroup(parents["v2"], name) if "v2" in parents else None
    if "memory" in parents:
        return Cgroups(v2, make_cgroup(parents["memory"], name))
    if v2 and not os.path.exists(os.path.join(v2, "memory.max")):
        write_once(os.path.join(parents["v2"], "cgroup.subtree_control"), "+memory")
    return Cgroups(v2, v2 if v2 and os.path.exists(os.path.join(v2, "memory.max")) else None)


def make_cgroup(parent: str, name: str) -> str | None:
    """Create a group; None if that is not permitted. The folder may exist already, left by a launch that was killed."""
    folder = os.path.join(parent, name)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return None
    if os.access(os.path.join(folder, "cgroup.procs"), os.W_OK):
        return folder
    remove_cgroup(folder)
    return None


def may_make_cgroups(folder: str | None) -> bool:
    """True if this user may create groups below that control group."""
    return folder is not None and os.access(folder, os.W_OK)


def supervision_methods() -> list[str]:
    """The available ways to keep a supervisor and its processes together, the best first."""
    methods = ["session"]
    if may_make_cgroups(current_cgroups().get("v2")):
        methods.insert(0, "cgroup")
    if os.path.isdir("/run/systemd/system") and os.geteuid() == 0:
        methods.insert(0, "systemd")
    return methods


def enter_systemd_scope(unit: str) -> str | None:
    """Ask systemd to move this process into a transient scope: out of the login session, which may be ended as a whole.

    Returns the scope's control group, or None. This process moves into a group below the scope, since a group may pass its controllers
    on only if it contains no process itself."""
    import subprocess

    names = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1")
    method = ("org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))")
    settings = ("2", "PIDs", "au", "1", str(os.getpid()), "Delegate", "b", "true", "0")
    call = ("busctl", "call", *names, *method, unit + ".scope", "fail", *settings)
    devnull = subprocess.DEVNULL
    try:
        subprocess.run(call, stdin=devnull, stdout=devnull, timeout=SCOPE_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    deadline = time.monotonic() + SCOPE_TIMEOUT
    while unit not in current_cgroups().get("v2", ""):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    scope = current_cgroups()["v2"]
    inner = make_cgroup(scope, "supervisor")
    if inner:
        write_once(os.path.join(inner, "cgroup.procs"), str(os.getpid()))
    return scope
