"""Fetches the artefacts of a job from its machine to `artefacts/<job>/<epoch>/`; `artefacts/<job>/current` links to the newest.

The machine lists its files (path, sha256, mode, size); every file is fetched (large ones in pieces, small ones many in one call), hashed
here, and flushed; then the folder is renamed to its final name. A folder of that name is therefore complete and correct. After a crash, the
files fetched before are next to it under another name, and the next try continues with them.

The machine is not trusted with this disk: only plain files inside the folder are made, none beyond the job's limits. Everything else (a
link, a pipe, a device) is left out, and listed with its reason in `<epoch>.json`, together with the hashes of the fetched files. The
artefacts are incomplete if a file should have been fetched and cannot be, and also if an artefact that the job names is itself no plain
file or folder: otherwise all of it would be lost silently.

In a gang, those of rank r are in `<epoch>.<r>/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.core.interruption import wait_until_done
from groupwise.jobs.fleet.attempts.controller import Collected, MemberOutput
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.disk_full import no_room
from groupwise.jobs.fleet.files.logs import folder_name
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.fleet.store.tables import Job
from groupwise.jobs.hosts.answers import WorkTree
from groupwise.jobs.hosts.fetching import Fetcher, FileChanged
from groupwise.jobs.hosts.files import BlobError, BlobStore, sync_folder
from groupwise.jobs.hosts.spec import Limits, Manifest, from_json

T = TypeVar("T")

KEPT_BACK = {
    "too_large": "larger than the job's limit for artefacts leaves room for",
    "too_many": "more files than the job's limit for artefacts, or than a list of them holds",
    "too_deep": "too many folders deep",
    "changing": "written to while it was read",
    "unreadable": "not to be read by the machine's user",
    "broken": "the machine could not read it",
    "not_utf8": "a name that is not UTF-8",
}
"""Reasons why the machine does not offer a plain file. All its other reasons concern things that are not plain files."""
NAMED = {
    "link": "it is a symbolic link or below one, and links are not followed: write into the folder itself",
    "device": "it is a device, and only files and folders are fetched",
    "pipe": "it is a pipe, and only files and folders are fetched",
    "socket": "it is a socket, and only files and folders are fetched",
}
"""Reasons why a named artefact itself is not offered. Inside an artefact, such things are just left out."""
TRIES = 2
"""Tries of the whole list, if a file had changed by the time that it was read."""
MAX_PATHS_LISTED = 5
"""Maximum paths in a message."""


def artefact_folder(artefacts: Path, job: str, epoch: int, rank: int = 0) -> Path:
    """The folder of an attempt's artefacts, whether it exists or not."""
    return artefacts / folder_name(job) / (str(epoch) if rank == 0 else f"{epoch}.{rank}")


def record_of(folder: Path) -> Path:
    """The record next to the folder: its files, and those that were left out, with the reasons."""
    return folder.with_name(f"{folder.name}.json")


class Collector:
    """Fetches artefacts to this machine's disk, for the attempts of one dispatcher."""

    def __init__(self, artefacts: Path, store: BlobStore, gateway: Gateway) -> None:
        """`store`: files that belong to a mirrored checkpoint are copied from it instead of fetched."""
        self._artefacts = artefacts
        self._store = store
        self._gateway = gateway

    async def collect(self, output: MemberOutput) -> Collected:
        """Fetch and verify them all. Raises HostError, OSError."""
        target = artefact_folder(self._artefacts, output.job_id, output.epoch, output.rank)
        if not target.exists():
            problem = await self._fetch_artefacts(output, target)
            if problem is not None:
                return Collected(problem)
        if output.rank == 0:
            await self._write_through_gateway("current", lambda: _link_current(target))
        return await asyncio.to_thread(_collection_result, target, from_json(output.spec).artefacts)

    async def _fetch_artefacts(self, output: MemberOutput, target: Path) -> str | None:
        """Fetch all files and publish the folder. Returns the reason if that can never succeed."""
        limits = from_json(output.spec).limits
        folder, lock = await asyncio.to_thread(_lock_partial, target)
        downloads = Fetcher(output.runner, output.job_id, output.epoch, folder, self._write_file)
        try:
            changed_path = ""
            for _ in range(TRIES):
                tree = await output.runner.manifest(output.job_id, output.epoch, "artefacts")
                problem = _limit_problem(tree.files, limits) or await asyncio.to_thread(
                    self._never_fits, sum(entry.size for entry in tree.files.values())
                )
                if problem is not None:
                    return problem
                await self._copy_known(output, folder, tree.files)
                try:
                    await downloads.fetch(tree.files)
                except FileChanged as change:
                    changed_path = str(change)
                    continue
                await self._write_through_gateway(
                    "publish", partial(_publish_folder, folder, target, tree)
                )
                return None
            return f"{changed_path} has been changed since the command ended"
        finally:
            os.close(lock)

    def _never_fits(self, size: int) -> str | None:
        """The reason if they are too large for this disk even when it is emptied. Raises OSError if they would fit then."""
        problem = no_room(self._artefacts, size)
        if problem is not None and size < shutil.disk_usage(self._store.root).total / 2:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {problem}")
        return problem

    async def _copy_known(self, output: MemberOutput, folder: Path, files: Manifest) -> None:
        """Copy files that are in the store already and that the project may name: the machine may claim any hash for a file."""
        stored = await asyncio.to_thread(
            lambda: {path: entry for path, entry in files.items() if entry.sha256 in self._store}
        )
        if not stored:
            return
        hashes = {entry.sha256 for entry in stored.values()}

        def lacking_rights(session: Session) -> frozenset[str]:
            project = session.scalars(select(Job.project).where(Job.job_id == output.job_id)).one()
            return rights.lacking(session, [project], hashes)

        lacking_hashes = await self._gateway.read(lacking_rights)

        def copy() -> None:
            for path, entry in stored.items():
                path_in_folder = folder / path
                if entry.sha256 not in lacking_hashes and not path_in_folder.exists():
                    path_in_folder.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(BlobError):
                        self._store.copy(entry, path_in_folder)

        await self._write_through_gateway("known", copy)

    async def _write_through_gateway(self, name: str, fn: Callable[[], T]) -> T:
        return await wait_until_done(self._write_file(name, fn))

    def _write_file(self, name: str, fn: Callable[[], T]) -> Awaitable[T]:
        return self._gateway.write(f"artefacts.{name}", fn)


def _limit_problem(files: Manifest, limits: Limits) -> str | None:
    """The reason if the files exceed the job's limits; the machine should enforce them, but is not trusted to."""
    size = sum(entry.size for entry in files.values())
    if size > limits.artefact_mb * 10**6:
        largest = sorted(files, key=lambda path: -files[path].size)[:MAX_PATHS_LISTED]
        listed = ", ".join(f"{path} ({files[path].size} bytes)" for path in largest)
        return f"the artefacts are {size} bytes; the job's limit is {limits.artefact_mb} MB. The largest: {listed}"
    if len(files) > limits.artefact_files:
        return f"the artefacts are {len(files)} files; the job's limit is {limits.artefact_files}"
    return None


def _lock_partial(target: Path) -> tuple[Path, int]:
    """The folder to fetch to, and its lock: the folder of an earlier try, unless another process is fetching there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for name in (f".{target.name}.partial", f".{target.name}.partial-{uuid.uuid4().hex}"):
        folder = target.with_name(name)
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), folder.stat()):
                return folder, lock
        except (BlockingIOError, FileNotFoundError):
            pass  # another process is fetching them there, or has finished just now
        os.close(lock)
    raise OSError(f"no folder to fetch to can be locked beside {target}")


def _publish_folder(folder: Path, target: Path, tree: WorkTree) -> None:
    """Remove stray files from the folder, write the record, and give the folder its name."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        elif path.relative_to(folder).as_posix() not in tree.files:
            path.unlink()
    sync_folder(folder)
    document = {
        "files": {name: [e.sha256, e.mode, e.size] for name, e in tree.files.items()},
        "left_out": [list(entry) for entry in tree.refused],
        "left_out_more": dict(tree.refused_more),
    }
    record = record_of(target)
    temporary = record.with_name(f".{record.name}.{uuid.uuid4().hex}")
    with temporary.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(record)
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(folder)  # another process was faster; its folder has the same contents
    sync_folder(target.parent)


def _collection_result(target: Path, artefacts: Collection[str]) -> Collected:
    """Report required files that are missing, and how much else was left out. `artefacts`: the paths that the job names."""
    document = json.loads(record_of(target).read_text())
    left_out: list[tuple[str, str]] = document["left_out"]
    uncounted: dict[str, int] = document.get("left_out_more", {})
    missing: list[str] = []
    for path, code in left_out:
        reason = KEPT_BACK.get(code) or (NAMED.get(code, code) if path in artefacts else None)
        if reason:
            missing.append(f"{path}: {reason}")
    unnamed_missing = sum(number for code, number in uncounted.items() if code in KEPT_BACK)
    other_count = len(left_out) - len(missing) + sum(uncounted.values()) - unnamed_missing
    if not missing and not unnamed_missing:
        return Collected(left_out=other_count)
    description = "; ".join(missing[:MAX_PATHS_LISTED])
    problem = f"{len(missing) + unnamed_missing} of the artefacts did not come: {description}"
    return Collected(problem, other_count)


def _link_current(target: Path) -> None:
    """Point `current` to the newest epoch that has been fetched."""
    link = target.with_name("current")
    with contextlib.suppress(OSError, ValueError):
        if int(os.readlink(link)) >= int(target.name):
            return
    temporary = target.with_name(f".current.{uuid.uuid4().hex}")
    temporary.symlink_to(target.name)
    temporary.replace(link)
    sync_folder(target.parent)
