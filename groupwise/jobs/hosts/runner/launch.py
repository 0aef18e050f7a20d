"""The launch of an attempt: from the request to a running supervisor, or to a folder that waits for an engine."""

from __future__ import annotations

import fcntl
import os
import select
import signal
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.claims import (
    claim,
    lower_epoch_member,
    never_began,
    remove_unbegun,
    take_token,
)
from groupwise.jobs.hosts.runner.files import (
    is_full,
    read_json,
    remove_file,
    write_file,
)
from groupwise.jobs.hosts.runner.gpu_locks import resolve_gpus, take_gpus
from groupwise.jobs.hosts.runner.locks import LOCK_PATIENCE, take_lock
from groupwise.jobs.hosts.runner.order import LARGEST_TOKEN, Order, check_program, check_room
from groupwise.jobs.hosts.runner.protocol import Refusal, Refused, as_bytes, place_of
from groupwise.jobs.hosts.runner.root import TOKEN, Root, attempt_by_name, keep_spare
from groupwise.jobs.hosts.runner.state import ENGINE_LOG, exit_of, member, record_contact
from groupwise.jobs.hosts.runner.supervisor import Supervisor

if TYPE_CHECKING:
    from typing import Any, BinaryIO, NoReturn

    from groupwise.jobs.hosts.runner.protocol import Answered

LAUNCH_PATIENCE = 20.0
"""Seconds that `launch` waits for its supervisor to report a state."""
BEGIN = """#!/bin/sh
exec python3 -I -S -X utf8 {runner} {folder}
"""


def verb_launch(root: Root, body: dict[str, Any], _: BinaryIO) -> Answered:
    """Start the command of an attempt, once."""
    order = Order(root, body)
    attempt = order.attempt
    if os.path.isdir(attempt.path) and not never_began(attempt):
        record_contact(attempt, order.heard)
        return member(attempt), b""
    visible: str | None = None
    refused: Refused | None = None
    try:
        order.check()
        missing = order.missing()
        if missing:
            raise Refusal(
                "missing_blobs", f"{len(missing)} blobs have to be sent first", missing=missing
            )
        check_room(order)
        if not order.engine:
            check_program(order)
            visible = resolve_gpus(order)
    except Refused as error:
        refused = error
    keep_spare(root)
    with root.job_lock(attempt.job):
        remove_unbegun(attempt)
        if os.path.isdir(attempt.path):
            return member(attempt), b""
        known = root.highest(attempt.job)
        if attempt.epoch < known["highest"] or attempt.epoch <= known["forgotten"]:
            return lower_epoch_member(attempt, known), b""
        root.note_epoch(attempt.job, highest=attempt.epoch)
        try:
            if refused:
                raise refused
            report = enqueue(order) if order.engine else begin(order, visible)
        except Refused as error:
            claim(attempt, {"phase": "refused", "refused": error.record, **order.first_state()})
            return member(attempt), b""
    if report is not None:
        # Readable once the supervisor has closed the pipe.
        select.select([report], [], [], LAUNCH_PATIENCE)
        os.close(report)
    return member(attempt), b""


def enqueue(order: Order) -> None:
    """Create the attempt's folder with all files that the engine needs to start it. Raises Refused."""
    blobs = hold_blobs(order)
    try:
        state = {"phase": "queued", **order.first_state()}
        claim(order.attempt, state, order.heard, lambda folder: fill_queued(order, folder))
    finally:
        os.close(blobs)


def hold_blobs(order: Order) -> int:
    """Lock the blobs against removal by `sweep`. Raises Refusal `busy` if a sweep is running, or if a blob of this launch is missing."""
    lock = take_lock(order.root.lock("blobs.lock"), fcntl.LOCK_SH, LOCK_PATIENCE)
    if lock is None or order.missing():
        raise Refusal("busy", "blobs are being swept; ask again")
    return lock


def fill_queued(order: Order, folder: str) -> None:
    """Write the job's files, the runner itself, the script that the engine runs, and the token."""
    import shlex

    attempt = order.attempt
    try:
        for _ in order.lay_out(os.path.join(folder, "work")):
            pass
    except OSError as error:
        if is_full(error):
            raise
        raise Refused("bad_spec", f"its files cannot be laid out: {error}") from None
    with open(__file__, "rb") as text:  # on a machine all modules of the runner are this one file
        write_file(os.path.join(folder, "runner.py"), text.read())
    runner, own = shlex.quote(attempt.at("runner.py")), shlex.quote(attempt.path)
    begins = BEGIN.format(runner=runner, folder=own).encode()
    write_file(os.path.join(folder, "begin.sh"), begins)
    fields = {name: value for name, value in order.body.items() if name not in ("clock", "source")}
    token = {**fields, "root": os.path.abspath(order.root.path), "secrets": order.secrets}
    write_file(os.path.join(folder, TOKEN), as_bytes(token))
    write_file(os.path.join(folder, ENGINE_LOG), b"")
    write_file(os.path.join(folder, "supervisor.lock"), b"")


def begin(order: Order, visible: str | None) -> int:
    """Take locks, create the folder, fork the supervisor. Returns a pipe that becomes readable once the attempt's state is known. Raises
    Refused."""
    locks = take_gpus(order)
    blobs = hold_blobs(order)
    lock = claim(order.attempt, {"phase": "claimed", **order.first_state()}, order.heard)
    assert lock is not None, "a claimed folder has a lock"
    hear, speak = os.pipe()
    between = os.fork()
    if between == 0:
        detach(order, visible or "", [lock, *locks], blobs, speak)
    for fd in (lock, *locks, blobs, speak):
        os.close(fd)
    os.waitpid(between, 0)
    return hear


def detach(order: Order, visible: str, locks: list[int], blobs: int, speak: int) -> NoReturn:
    """Fork a grandchild in its own session, which init or a subreaper adopts. It becomes the supervisor."""
    try:
        os.setsid()
        if os.fork() == 0:
            Supervisor(order, visible, locks, blobs, speak).run()
    except BaseException as error:  # noqa: BLE001
        # This process is a copy of the one that answers the request. After any error it must exit and not return into that code.
        text = f"{type(error).__name__} at {place_of(error)}: {error}\n"
        os.write(2, text.encode("utf-8", "replace"))
    finally:
        os._exit(0)


def supervise(folder: str) -> int:
    """Called by `begin.sh`: start a queued attempt in the foreground, on the machine that its engine has chosen.

    Returns the command's exit status as shells report it: 128 plus the signal's number if a signal ended it."""
    os.umask(0o077)
    # Block TERM until the supervisor's handler is installed.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    known = read_json(os.path.join(folder, "state.json")) or {}
    if not known:
        return skip_attempt(
            f"{folder} is not there any more: it was removed, or is not on this machine"
        )
    attempt = attempt_by_name(
        Root(os.path.dirname(os.path.dirname(folder))), os.path.basename(folder)
    )
    lock = take_lock(attempt.at("supervisor.lock"), patience=LOCK_PATIENCE)
    token = attempt.at(f"{TOKEN}.{os.urandom(4).hex()}")
    if lock is None or not take_token(attempt, token):
        return skip_attempt(f"{attempt.name} was begun before, or voided; it does not begin again")
    body = read_json(token, LARGEST_TOKEN) or {}
    remove_file(token)
    order = Order(attempt.root, body)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    nothing = [os.open(os.devnull, os.O_RDWR) for _ in range(2)]
    Supervisor(order, visible, [lock], *nothing).run()
    ended = exit_of(attempt, "exit.json") or {}
    if ended.get("signal") is not None:
        return 128 + int(ended["signal"])
    return 1 if ended.get("code") is None else int(ended["code"])


def skip_attempt(message: str) -> int:
    """Write the message to the engine's log and succeed: if an engine starts an attempt twice, the attempt has not failed."""
    os.write(2, (message + "\n").encode("utf-8", "replace"))
    return 0
