"""Locks on GPUs. An attempt holds a file lock for each of its GPUs, exclusive or for a share, until its last process has ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import cell_words, number_in, read_text, remove_file
from groupwise.jobs.hosts.runner.gpus import look_at_gpus
from groupwise.jobs.hosts.runner.locks import HeldLock, is_locked, take_lock
from groupwise.jobs.hosts.runner.processes import Belonging, command_of, process
from groupwise.jobs.hosts.runner.protocol import Refused, gpus_of
from groupwise.jobs.hosts.runner.root import attempt_of
from groupwise.jobs.hosts.runner.state import held_locks, state_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, BinaryIO

    from groupwise.jobs.hosts.runner.gpus import GpuReport
    from groupwise.jobs.hosts.runner.order import Order
    from groupwise.jobs.hosts.runner.protocol import Answered
    from groupwise.jobs.hosts.runner.root import Root

GPU_LOCK_PATIENCE = 1.0
"""Seconds to wait for a GPU's lock: a release check holds it for an instant."""
GHOST_LOOKS = 3


def resolve_gpus(order: Order) -> str:
    """The value of CUDA_VISIBLE_DEVICES: current GPU indices in PCI bus order; names for MIG devices."""
    if not order.gpus:
        return ""
    seen = look_at_gpus(order.root, order.body)
    for _ in range(GHOST_LOOKS):
        if not any(app["uuid"] in order.gpus and process(app["pid"]) is None for app in seen.apps):
            break
        # The listed process does not exist: it ended since nvidia-smi ran, or its pid belongs to another container. Only the first kind
        # disappears on another look.
        seen = look_at_gpus(order.root, order.body)
    return ",".join(resolve_gpu(order, seen, uuid) for uuid in order.gpus)


def resolve_gpu(order: Order, seen: GpuReport, uuid: str) -> str:
    """One GPU's index or MIG name. Raises Refused if the GPU is missing, faulty, or in use."""
    device = next((d for g in seen.gpus for d in g["mig_devices"] if d["uuid"] == uuid), None)
    gpu = seen.gpu(uuid)
    if gpu is None and device is None:
        message = f"no GPU {uuid} here: nvidia-smi {seen.status}"
        raise Refused("gpu_missing", message + (f" ({seen.complaint})" if seen.complaint else ""))
    if gpu is not None and gpu["problems"]:
        raise Refused("gpu_missing", "{} is ill: {}".format(uuid, "; ".join(gpu["problems"])))
    if gpu is not None and gpu["mig"]:
        raise Refused("gpu_missing", f"{uuid} is divided by MIG; name one of its devices")
    if seen.apps_status != "ok":
        raise Refused("gpu_missing", f"who uses {uuid} cannot be read: {seen.apps_status}")
    for app in seen.apps:
        if app["uuid"] == uuid:
            # The only process allowed here is one of another share of the same GPU.
            attempt, pid = app["attempt"], app["pid"]
            holder = attempt or f"{command_of(pid) or 'a process'} (pid {pid})"
            if attempt is None:
                raise Refused(
                    "foreign_busy", "{} is used by {}".format(app["uuid"], holder), holder
                )
            if order.share_mb is None:
                raise Refused(
                    "gpu_busy", "{} is still used by {}".format(app["uuid"], holder), holder
                )
    order.memory_mb[uuid] = (gpu or device or {})["memory_mb"]
    return uuid if gpu is None else str(gpu["index"])


def take_gpus(order: Order) -> list[int]:
    """Take the locks of all GPUs and of the slot, or none of them. Raises Refused."""
    locked: list[int] = []
    try:
        for uuid in sorted(order.gpus):
            locked.extend(take_gpu(order, uuid))
        if order.slot is not None:
            path = order.root.lock(f"slot-{order.slot}.lock")
            locked.append(take_named(path, order.attempt.name, f"slot {order.slot}"))
    except BaseException:
        for fd in locked:
            os.close(fd)
        raise
    return locked


def take_named(path: str, name: str, what: str, how: int = fcntl.LOCK_EX) -> int:
    """Take a lock; write the holder's name into the file of an exclusive one. Raises Refused."""
    fd = take_lock(path, how, GPU_LOCK_PATIENCE)
    if fd is None:
        holder = read_text(path).strip() or "another attempt"
        raise Refused("gpu_busy", f"{what} is held by {holder}", holder)
    if how == fcntl.LOCK_EX:
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):  # the disk is full; the name is used in messages only
            os.pwrite(fd, name.encode("ascii"), 0)
    return fd


def take_gpu(order: Order, uuid: str) -> list[int]:
    """Lock a GPU: exclusively for a whole GPU; for a share jointly, plus a file of the share's own that contains its size."""
    path = order.root.gpu_lock(uuid)
    if order.share_mb is None:
        return [take_named(path, order.attempt.name, uuid)]
    fd = take_named(path, order.attempt.name, uuid, fcntl.LOCK_SH)
    try:
        return [fd, take_share(order, uuid, order.share_mb)]
    except BaseException:
        os.close(fd)
        raise


def take_share(order: Order, uuid: str, share_mb: int) -> int:
    """Take a share if it fits in addition to the held ones. A share lasts as long as the lock on its file, so no counter is needed."""
    folder = order.root.shares(uuid)
    total = order.memory_mb.get(uuid) or 0
    with HeldLock(order.root.lock("shares.lock")):
        others = {name: share_held(os.path.join(folder, name)) for name in os.listdir(folder)}
        used = sum(others.values())
        if used + share_mb > total:
            holder = ", ".join(sorted(name for name, held in others.items() if held))
            message = f"{uuid} has {total} MiB, {used} are shared out to others ({holder})"
            raise Refused("gpu_busy", message, holder)
        fd = take_lock(os.path.join(folder, order.attempt.name))
        assert fd is not None, "a share is taken under the lock of its job"
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d" % share_mb, 0)
        return fd


def share_held(path: str) -> int:
    """The size of a share in MiB if it is held; otherwise 0, and its file is removed."""
    if is_locked(path):
        return int(number_in(cell_words(path)) or 0)
    remove_file(path)
    return 0


def verb_release(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Report everything that an attempt still holds; `clean` if there is nothing."""
    attempt = attempt_of(root, body)
    uuids, share = gpus_of(body), body.get("share_mb")
    state = state_of(attempt) or {}
    holders = held_locks(attempt, uuids, share)
    belonging = Belonging(attempt, state)
    grouped = belonging.group.pids()
    for pid in sorted(belonging.alive()):
        what = "cgroup" if pid in grouped else "process"
        holders.append({"what": what, "detail": command_of(pid), "pid": pid})
    if uuids and share is None:
        holders.extend(memory_holders(root, body, uuids))
    if not holders:
        belonging.group.remove()
        for uuid in uuids:
            with HeldLock(root.lock("shares.lock")):
                path = os.path.join(root.shares(uuid), attempt.name)
                if not is_locked(path):
                    remove_file(path)
    return {"clean": not holders, "holders": holders}, b""


def memory_holders(root: Root, body: dict[str, Any], uuids: Sequence[str]) -> list[dict[str, Any]]:
    """Whole GPUs that are not idle, or whose memory use cannot be read."""
    seen = look_at_gpus(root, body)
    found: list[dict[str, Any]] = []
    idle = body.get("idle_memory_mb")
    for uuid in uuids:
        gpu = seen.gpu(uuid)
        used = gpu["memory_used_mb"] if gpu else None
        if used is None and not uuid.startswith("MIG-"):
            detail = f"{uuid} cannot be read ({seen.status})"
            found.append({"what": "memory", "detail": detail})
        elif idle is not None and used is not None and used > idle:
            detail = f"{uuid} has {used} MiB in use; idle is {idle}"
            found.append({"what": "memory", "detail": detail})
        for app in seen.apps:
            if app["uuid"] == uuid:
                detail = "{} is used by {}".format(uuid, command_of(app["pid"]) or "a process")
                found.append({"what": "memory", "detail": detail, "pid": app["pid"]})
    return found
