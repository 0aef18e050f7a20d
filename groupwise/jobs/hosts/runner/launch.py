"""The launch of an attempt: from the request to a running supervisor, or to a folder that waits for an engine."""

from __future__ import annotations

import fcntl
import os
import select
import signal
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.attempt_folder import (
    claim,
    lower_epoch_member,
    never_started,
    remove_unstarted,
    take_token,
)
from groupwise.jobs.hosts.runner.files import (
    is_disk_full,
    read_json,
    remove_file,
    write_file,
)
from groupwise.jobs.hosts.runner.gpu_locks import resolve_gpus, take_gpus
from groupwise.jobs.hosts.runner.launch_request import (
    LARGEST_TOKEN,
    LaunchRequest,
    check_free_space,
    check_program,
)
from groupwise.jobs.hosts.runner.locks import LOCK_TIMEOUT, take_lock
from groupwise.jobs.hosts.runner.protocol import (
    LaunchRefused,
    RequestRejected,
    as_bytes,
    traceback_summary,
)
from groupwise.jobs.hosts.runner.root import TOKEN, Root, attempt_by_name, keep_spare
from groupwise.jobs.hosts.runner.state import ENGINE_LOG, exit_of, member, record_contact
from groupwise.jobs.hosts.runner.supervisor import Supervisor

if TYPE_CHECKING:
    from typing import Any, BinaryIO, NoReturn

    from groupwise.jobs.hosts.runner.protocol import VerbAnswer

LAUNCH_TIMEOUT = 20.0
"""Seconds that `launch` waits for its supervisor to report a state."""
BEGIN_SCRIPT = """#!/bin/sh
exec python3 -I -S -X utf8 {runner} {folder}
"""


def verb_launch(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Start the command of an attempt, once."""
    request = LaunchRequest(root, body)
    attempt = request.attempt
    if os.path.isdir(attempt.path) and not never_started(attempt):
        record_contact(attempt, request.last_contact)
        return member(attempt), b""
    gpu_variables: dict[str, str] = {}
    refused: LaunchRefused | None = None
    try:
        request.check()
        missing = request.missing()
        if missing:
            raise RequestRejected(
                "missing_blobs", f"{len(missing)} blobs have to be sent first", missing=missing
            )
        check_free_space(request)
        if not request.engine:
            check_program(request)
            gpu_variables = resolve_gpus(request)
    except LaunchRefused as error:
        refused = error
    keep_spare(root)
    with root.job_lock(attempt.job):
        remove_unstarted(attempt)
        if os.path.isdir(attempt.path):
            return member(attempt), b""
        epochs = root.epochs(attempt.job)
        if attempt.epoch < epochs["highest"] or attempt.epoch <= epochs["forgotten"]:
            return lower_epoch_member(attempt, epochs), b""
        root.record_epoch(attempt.job, highest=attempt.epoch)
        try:
            if refused:
                raise refused
            ready_fd = (
                enqueue(request) if request.engine else start_supervisor(request, gpu_variables)
            )
        except LaunchRefused as error:
            claim(attempt, {"phase": "refused", "refused": error.record, **request.first_state()})
            return member(attempt), b""
    if ready_fd is not None:
        # Readable once the supervisor has closed the pipe.
        select.select([ready_fd], [], [], LAUNCH_TIMEOUT)
        os.close(ready_fd)
    return member(attempt), b""


def enqueue(request: LaunchRequest) -> None:
    """Create the attempt's folder with all files that the engine needs to start it. Raises LaunchRefused."""
    blobs_lock = lock_blobs(request)
    try:
        state = {"phase": "queued", **request.first_state()}
        claim(
            request.attempt,
            state,
            request.last_contact,
            lambda folder: fill_queued(request, folder),
        )
    finally:
        os.close(blobs_lock)


def lock_blobs(request: LaunchRequest) -> int:
    """Lock the blobs against removal by `sweep`. Raises RequestRejected `busy` if a sweep is running, or if a blob of this launch is
    missing."""
    lock = take_lock(request.root.lock("blobs.lock"), fcntl.LOCK_SH, LOCK_TIMEOUT)
    if lock is None or request.missing():
        raise RequestRejected("busy", "blobs are being swept; ask again")
    return lock


def fill_queued(request: LaunchRequest, folder: str) -> None:
    """Write the job's files, the runner itself, the script that the engine runs, and the token."""
    import shlex

    attempt = request.attempt
    try:
        for _ in request.lay_out(os.path.join(folder, "work")):
            pass
    except OSError as error:
        if is_disk_full(error):
            raise
        raise LaunchRefused("bad_spec", f"its files cannot be laid out: {error}") from None
    with open(__file__, "rb") as file:  # on a machine all modules of the runner are this one file
        write_file(os.path.join(folder, "runner.py"), file.read())
    runner, attempt_path = shlex.quote(attempt.at("runner.py")), shlex.quote(attempt.path)
    script = BEGIN_SCRIPT.format(runner=runner, folder=attempt_path).encode()
    write_file(os.path.join(folder, "begin.sh"), script)
    fields = {
        name: value for name, value in request.body.items() if name not in ("clock", "source")
    }
    token = {**fields, "root": os.path.abspath(request.root.path), "secrets": request.secrets}
    write_file(os.path.join(folder, TOKEN), as_bytes(token))
    write_file(os.path.join(folder, ENGINE_LOG), b"")
    write_file(os.path.join(folder, "supervisor.lock"), b"")


def start_supervisor(request: LaunchRequest, gpu_variables: dict[str, str]) -> int:
    """Take locks, create the folder, fork the supervisor. Returns a pipe that becomes readable once the attempt's state is known. Raises
    LaunchRefused."""
    locks = take_gpus(request)
    blobs_lock = lock_blobs(request)
    lock = claim(
        request.attempt, {"phase": "claimed", **request.first_state()}, request.last_contact
    )
    assert lock is not None, "a claimed folder has a lock"
    ready_r, ready_w = os.pipe()
    child = os.fork()
    if child == 0:
        detach(request, gpu_variables, [lock, *locks], blobs_lock, ready_w)
    for fd in (lock, *locks, blobs_lock, ready_w):
        os.close(fd)
    os.waitpid(child, 0)
    return ready_r


def detach(
    request: LaunchRequest,
    gpu_variables: dict[str, str],
    locks: list[int],
    blobs_lock: int,
    ready_fd: int,
) -> NoReturn:
    """Fork a grandchild in its own session, which init or a subreaper adopts. It becomes the supervisor."""
    try:
        os.setsid()
        if os.fork() == 0:
            Supervisor(request, gpu_variables, locks, blobs_lock, ready_fd).run()
    except BaseException as error:  # noqa: BLE001
        # This process is a copy of the one that answers the request. After any error it must exit and not return into that code.
        text = f"{type(error).__name__} at {traceback_summary(error)}: {error}\n"
        os.write(2, text.encode("utf-8", "replace"))
    finally:
        os._exit(0)


def supervise(folder: str) -> int:
    """Called by `begin.sh`: start a queued attempt in the foreground, on the machine that its engine has chosen.

    Returns the command's exit status as shells report it: 128 plus the signal's number if a signal ended it."""
    os.umask(0o077)
    # Block TERM until the supervisor's handler is installed.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    state = read_json(os.path.join(folder, "state.json")) or {}
    if not state:
        return skip_attempt(
            f"{folder} is not there any more: it was removed, or is not on this machine"
        )
    attempt = attempt_by_name(
        Root(os.path.dirname(os.path.dirname(folder))), os.path.basename(folder)
    )
    lock = take_lock(attempt.at("supervisor.lock"), timeout=LOCK_TIMEOUT)
    token = attempt.at(f"{TOKEN}.{os.urandom(4).hex()}")
    if lock is None or not take_token(attempt, token):
        return skip_attempt(f"{attempt.name} was begun before, or voided; it does not begin again")
    body = read_json(token, LARGEST_TOKEN) or {}
    remove_file(token)
    request = LaunchRequest(attempt.root, body)
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    gpu_variables = {
        "CUDA_VISIBLE_DEVICES": "",
        **{n: os.environ[n] for n in names if n in os.environ},
    }
    devnulls = [os.open(os.devnull, os.O_RDWR) for _ in range(2)]
    Supervisor(request, gpu_variables, [lock], *devnulls).run()
    exit_record = exit_of(attempt, "exit.json") or {}
    if exit_record.get("signal") is not None:
        return 128 + int(exit_record["signal"])
    return 1 if exit_record.get("code") is None else int(exit_record["code"])


def skip_attempt(message: str) -> int:
    """Write the message to the engine's log and succeed: if an engine starts an attempt twice, the attempt has not failed."""
    os.write(2, (message + "\n").encode("utf-8", "replace"))
    return 0
