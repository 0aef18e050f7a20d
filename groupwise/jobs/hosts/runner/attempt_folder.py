"""Creates the folder of an attempt once, atomically. This is why a job starts at most once on a machine: `launch` and `void` race for the
folder, exactly one of them creates it, and neither does after `forget`."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import (
    CELL,
    make_folder,
    read_json,
    remove_file,
    remove_or_mark,
    remove_tree,
    sync_folder,
    write_file,
    write_json,
)
from groupwise.jobs.hosts.runner.locks import is_locked, take_lock
from groupwise.jobs.hosts.runner.processes import AttemptProcesses, boot_clock, boot_id
from groupwise.jobs.hosts.runner.protocol import LONGEST_WORD, PROTOCOL, RequestRejected, text_of
from groupwise.jobs.hosts.runner.root import TOKEN, attempt_of, with_spare
from groupwise.jobs.hosts.runner.state import absent_member, member, state_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

    from groupwise.jobs.hosts.runner.protocol import VerbAnswer
    from groupwise.jobs.hosts.runner.root import Attempt, Root

RESERVE = 48 * 1024
"""Bytes reserved for the exit record: the tail, in the worst case with each byte as `\\u0000` and the other fields."""


def verb_void(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Ensure that this epoch never starts, unless it has started already."""
    attempt = attempt_of(root, body)
    because = text_of(body, "because")[:LONGEST_WORD] if body.get("because") else ""

    def make_void() -> None:
        with root.job_lock(attempt.job):
            remove_unstarted(attempt)
            void_queued(attempt, because)
            if not os.path.isdir(attempt.path):
                root.record_epoch(attempt.job, highest=attempt.epoch)
                claim(attempt, {"phase": "voided"})

    with_spare(root, make_void)
    return member(attempt), b""


def void_queued(attempt: Attempt, because: str) -> None:
    """Void a queued attempt by taking its token before the engine does."""
    state = read_json(attempt.at("state.json")) or {}
    if state.get("phase") != "queued":
        return
    token, voided = attempt.at(TOKEN + ".voided"), {**state, "phase": "voided"}
    if because:
        voided["refused"] = {"code": "voided", "message": because}
    if not take_token(attempt, token) and not os.path.exists(token):
        return
    write_json(attempt.at("state.json"), voided)
    remove_file(token)


def take_token(attempt: Attempt, target: str) -> bool:
    """Take the token by renaming it. If several processes try, exactly one succeeds."""
    try:
        os.rename(attempt.at(TOKEN), target)
    except FileNotFoundError:
        return False
    sync_folder(attempt.path)
    return True


def lower_epoch_member(attempt: Attempt, epochs: dict[str, Any]) -> dict[str, Any]:
    """The answer for an epoch lower than the highest one, or forgotten: no folder is ever made for it."""
    status = "forgotten" if attempt.epoch <= epochs["forgotten"] else "overtaken"
    message = f"epoch {attempt.epoch} was {status}: this machine has seen {epochs['highest']}"
    return {
        **absent_member(attempt),
        "state": "refused",
        "refused": {"code": "lower_epoch", "message": message, "highest": epochs["highest"]},
    }


def never_started(attempt: Attempt) -> bool:
    """True if a launch claimed the attempt and was killed before the command started."""
    state = state_of(attempt) or {}
    return (
        state.get("phase") == "claimed"
        and not state.get("engine")
        and not is_locked(attempt.at("supervisor.lock"))
        and not os.path.exists(attempt.at("exit.json"))
    )


def remove_unstarted(attempt: Attempt) -> None:
    """Remove an attempt whose command never started. None of its processes runs: the supervisor's child starts only after the state says
    `running`."""
    if not never_started(attempt):
        return
    lock = take_lock(attempt.at("supervisor.lock"))
    if lock is not None:
        try:
            # Check again while holding the lock: the supervisor may have started the command and ended meanwhile.
            state = state_of(attempt) or {}
            if state.get("phase") == "claimed" and not os.path.exists(attempt.at("exit.json")):
                discard_attempt(attempt)
        finally:
            os.close(lock)


def claim(
    attempt: Attempt,
    state: dict[str, Any],
    last_contact: float = 0.0,
    fill: Callable[[str], None] | None = None,
) -> int | None:
    """Create the folder of an attempt atomically; OSError if the disk is full. `fill` adds more files to it. Returns the held lock of the
    supervisor, or None if the attempt needs no supervisor."""
    parent = make_folder(attempt.root.at("attempts"))
    temporary = os.path.join(parent, f".new-{attempt.name}-{os.urandom(4).hex()}")
    os.mkdir(temporary, 0o700)
    lock = None
    try:
        if state["phase"] == "claimed":
            lock = take_lock(os.path.join(temporary, "supervisor.lock"))
            create_files(temporary, last_contact)
        if fill is not None:
            create_files(temporary, last_contact)
            fill(temporary)
        document = {
            "protocol": PROTOCOL,
            "job": attempt.job,
            "epoch": attempt.epoch,
            "boot_id": boot_id(),
            "claimed_at": time.time(),
            **state,
        }
        write_json(os.path.join(temporary, "state.json"), document)
        os.rename(temporary, attempt.path)
        sync_folder(parent)
    except BaseException:
        remove_tree(temporary)
        if lock is not None:
            os.close(lock)
        raise
    return lock


def create_files(folder: str, last_contact: float) -> None:
    """Create in advance all files that are written later: then a full disk cannot prevent the writing."""
    cells = {"contact": f"{last_contact:.3f}", "heartbeat": f"{boot_clock():.3f}", "cancel": ""}
    for name, text in cells.items():
        write_file(os.path.join(folder, name), text.ljust(CELL).encode("ascii"))
    write_file(os.path.join(folder, "reserve"), b" " * RESERVE)
    for name in ("log", "tether"):
        write_file(os.path.join(folder, name), b"")
    os.mkdir(os.path.join(folder, "work"), 0o700)
    with contextlib.suppress(OSError):
        # Some file systems have no FIFOs: without one the supervisor checks every TICK.
        os.mkfifo(os.path.join(folder, "bell"), 0o600)


def verb_forget(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Remove all data of an attempt, except for the record that it existed."""
    attempt = attempt_of(root, body)

    def record_and_remove() -> None:
        with root.job_lock(attempt.job):
            state = state_of(attempt) or {}
            if is_locked(attempt.at("supervisor.lock")) or AttemptProcesses(attempt, state).alive():
                raise RequestRejected(
                    "still_running", f"{attempt.name} has processes; end it first"
                )
            if os.path.exists(attempt.at(TOKEN)):
                message = f"{attempt.name} waits for its engine; void it first"
                raise RequestRejected("still_running", message)
            root.record_epoch(attempt.job, highest=attempt.epoch, forgotten=attempt.epoch)
            discard_attempt(attempt)

    with_spare(root, record_and_remove)
    return {"forgotten": True}, b""


def discard_attempt(attempt: Attempt) -> None:
    """Rename the folder at once, then remove as much of it as possible. `sweep` removes the rest."""
    target = attempt.root.at("attempts", f".gone-{attempt.name}-{os.urandom(4).hex()}")
    try:
        os.rename(attempt.path, target)
    except FileNotFoundError:
        return
    sync_folder(os.path.dirname(target))
    remove_or_mark(target)
