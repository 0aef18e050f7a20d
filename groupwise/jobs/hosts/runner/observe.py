"""Reports about the machine and its attempts, immediately or at the next change."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.cgroups import may_make_groups, methods, own_groups
from groupwise.jobs.hosts.runner.files import make_folder, read_text
from groupwise.jobs.hosts.runner.gpus import look_at_gpus
from groupwise.jobs.hosts.runner.processes import boot_id, marker_of, processes
from groupwise.jobs.hosts.runner.protocol import SPOKEN, as_object, seconds_of
from groupwise.jobs.hosts.runner.root import attempt_by_name, attempt_of, attempts_here, unremoved
from groupwise.jobs.hosts.runner.state import guarded_member, member, record_contact

if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from groupwise.jobs.hosts.runner.protocol import Answered
    from groupwise.jobs.hosts.runner.root import Attempt, Root


def verb_hello(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Describe this machine."""
    make_folder(root.path)
    own = own_groups()
    answer = {
        "protocols": list(SPOKEN),
        "python": ".".join(map(str, sys.version_info[:3])),
        "hostname": os.uname().nodename,
        "user": user_name(),
        "boot_id": boot_id(),
        "home": os.path.expanduser("~"),
        "root": root.path,
        "filesystem": filesystem_of(root.path),
        "cgroup": {name: may_make_groups(own.get(name)) for name in ("v2", "memory")},
        "methods": methods(),
        **load_of(root),
    }
    return answer, b""


def user_name() -> str:
    """The name of the user that the runner runs as; its number if it has no name."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def load_of(root: Root) -> dict[str, Any]:
    """Current CPU load, memory and disk space."""
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_text("/proc/meminfo"), re.MULTILINE))
    disk = os.statvfs(make_folder(root.path))
    return {
        "time": time.time(),
        "load": list(os.getloadavg()),
        "cpus": len(os.sched_getaffinity(0)),
        "ram_mb": int(memory.get("MemTotal", 0)) >> 10,
        "ram_free_mb": int(memory.get("MemAvailable", memory.get("MemFree", 0))) >> 10,
        "disk_free_mb": disk.f_bavail * disk.f_frsize >> 20,
    }


def filesystem_of(path: str) -> str | None:
    """The type of the path's file system: that of the longest mount point which contains the path."""
    path = os.path.realpath(path) + "/"
    best, kind = "", None
    for line in read_text("/proc/self/mounts").splitlines():
        _, mount, found = line.split(" ")[:3]
        mount = mount.replace("\\040", " ").rstrip("/") + "/"
        if path.startswith(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def verb_observe(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Report GPUs, processes and attempts in one answer, for a poller."""
    seen = look_at_gpus(root, body)
    here, strange = attempts_here(root)
    members = {attempt.name: guarded_member(attempt) for attempt in here}
    exited = {name: member for name, member in members.items() if member["state"] == "exited"}
    for ended in exited.values():
        ended["survivors"] = 0
    quarantined: list[dict[str, Any]] = [{"what": "folder", "detail": name} for name in strange]
    # Processes are listed after the attempts: an attempt in state `exited` had ended its processes before. Any that are left could not be
    # killed.
    for p in processes():
        marked = None if p.zombie else marker_of(p.pid, root)
        if marked in exited:
            exited[marked]["survivors"] += 1
        elif marked and marked not in members:
            quarantined.append({"what": "process", "detail": marked, "pid": p.pid})
    answer = {
        "boot_id": boot_id(),
        **load_of(root),
        "gpus": seen.gpus,
        "apps": seen.apps,
        "probe": seen.summary(),
        "attempts": list(members.values()),
        "quarantined": quarantined,
        "unremoved": unremoved(root),
    }
    return answer, b""


def verb_status(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """The state of one attempt."""
    return member(attempt_of(root, body)), b""


def verb_touch(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Record contact with attempts."""
    clocks = as_object(body["attempts"]) or dict.fromkeys(body["attempts"])
    touched = [n for n, clock in clocks.items() if record_contact(attempt_by_name(root, n), clock)]
    return {"touched": touched}, b""


class WatchedAttempt:
    """One attempt that a `wait` request watches."""

    def __init__(self, attempt: Attempt, known: dict[str, Any]) -> None:
        self.attempt, self.known = attempt, known
        self.next_count = 0.0
        self.progress: tuple[int, int | None] | None = None
        record_contact(attempt, known.get("clock"))

    def look(self) -> dict[str, Any]:
        """The attempt's state now. Checkpoints are counted less often, because that reads folders."""
        start = time.monotonic()
        if start >= self.next_count:
            self.progress = None
        found = guarded_member(self.attempt, self.progress)
        if self.progress is None:
            self.progress = found["checkpoints"], found["step"]
            self.next_count = time.monotonic() + max(1.0, 20 * (time.monotonic() - start))
        return found

    def differs(self, found: dict[str, Any], log_too: bool) -> bool:
        """True if the state differs from what the caller knows."""
        names = ["state", "checkpoints", "step"] + ["log_size"] * log_too
        return any(name in self.known and self.known[name] != found[name] for name in names)


def verb_wait(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Answer as soon as an attempt differs from what the caller knows, or at the timeout."""
    start = time.monotonic()
    until = start + seconds_of(body, "timeout", 0.0)
    loud = start + seconds_of(body, "quiet", 1.0)
    watched = [
        WatchedAttempt(attempt_by_name(root, n), known) for n, known in body["known"].items()
    ]
    listener = select.poll()
    listener.register(1, 0)
    while True:
        now = time.monotonic()
        found = [w.look() for w in watched]
        if now >= until or any(w.differs(found[n], now >= loud) for n, w in enumerate(watched)):
            return {"attempts": found}, b""
        if listener.poll(max(1, int(min(0.1, until - now) * 1000))):
            os._exit(0)  # the caller has disconnected
