"""The folder that holds everything the runner keeps on a machine, and the attempts in it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import (
    CELL,
    STAYS,
    is_full,
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
from groupwise.jobs.hosts.runner.protocol import Refusal, is_count, text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
ATTEMPT_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,79})\.(0|[1-9][0-9]{0,18})")
MOST_EPOCH = (1 << 62) - 1
"""Highest epoch that is accepted, although `ATTEMPT_NAME` has digits for more."""
TOKEN = "queued.json"
SPARE = 256 * 1024
"""Bytes set aside in a root for `void` and `forget` on a full disk; more than a launch leaves over when it has claimed its folder."""
MOST_UNREMOVED = 20
"""Most of those folders that an answer lists."""


class Root:
    """The folder on a machine that holds everything the runner keeps."""

    def __init__(self, path: str) -> None:
        self.path = path

    def at(self, *parts: str) -> str:
        """A path in it."""
        return os.path.join(self.path, *parts)

    def place(self) -> str | None:
        """The root's own permanent name: a root with another name knows nothing of attempts begun in this one. None if it could not be
        made."""
        path = self.at("place")
        name = read_text(path, CELL)
        if name:
            return name
        new = f"{path}.{os.getpid()}.new"
        try:
            make_folder(self.path)
            write_file(new, os.urandom(16).hex().encode())
            with contextlib.suppress(FileExistsError):
                os.link(new, path)  # of several requests, the first names it
            remove_file(new)
            sync_folder(self.path)
        except OSError:
            remove_file(new)
        return read_text(path, CELL) or None

    def lock(self, name: str) -> str:
        """The path of a lock file."""
        return os.path.join(make_folder(self.at("locks")), name)

    def job_lock(self, job: str) -> HeldLock:
        """Lock held while deciding which request makes an attempt of this job; several jobs share one."""
        return HeldLock(self.lock(f"jobs-{hashlib.sha256(job.encode()).hexdigest()[:2]}"))

    def gpu_lock(self, uuid: str) -> str:
        """The path of a GPU's lock: exclusive for a whole GPU, shared for shares of it."""
        return self.lock(f"gpu-{as_file_name(uuid)}.lock")

    def shares(self, uuid: str) -> str:
        """The folder with one locked file for each share of a GPU."""
        return make_folder(self.at("locks", f"shares-{as_file_name(uuid)}"))

    def blob(self, sha: str) -> str:
        """The path of a blob, by its hash."""
        return self.at("blobs", sha[:2], sha)

    def highest(self, job: str) -> dict[str, Any]:
        """{"highest": epoch, "forgotten": epoch}, -1 where there was none."""
        return {"highest": -1, "forgotten": -1, **(read_json(self.at("epochs", job)) or {})}

    def note_epoch(self, job: str, **seen: int) -> None:
        """Raise the numbers that `highest` returns; none ever falls."""
        known = self.highest(job)
        raised = {name: max(known[name], seen.get(name, -1)) for name in ("highest", "forgotten")}
        if raised != known:
            make_folder(self.at("epochs"))
            write_json(self.at("epochs", job), raised)


def as_file_name(uuid: str) -> str:
    """The UUID as a file name: those of MIG devices have slashes."""
    return re.sub(r"[^A-Za-z0-9-]", "_", uuid)


def root_of(body: dict[str, Any]) -> Root:
    """The root that a request names; relative paths and "~" are below HOME."""
    return Root(os.path.join(os.path.expanduser("~"), os.path.expanduser(text_of(body, "root"))))


class Attempt:
    """One folder `attempts/<job>.<epoch>`."""

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
    """The attempt that a request names."""
    job, epoch = text_of(body, "job"), body["epoch"]
    if not JOB_ID.fullmatch(job):
        raise Refusal("bad_request", "job: 1 to 80 letters, digits, _ and - are expected")
    if not is_count(epoch, MOST_EPOCH):
        raise Refusal("bad_request", "epoch: a whole number from 0 is expected")
    return Attempt(root, job, epoch)


def attempt_by_name(root: Root, name: str) -> Attempt:
    """The attempt named `<job>.<epoch>`. Raises Refusal `bad_request`."""
    found = ATTEMPT_NAME.fullmatch(name)
    if not found:
        raise Refusal("bad_request", "an attempt is named <job>.<epoch>")
    return Attempt(root, found.group(1), int(found.group(2)))


def attempts_here(root: Root) -> tuple[list[Attempt], list[str]]:
    """All attempts, and names below `attempts` that are no attempts; those that begin with a dot are being prepared."""
    try:
        names = sorted(os.listdir(root.at("attempts")))
    except OSError:
        return [], []
    found = [attempt_by_name(root, name) for name in names if ATTEMPT_NAME.fullmatch(name)]
    found = [attempt for attempt in found if is_count(attempt.epoch, MOST_EPOCH)]
    known = {attempt.name for attempt in found}
    return found, [name for name in names if name not in known and not name.startswith(".")]


def unremoved(root: Root) -> list[str]:
    """Folders of forgotten attempts that still take up room, because this user may not remove all that is in them."""
    try:
        names = sorted(os.listdir(root.at("attempts")))
    except OSError:
        return []
    return [root.at("attempts", n) for n in names if n.startswith(STAYS)][:MOST_UNREMOVED]


def keep_spare(root: Root) -> None:
    """Set aside the room that `with_spare` uses; OSError, and nothing is set aside, if the disk is too full for it."""
    path = root.at("spare")
    if size_of(path) == SPARE:
        return
    try:
        make_folder(root.path)
        write_file(path, os.urandom(SPARE))  # what could be compressed would be no room
    except OSError:
        remove_file(path)
        raise


def with_spare(root: Root, work: Callable[[], None]) -> None:
    """Do the work; if the disk is full, do it again in the room that was set aside. The next launch sets it aside again, or does not
    begin."""
    try:
        work()
    except OSError as error:
        if not is_full(error):
            raise
        remove_file(root.at("spare"))
        work()
