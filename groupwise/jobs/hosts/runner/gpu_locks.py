"""Locks on GPUs. An attempt holds a file lock for each of its GPUs, exclusive or for a share, until its last process has ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import cell_words, number_in, read_text, remove_file
from groupwise.jobs.hosts.runner.locks import HeldLock, is_locked, take_lock
from groupwise.jobs.hosts.runner.observe import device_variables, probe_gpus
from groupwise.jobs.hosts.runner.processes import AttemptProcesses, command_of, read_process
from groupwise.jobs.hosts.runner.protocol import LaunchRefused, gpus_of
from groupwise.jobs.hosts.runner.root import attempt_of
from groupwise.jobs.hosts.runner.state import held_locks, state_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, BinaryIO

    from groupwise.jobs.hosts.runner.launch_request import LaunchRequest
    from groupwise.jobs.hosts.runner.protocol import VerbAnswer
    from groupwise.jobs.hosts.runner.root import Root
    from groupwise.jobs.hosts.runner.smi import GpuReport

GPU_LOCK_TIMEOUT = 1.0
"""Seconds to wait for a GPU's lock: a release check holds it for an instant."""
GHOST_LOOKS = 3


def resolve_gpus(request: LaunchRequest) -> dict[str, str]:
    """The variables that show the command its GPUs: by their current indices in PCI bus order, MIG devices and AMD's by their names."""
    if not request.gpus:
        return device_variables([])
    report = probe_gpus(request.root, request.body)
    for _ in range(GHOST_LOOKS):
        if not any(
            app["uuid"] in request.gpus and read_process(app["pid"]) is None for app in report.apps
        ):
            break
        # The listed process does not exist: it ended since nvidia-smi ran, or its pid belongs to another container. Only the first kind
        # disappears on another look.
        report = probe_gpus(request.root, request.body)
    return device_variables([resolve_gpu(request, report, uuid) for uuid in request.gpus])


def resolve_gpu(request: LaunchRequest, report: GpuReport, uuid: str) -> dict[str, Any]:
    """One GPU of the report. Raises LaunchRefused if the GPU is missing, faulty, or in use."""
    gpu = report.gpu(uuid)
    if gpu is None:
        problem = "; ".join(report.lost) or report.stderr.strip()[:500]
        message = f"no GPU {uuid} here: {report.tool} {report.status}"
        raise LaunchRefused("gpu_missing", message + (f" ({problem})" if problem else ""))
    if gpu["problems"]:
        raise LaunchRefused(
            "gpu_missing", "{} is faulty: {}".format(uuid, "; ".join(gpu["problems"]))
        )
    if gpu["mig"]:
        raise LaunchRefused("gpu_missing", f"{uuid} is divided by MIG; name one of its devices")
    if report.apps_status != "ok":
        raise LaunchRefused("gpu_missing", f"who uses {uuid} cannot be read: {report.apps_status}")
    for app in report.apps:
        if app["uuid"] == uuid and not app.get("graphics"):
            # The only process allowed here is one of another share of the same GPU.
            attempt, pid = app["attempt"], app["pid"]
            holder = attempt or f"{command_of(pid) or 'a process'} (pid {pid})"
            if attempt is None:
                raise LaunchRefused("foreign_busy", f"{uuid} is used by {holder}", holder)
            if request.share_mb is None:
                raise LaunchRefused("gpu_busy", f"{uuid} is still used by {holder}", holder)
    request.memory_mb[uuid] = gpu["memory_mb"]
    return gpu


def take_gpus(request: LaunchRequest) -> list[int]:
    """Take the locks of all GPUs and of the slot, or none of them. Raises LaunchRefused."""
    locked: list[int] = []
    try:
        for uuid in sorted(request.gpus):
            locked.extend(take_gpu(request, uuid))
        if request.slot is not None:
            path = request.root.lock(f"slot-{request.slot}.lock")
            locked.append(take_named_lock(path, request.attempt.name, f"slot {request.slot}"))
    except BaseException:
        for fd in locked:
            os.close(fd)
        raise
    return locked


def take_named_lock(path: str, name: str, label: str, mode: int = fcntl.LOCK_EX) -> int:
    """Take a lock; write the holder's name into the file of an exclusive one. Raises LaunchRefused."""
    fd = take_lock(path, mode, GPU_LOCK_TIMEOUT)
    if fd is None:
        holder = read_text(path).strip() or "another attempt"
        raise LaunchRefused("gpu_busy", f"{label} is held by {holder}", holder)
    if mode == fcntl.LOCK_EX:
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):  # the disk is full; the name is used in messages only
            os.pwrite(fd, name.encode("ascii"), 0)
    return fd


def take_gpu(request: LaunchRequest, uuid: str) -> list[int]:
    """Lock a GPU: exclusively for a whole GPU; for a share jointly, plus a file of the share's own that contains its size."""
    path = request.root.gpu_lock(uuid)
    if request.share_mb is None:
        return [take_named_lock(path, request.attempt.name, uuid)]
    fd = take_named_lock(path, request.attempt.name, uuid, fcntl.LOCK_SH)
    try:
        return [fd, take_share(request, uuid, request.share_mb)]
    except BaseException:
        os.close(fd)
        raise


def take_share(request: LaunchRequest, uuid: str, share_mb: int) -> int:
    """Take a share if it fits in addition to the held ones. A share lasts as long as the lock on its file, so no counter is needed."""
    folder = request.root.shares(uuid)
    total = request.memory_mb.get(uuid) or 0
    with HeldLock(request.root.lock("shares.lock")):
        shares = {name: held_share_mb(os.path.join(folder, name)) for name in os.listdir(folder)}
        used_mb = sum(shares.values())
        if used_mb + share_mb > total:
            holder = ", ".join(sorted(name for name, size_mb in shares.items() if size_mb))
            message = f"{uuid} has {total} MB, {used_mb} are shared out to others ({holder})"
            raise LaunchRefused("gpu_busy", message, holder)
        fd = take_lock(os.path.join(folder, request.attempt.name))
        assert fd is not None, "a share is taken under the lock of its job"
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d" % share_mb, 0)
        return fd


def held_share_mb(path: str) -> int:
    """The size of a share in MB if it is held; otherwise 0, and its file is removed."""
    if is_locked(path):
        return int(number_in(cell_words(path)) or 0)
    remove_file(path)
    return 0


def verb_release(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Report everything that an attempt still holds; `clean` if there is nothing."""
    attempt = attempt_of(root, body)
    uuids, share = gpus_of(body), body.get("share_mb")
    state = state_of(attempt) or {}
    holders = held_locks(attempt, uuids, share)
    processes = AttemptProcesses(attempt, state)
    cgroup_pids = processes.cgroups.pids()
    for pid in sorted(processes.alive()):
        kind = "cgroup" if pid in cgroup_pids else "process"
        holders.append({"what": kind, "detail": command_of(pid), "pid": pid})
    if uuids and share is None:
        holders.extend(memory_holders(root, body, uuids))
    if not holders:
        processes.cgroups.remove()
        for uuid in uuids:
            with HeldLock(root.lock("shares.lock")):
                path = os.path.join(root.shares(uuid), attempt.name)
                if not is_locked(path):
                    remove_file(path)
    return {"clean": not holders, "holders": holders}, b""


def memory_holders(root: Root, body: dict[str, Any], uuids: Sequence[str]) -> list[dict[str, Any]]:
    """Whole GPUs that are not idle, or whose memory use cannot be read."""
    report = probe_gpus(root, body)
    holders: list[dict[str, Any]] = []
    idle_mb = body.get("idle_memory_mb")
    for uuid in uuids:
        gpu = report.gpu(uuid)
        used_mb = gpu["memory_used_mb"] if gpu else None
        if gpu is None or (
            used_mb is None and not gpu["integrated"] and not uuid.startswith("MIG-")
        ):
            detail = f"{uuid} cannot be read ({report.status})"
            holders.append({"what": "memory", "detail": detail})
        elif idle_mb is not None and used_mb is not None and used_mb > idle_mb:
            detail = f"{uuid} has {used_mb} MB in use; idle is {idle_mb}"
            holders.append({"what": "memory", "detail": detail})
        for app in report.apps:
            if app["uuid"] == uuid and not app.get("graphics"):
                detail = "{} is used by {}".format(uuid, command_of(app["pid"]) or "a process")
                holders.append({"what": "memory", "detail": detail, "pid": app["pid"]})
    return holders
