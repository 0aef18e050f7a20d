"""Reports about the machine, its GPUs and its attempts, immediately or at the next change.

The GPUs of the machine and the processes on them are listed by the vendors' tools that it has; requests that start a job use the same
probe.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.cgroups import (
    current_cgroups,
    may_make_cgroups,
    supervision_methods,
)
from groupwise.jobs.hosts.runner.files import make_folder, read_text
from groupwise.jobs.hosts.runner.processes import boot_id, list_processes, marker_of
from groupwise.jobs.hosts.runner.protocol import SPOKEN, as_object, seconds_of
from groupwise.jobs.hosts.runner.root import (
    attempt_by_name,
    attempt_of,
    list_attempts,
    unremovable_folders,
)
from groupwise.jobs.hosts.runner.state import guarded_member, member, record_contact

if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from groupwise.jobs.hosts.runner.protocol import VerbAnswer
    from groupwise.jobs.hosts.runner.root import Attempt, Root
from groupwise.jobs.hosts.runner.amd_smi import read_amd_smi, read_rocm_smi
from groupwise.jobs.hosts.runner.nvidia_smi import read_nvidia_smi, read_tegrastats
from groupwise.jobs.hosts.runner.protocol import arguments_of
from groupwise.jobs.hosts.runner.smi import GpuReport, Probe, find_tool

if TYPE_CHECKING:
    from typing import Any

    from groupwise.jobs.hosts.runner.root import Root

PROBE_TIMEOUT = 10.0
"""Default timeout in seconds of one round of the GPU probe."""
READERS = {
    "nvidia-smi": read_nvidia_smi,
    "tegrastats": read_tegrastats,
    "amd-smi": read_amd_smi,
    "rocm-smi": read_rocm_smi,
}
VENDORS = (("nvidia-smi", "tegrastats"), ("amd-smi", "rocm-smi"))
"""The tools of each vendor; the first one that the machine has is used."""


def verb_hello(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Describe this machine."""
    make_folder(root.path)
    cgroups = current_cgroups()
    answer = {
        "protocols": list(SPOKEN),
        "python": ".".join(map(str, sys.version_info[:3])),
        "hostname": os.uname().nodename,
        "user": user_name(),
        "boot_id": boot_id(),
        "home": os.path.expanduser("~"),
        "root": root.path,
        "filesystem": filesystem_of(root.path),
        "cgroup": {name: may_make_cgroups(cgroups.get(name)) for name in ("v2", "memory")},
        "methods": supervision_methods(),
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
    """Current CPU load, memory and disk space. A MB is a million bytes, as in what jobs ask for."""
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_text("/proc/meminfo"), re.MULTILINE))
    disk = os.statvfs(make_folder(root.path))
    return {
        "time": time.time(),
        "load": list(os.getloadavg()),
        "cpus": len(os.sched_getaffinity(0)),
        "ram_mb": int(memory.get("MemTotal", 0)) * 1024 // 10**6,
        "ram_free_mb": int(memory.get("MemAvailable", memory.get("MemFree", 0))) * 1024 // 10**6,
        "disk_free_mb": disk.f_bavail * disk.f_frsize // 10**6,
    }


def filesystem_of(path: str) -> str | None:
    """The type of the path's file system: that of the longest mount point which contains the path."""
    path = os.path.realpath(path) + "/"
    longest, kind = "", None
    for line in read_text("/proc/self/mounts").splitlines():
        _, mount, fs_type = line.split(" ")[:3]
        mount = mount.replace("\\040", " ").rstrip("/") + "/"
        if path.startswith(mount) and len(mount) >= len(longest):
            longest, kind = mount, fs_type
    return kind


def verb_observe(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Report GPUs, processes and attempts in one answer, for a poller."""
    report = probe_gpus(root, body)
    attempts, other_names = list_attempts(root)
    members = {attempt.name: guarded_member(attempt) for attempt in attempts}
    exited = {name: member for name, member in members.items() if member["state"] == "exited"}
    for exited_member in exited.values():
        exited_member["survivors"] = 0
    quarantined: list[dict[str, Any]] = [{"what": "folder", "detail": name} for name in other_names]
    # Processes are listed after the attempts: an attempt in state `exited` had ended its processes before. Any that are left could not be
    # killed.
    for p in list_processes():
        attempt_name = None if p.zombie else marker_of(p.pid, root)
        if attempt_name in exited:
            exited[attempt_name]["survivors"] += 1
        elif attempt_name and attempt_name not in members:
            quarantined.append({"what": "process", "detail": attempt_name, "pid": p.pid})
    answer = {
        "boot_id": boot_id(),
        **load_of(root),
        "gpus": report.gpus,
        "apps": report.apps,
        "probe": report.summary(),
        "attempts": list(members.values()),
        "quarantined": quarantined,
        "unremoved": unremovable_folders(root),
    }
    return answer, b""


def verb_status(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """The state of one attempt."""
    return member(attempt_of(root, body)), b""


def verb_touch(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
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

    def read_state(self) -> dict[str, Any]:
        """The attempt's state now. Checkpoints are counted less often, because that reads folders."""
        start = time.monotonic()
        if start >= self.next_count:
            self.progress = None
        state = guarded_member(self.attempt, self.progress)
        if self.progress is None:
            self.progress = state["checkpoints"], state["step"]
            self.next_count = time.monotonic() + max(1.0, 20 * (time.monotonic() - start))
        return state

    def differs(self, state: dict[str, Any], log_too: bool) -> bool:
        """True if the state differs from what the caller knows."""
        names = ["state", "checkpoints", "step"] + ["log_size"] * log_too
        return any(name in self.known and self.known[name] != state[name] for name in names)


def verb_wait(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Answer as soon as an attempt differs from what the caller knows, or at the timeout."""
    start = time.monotonic()
    deadline = start + seconds_of(body, "timeout", 0.0)
    log_counts_from = start + seconds_of(body, "quiet", 1.0)
    attempts = [
        WatchedAttempt(attempt_by_name(root, n), known) for n, known in body["known"].items()
    ]
    listener = select.poll()
    listener.register(1, 0)
    while True:
        now = time.monotonic()
        states = [w.read_state() for w in attempts]
        if now >= deadline or any(
            w.differs(states[n], now >= log_counts_from) for n, w in enumerate(attempts)
        ):
            return {"attempts": states}, b""
        if listener.poll(max(1, int(min(0.1, deadline - now) * 1000))):
            os._exit(0)  # the caller has disconnected


def probe_gpus(root: Root, body: dict[str, Any]) -> GpuReport:
    """Run one round of the probe: of the command that the request names, or of each vendor's tool."""
    timeout = seconds_of(body, "probe_timeout", PROBE_TIMEOUT)
    if body.get("probe"):
        command = arguments_of(body["probe"])
        known = [tool for tool in READERS if tool in map(os.path.basename, command)]
        report = READERS[(known or ["nvidia-smi"])[0]](Probe(root, command, timeout))
    else:
        found = [next(filter(find_tool, tools), None) for tools in VENDORS]
        reports = [READERS[tool](Probe(root, [tool], timeout)) for tool in found if tool]
        if reports and reports[-1].tool in VENDORS[1] and not reports[-1].gpus and not has_amd():
            reports.pop()  # the tool is installed without a GPU
        report = GpuReport("nvidia-smi", stderr="there is no nvidia-smi, amd-smi or rocm-smi")
        for other in reports:
            report = other if report.status == "absent" else merge_reports(report, other)
    for app in report.apps:
        app["attempt"] = marker_of(app["pid"], root)
    return report


def has_amd() -> bool:
    """True if AMD's driver has a GPU to compute on."""
    return os.path.exists("/dev/kfd")


def has_nvidia() -> bool:
    """True if NVIDIA's driver runs."""
    return os.path.exists("/proc/driver/nvidia/version")


def merge_reports(one: GpuReport, other: GpuReport) -> GpuReport:
    """The GPUs of two vendors. A tool that fails does not hide the GPUs of the other one."""
    if not other.gpus or not one.gpus:
        good, bad = (one, other) if one.gpus else (other, one)
        failure = f"{bad.tool} {bad.status}: {bad.stderr.strip()[:200]}"
        good.unreadable += [failure] if bad.status != "ok" else bad.unreadable
        return good
    one.tool += f" and {other.tool}"
    one.gpus += other.gpus
    one.apps += other.apps
    one.lost += other.lost
    one.unreadable += other.unreadable
    if one.apps_status == "ok":
        one.apps_status = other.apps_status
    return one


def device_variables(gpus: list[dict[str, Any]]) -> dict[str, str]:
    """The variables that show a job its GPUs and no others. HIP numbers the GPUs in ROCR_VISIBLE_DEVICES from 0."""
    nvidia, amd = (
        [gpu["visible"] for gpu in gpus if gpu["vendor"] == vendor] for vendor in ("nvidia", "amd")
    )
    if amd:
        counted = ",".join(str(n) for n in range(len(amd)))
        # Programs for ROCm read that one, too; beside NVIDIA's driver it would show another job's GPUs.
        for_cuda = nvidia if nvidia or has_nvidia() else [counted]
        return {
            "ROCR_VISIBLE_DEVICES": ",".join(amd),
            "HIP_VISIBLE_DEVICES": counted,
            "CUDA_VISIBLE_DEVICES": ",".join(for_cuda),
        }
    hidden = {"CUDA_VISIBLE_DEVICES": ",".join(nvidia)}
    if has_amd():  # for ROCm an empty value shows all GPUs
        hidden.update(ROCR_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1")
    return hidden
