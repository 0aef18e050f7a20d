"""The root folder: it holds all data of the runner on a machine, including the attempts' folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import (
    CELL,
    STAYS,
    is_disk_full,
    make_folder,
    read_json,
    read_text,
    remove_file,
    size_of,
    sync_folder,
    write_file,
    write_json,
)
from groupwise.jobs.hosts.runner.locks import HeldLock
from groupwise.jobs.hosts.runner.protocol import RequestRejected, is_count, text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
ATTEMPT_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,79})\.(0|[1-9][0-9]{0,18})")
MAX_EPOCH = (1 << 62) - 1
"""Highest accepted epoch; `ATTEMPT_NAME` has enough digits for larger numbers."""
TOKEN = "queued.json"
SPARE = 256 * 1024
"""Bytes reserved in a root for `void` and `forget` on a full disk; more than a launch leaves over when it has claimed its folder."""
MAX_UNREMOVED = 20
"""Most folders of this kind (prefix STAYS) that an answer lists."""


class Root:
    """The root folder of a runner on a machine."""

    def __init__(self, path: str) -> None:
        self.path = path

    def at(self, *parts: str) -> str:
        """A path in it."""
        return os.path.join(self.path, *parts)

    def place(self) -> str | None:
        """The root's permanent random name. A root with another name knows nothing of the attempts in this one. None if it could not be
        created."""
        path = self.at("place")
        name = read_text(path, CELL)
        if name:
            return name
        temporary = f"{path}.{os.getpid()}.new"
        try:
            make_folder(self.path)
            write_file(temporary, os.urandom(16).hex().encode())
            with contextlib.suppress(FileExistsError):
                # If several requests do this at once, the first determines the name.
                os.link(temporary, path)
            remove_file(temporary)
            sync_folder(self.path)
        except OSError:
            remove_file(temporary)
        return read_text(path, CELL) or None

    def lock(self, name: str) -> str:
        """The path of a lock file."""
        return os.path.join(make_folder(self.at("locks")), name)

    def job_lock(self, job: str) -> HeldLock:
        """The lock that is held while it is decided which request creates an attempt of this job; several jobs share a lock."""
        return HeldLock(self.lock(f"jobs-{hashlib.sha256(job.encode()).hexdigest()[:2]}"))

    def gpu_lock(self, uuid: str) -> str:
        """The path of a GPU's lock file: locked exclusively for a whole GPU, jointly for shares of it."""
        return self.lock(f"gpu-{as_file_name(uuid)}.lock")

    def shares(self, uuid: str) -> str:
        """The folder with one locked file for each share of a GPU."""
        return make_folder(self.at("locks", f"shares-{as_file_name(uuid)}"))

    def blob(self, sha: str) -> str:
        """The path of a blob, by its hash."""
        return self.at("blobs", sha[:2], sha)

    def epochs(self, job: str) -> dict[str, Any]:
        """The highest epoch of a job that was seen here, and the highest forgotten one, as {"highest", "forgotten"}; -1 if there was
        none."""
        return {"highest": -1, "forgotten": -1, **(read_json(self.at("epochs", job)) or {})}

    def record_epoch(self, job: str, **epochs: int) -> None:
        """Raise the numbers that `epochs` returns; they never decrease."""
        recorded = self.epochs(job)
        raised = {
            name: max(recorded[name], epochs.get(name, -1)) for name in ("highest", "forgotten")
        }
        if raised != recorded:
            make_folder(self.at("epochs"))
            write_json(self.at("epochs", job), raised)


def as_file_name(uuid: str) -> str:
    """The UUID as a file name: UUIDs of MIG devices contain slashes."""
    return re.sub(r"[^A-Za-z0-9-]", "_", uuid)


def root_of(body: dict[str, Any]) -> Root:
    """The root that a request names. Relative paths and "~" are below HOME."""
    return Root(os.path.join(os.path.expanduser("~"), os.path.expanduser(text_of(body, "root"))))


class Attempt:
    """One attempt: the folder `attempts/<job>.<epoch>`."""

    def __init__(self, root: Root, job: str, epoch: int) -> None:
        self.root, self.job, self.epoch = root, job, epoch
        self.name = f"{job}.{epoch}"
        self.path = root.at("attempts", self.name)

    def at(self, *parts: str) -> str:
        """A path in it."""
        return os.path.join(self.path, *parts)

    @property
    def work(self) -> str:
        """The working folder of the command."""
        return self.at("work")


def attempt_of(root: Root, body: dict[str, Any]) -> Attempt:
    """The attempt that a request names. Raises RequestRejected `bad_request`."""
    job, epoch = text_of(body, "job"), body["epoch"]
    if not JOB_ID.fullmatch(job):
        raise RequestRejected("bad_request", "job: 1 to 80 letters, digits, _ and - are expected")
    if not is_count(epoch, MAX_EPOCH):
        raise RequestRejected("bad_request", "epoch: a whole number from 0 is expected")
    return Attempt(root, job, epoch)


def attempt_by_name(root: Root, name: str) -> Attempt:
    """The attempt named `<job>.<epoch>`. Raises RequestRejected `bad_request`."""
    match = ATTEMPT_NAME.fullmatch(name)
    if not match:
        raise RequestRejected("bad_request", "an attempt is named <job>.<epoch>")
    return Attempt(root, match.group(1), int(match.group(2)))


def list_attempts(root: Root) -> tuple[list[Attempt], list[str]]:
    """All attempts, and the names below `attempts` that are not attempts. Names with a leading dot are folders that are being prepared or
    removed."""
    try:
        names = sorted(os.listdir(root.at("attempts")))
    except OSError:
        return [], []
    attempts = [attempt_by_name(root, name) for name in names if ATTEMPT_NAME.fullmatch(name)]
    attempts = [attempt for attempt in attempts if is_count(attempt.epoch, MAX_EPOCH)]
    attempt_names = {attempt.name for attempt in attempts}
    return attempts, [
        name for name in names if name not in attempt_names and not name.startswith(".")
    ]


def unremovable_folders(root: Root) -> list[str]:
    """Folders of forgotten attempts that still use disk space, because this user may not remove all of their content."""
    try:
        names = sorted(os.listdir(root.at("attempts")))
    except OSError:
        return []
    return [root.at("attempts", n) for n in names if n.startswith(STAYS)][:MAX_UNREMOVED]


def keep_spare(root: Root) -> None:
    """Reserve the disk space that `with_spare` uses. If the disk is too full, reserves nothing and raises OSError."""
    path = root.at("spare")
    if size_of(path) == SPARE:
        return
    try:
        make_folder(root.path)
        write_file(path, os.urandom(SPARE))  # random bytes: a file system could compress others
    except OSError:
        remove_file(path)
        raise


def with_spare(root: Root, work: Callable[[], None]) -> None:
    """Do the work. If the disk is full, free the reserved space and do the work again. The next launch reserves it again, or fails."""
    try:
        work()
    except OSError as error:
        if not is_disk_full(error):
            raise
        remove_file(root.at("spare"))
        work()
