"""Ending commands, and removing data that is no longer needed."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.cgroups import remove_stray_cgroups
from groupwise.jobs.hosts.runner.files import (
    cell_words,
    changed_before,
    modification_time,
    number_in,
    remove_file,
    remove_or_mark,
    set_cell,
    write_file,
    write_once,
)
from groupwise.jobs.hosts.runner.locks import HeldLock, is_locked
from groupwise.jobs.hosts.runner.processes import AttemptProcesses, boot_id
from groupwise.jobs.hosts.runner.protocol import seconds_of, shas_of, text_of
from groupwise.jobs.hosts.runner.root import attempt_of
from groupwise.jobs.hosts.runner.state import member, state_of
from groupwise.jobs.hosts.runner.supervisor import EVICT

if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from groupwise.jobs.hosts.runner.protocol import VerbAnswer
    from groupwise.jobs.hosts.runner.root import Attempt, Root

KILL_VERB_TIMEOUT = 2.0


def verb_kill(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """End the command, through its supervisor if there is one."""
    attempt = attempt_of(root, body)
    grace = seconds_of(body, "grace", 30.0)
    previous = number_in(cell_words(attempt.at("cancel")))
    shortest_grace = grace if previous is None else min(previous, grace)
    if is_locked(attempt.at("supervisor.lock")) and set_cell(
        attempt.at("cancel"), f"{shortest_grace:.3f}"
    ):
        wake_supervisor(attempt)
        return member(attempt), b""
    state = state_of(attempt) or {}
    if state.get("engine"):  # the supervisor may run on another machine, which sees this file
        set_cell(attempt.at("cancel"), f"{shortest_grace:.3f}")
    # No supervisor is left here to record the exit, so there is no reason to wait. If no pid is known, the processes are found by their
    # environment variable: the attempt's folder may have been removed.
    if state.get("boot_id") in (None, boot_id()):
        processes = AttemptProcesses(attempt, state)
        if not processes.kill(KILL_VERB_TIMEOUT):
            processes.cgroups.remove()
    return member(attempt), b""


def evict(attempt: Attempt, seconds: float) -> None:
    """Ask the supervisor to end the command within `seconds`, because the machine must be given back."""
    temporary = attempt.at(f"{EVICT}.new")
    write_file(temporary, f"{seconds:g}".encode("ascii"))
    os.replace(temporary, attempt.at(EVICT))
    wake_supervisor(attempt)


def wake_supervisor(attempt: Attempt) -> None:
    """Wake the supervisor through its FIFO. If the FIFO is missing, the supervisor checks every TICK anyway."""
    write_once(attempt.at("bell"), "!", os.O_NONBLOCK)


RUNNER_FILE = re.compile(r"[0-9a-f]{64}\.py")


def verb_sweep(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Remove blobs that are not in `keep`, and remains of killed runners. Files newer than `older_than` seconds are kept: a launch in
    progress may just have sent them."""
    keep = set(shas_of(body, "keep"))
    cutoff = time.time() - seconds_of(body, "older_than", 3600.0)
    removed = remove_old_runners(root, text_of(body, "runner"), cutoff)
    for folder, _folders, names in os.walk(root.at("blobs")):
        # Take the lock separately for each folder, since launches wait for it.
        with HeldLock(root.lock("blobs.lock")):
            for name in names:
                path = os.path.join(folder, name)
                if name not in keep and changed_before(path, cutoff):
                    remove_file(path)
                    removed += 1
    remove_stray_cgroups(root)
    for folder in (root.at("attempts"), root.at("epochs"), root.at("runners")):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            if (name.startswith(".") or name.endswith(".new")) and changed_before(path, cutoff):
                remove_or_mark(path) if os.path.isdir(path) else remove_file(path)
    return {"removed": removed}, b""


def remove_old_runners(root: Root, current: str, cutoff: float) -> int:
    """Remove all runners except this one and the newest other: during an upgrade both are used. A caller whose runner is missing sends it
    again."""
    try:
        names = os.listdir(root.at("runners"))
    except OSError:
        return 0
    other_hashes = [
        name[:64] for name in names if RUNNER_FILE.fullmatch(name) and name[:64] != current
    ]
    other_hashes.sort(key=lambda sha: modification_time(root.at("runners", sha + ".py")))
    outdated = set(other_hashes[:-1])
    paths = [root.at("runners", name) for name in names if name[:64] in outdated]
    paths = [path for path in paths if changed_before(path, cutoff)]
    for path in paths:
        remove_file(path)
    return len(paths)
