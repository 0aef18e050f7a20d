"""What a job leaves behind, brought from its machine to `artefacts/<job>/<epoch>/`, and `artefacts/<job>/current`, the newest.

The machine says what there is (path, sha256, mode, size); every file is fetched (large ones in pieces, of small ones many with one call),
hashed here, and flushed; then the folder gets its name, so that a folder of that name is whole and right. What was fetched before a crash
lies beside it under another name, and is gone on with.

The machine is not trusted with this disk: only plain files inside the folder are made, none beyond the job's limits. What is no plain file
(a link, a pipe, a device) is left out, and stands with its reason in `<epoch>.json`, beside the hashes of what came. What should have come
and cannot, is why the artefacts are not whole; so is an artefact that the job names and that is no plain file or folder itself: all of it
would be lost, and nobody would know.

In a gang, those of rank r lie in `<epoch>.<r>/`.
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

from groupwise.jobs.fleet.attempts.controller import Collected, Part
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.disk_full import no_room
from groupwise.jobs.fleet.files.folders import folder_name
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.fleet.store.tables import Job
from groupwise.jobs.hosts.answers import WorkTree
from groupwise.jobs.hosts.fetching import Changed, Fetching, to_its_end
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
"""Why the machine does not offer a plain file. Everything else that it refuses is none."""
NAMED = {
    "link": "a symbolic link stands there or above it, and links are not followed: write into the folder itself",
    "device": "a device stands there, and only files and folders are fetched",
    "pipe": "a pipe stands there, and only files and folders are fetched",
    "socket": "a socket stands there, and only files and folders are fetched",
}
"""Why the machine does not offer what the job names as an artefact. Below one, these are left out and nothing more."""
TRIES = 2
"""Of the whole list, where a file was another one by the time that it was read."""
MAX_PATHS_LISTED = 5
"""Paths in a message."""


def artefact_folder(artefacts: Path, job: str, epoch: int, rank: int = 0) -> Path:
    """Where they lie, or would."""
    return artefacts / folder_name(job) / (str(epoch) if rank == 0 else f"{epoch}.{rank}")


def record_of(folder: Path) -> Path:
    """Beside the folder: which files there are, which were left out and why."""
    return folder.with_name(f"{folder.name}.json")


class Collector:
    """Brings artefacts to this machine's disk, for the attempts of one dispatcher."""

    def __init__(self, artefacts: Path, store: BlobStore, gateway: Gateway) -> None:
        """`store`: what of them is a mirrored checkpoint need not come twice."""
        self._artefacts = artefacts
        self._store = store
        self._gateway = gateway

    async def collect(self, part: Part) -> Collected:
        """Fetch and verify them all. Raises HostError, OSError."""
        target = artefact_folder(self._artefacts, part.job_id, part.epoch, part.rank)
        if not target.exists():
            problem = await self._fetch(part, target)
            if problem is not None:
                return Collected(problem)
        if part.rank == 0:
            await self._write("current", lambda: _link_current(target))
        return await asyncio.to_thread(_collected, target, from_json(part.spec).artefacts)

    async def _fetch(self, part: Part, target: Path) -> str | None:
        limits = from_json(part.spec).limits
        folder, lock = await asyncio.to_thread(_partial, target)
        fetching = Fetching(part.runner, part.job_id, part.epoch, folder, self._written)
        try:
            why = ""
            for _ in range(TRIES):
                tree = await part.runner.manifest(part.job_id, part.epoch, "artefacts")
                problem = _beyond(tree.files, limits) or await asyncio.to_thread(
                    self._never_fits, sum(entry.size for entry in tree.files.values())
                )
                if problem is not None:
                    return problem
                await self._copy_known(part, folder, tree.files)
                try:
                    await fetching.files(tree.files)
                except Changed as change:
                    why = str(change)
                    continue
                await self._write("publish", partial(_publish, folder, target, tree))
                return None
            return f"{why} has been changed since the command ended"
        finally:
            os.close(lock)

    def _never_fits(self, size: int) -> str | None:
        """Why they are not fetched, whatever is removed here. OSError where they would fit if there were room."""
        problem = no_room(self._artefacts, size)
        if problem is not None and size < shutil.disk_usage(self._store.root).total / 2:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {problem}")
        return problem

    async def _copy_known(self, part: Part, folder: Path, files: Manifest) -> None:
        """What is in the store already, and of its own project: the machine says which file it is, and may name any."""
        stored = await asyncio.to_thread(_stored, files, self._store)
        if not stored:
            return
        hashes = {entry.sha256 for entry in stored.values()}
        lacking = await self._gateway.look(lambda session: _lacking_rights(session, part, hashes))
        known = {path: each for path, each in stored.items() if each.sha256 not in lacking}
        await self._write("known", partial(_copy, folder, known, self._store))

    async def _write(self, name: str, fn: Callable[[], T]) -> T:
        return await to_its_end(self._written(name, fn))

    def _written(self, name: str, fn: Callable[[], T]) -> Awaitable[T]:
        return self._gateway.write(f"artefacts.{name}", fn)


def _beyond(files: Manifest, limits: Limits) -> str | None:
    """Why so many, or so large, are not fetched: the machine keeps to the limits, but is not trusted to."""
    size = sum(entry.size for entry in files.values())
    if size > limits.artefact_mb << 20:
        largest = sorted(files, key=lambda path: -files[path].size)[:MAX_PATHS_LISTED]
        shown = ", ".join(f"{path} ({files[path].size} bytes)" for path in largest)
        return f"the artefacts are {size} bytes; the job's limit is {limits.artefact_mb} MiB. The largest: {shown}"
    if len(files) > limits.artefact_files:
        return f"the artefacts are {len(files)} files; the job's limit is {limits.artefact_files}"
    return None


def _partial(target: Path) -> tuple[Path, int]:
    """A folder to fetch to, and its lock; that of an earlier try, unless somebody is at work there."""
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


def _lacking_rights(session: Session, part: Part, hashes: Collection[str]) -> frozenset[str]:
    """What the job's project has neither sent nor has in a checkpoint."""
    project = session.scalars(select(Job.project).where(Job.job_id == part.job_id)).one()
    return rights.lacking(session, [project], hashes)


def _stored(files: Manifest, store: BlobStore) -> Manifest:
    return {path: entry for path, entry in files.items() if entry.sha256 in store}


def _copy(folder: Path, files: Manifest, store: BlobStore) -> None:
    for path, entry in files.items():
        place = folder / path
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(BlobError):
                store.copy(entry, place)


def _publish(folder: Path, target: Path, tree: WorkTree) -> None:
    """Give the folder its name, with nothing in it but what belongs there."""
    for place in sorted(folder.rglob("*"), reverse=True):
        if place.is_dir():
            sync_folder(place)
        elif place.relative_to(folder).as_posix() not in tree.files:
            place.unlink()
    sync_folder(folder)
    _write_record(record_of(target), tree)
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(folder)  # another process was faster; what it has is the same
    sync_folder(target.parent)


def _write_record(path: Path, tree: WorkTree) -> None:
    files = {name: [e.sha256, e.mode, e.size] for name, e in tree.files.items()}
    document = {
        "files": files,
        "left_out": [list(entry) for entry in tree.refused],
        "left_out_more": dict(tree.refused_more),
    }
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temporary.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _collected(target: Path, named: Collection[str]) -> Collected:
    """What should be there and is not, and how much else was left out. `named`: the paths that the job calls its artefacts."""
    document = json.loads(record_of(target).read_text())
    left_out: list[tuple[str, str]] = document["left_out"]
    more: dict[str, int] = document.get("left_out_more", {})
    reasons = [(path, _lacking(path, why, named)) for path, why in left_out]
    lacking = [f"{path}: {reason}" for path, reason in reasons if reason]
    unnamed = sum(number for why, number in more.items() if why in KEPT_BACK)
    others = len(left_out) - len(lacking) + sum(more.values()) - unnamed
    if not lacking and not unnamed:
        return Collected(left_out=others)
    told = f"{len(lacking) + unnamed} of the artefacts did not come: {'; '.join(lacking[:MAX_PATHS_LISTED])}"
    return Collected(told, others)


def _lacking(path: str, why: str, named: Collection[str]) -> str | None:
    """Why it should have come and cannot; None: it is left out, as is said beforehand."""
    return KEPT_BACK.get(why) or (NAMED.get(why, why) if path in named else None)


def _link_current(target: Path) -> None:
    """`current` leads to the newest epoch that has been fetched."""
    link = target.with_name("current")
    with contextlib.suppress(OSError, ValueError):
        if int(os.readlink(link)) >= int(target.name):
            return
    temporary = target.with_name(f".current.{uuid.uuid4().hex}")
    temporary.symlink_to(target.name)
    temporary.replace(link)
    sync_folder(target.parent)
