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
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.fleet.attempts.drive import Collected, Part
from groupwise.fleet.attempts.effects import Gateway
from groupwise.fleet.files.folders import folder_name
from groupwise.fleet.store import rights
from groupwise.fleet.store.tables import Job
from groupwise.hosts.answers import WorkTree
from groupwise.hosts.driver import GATHERED, PIECE
from groupwise.hosts.files import BlobError, BlobStore, hash_of, sync_folder
from groupwise.hosts.port import RunnerRefused
from groupwise.hosts.spec import FileEntry, Limits, Manifest, from_json

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
CHANGED = frozenset({"not_found", "changed", "refused_path"})
"""How a machine refuses to read a file that it offered before: something has changed it since."""
TRIES = 2
"""Of the whole list, where a file was another one by the time that it was read."""
AT_ONCE = 4
"""Calls to the machine for files, at once: each is for a piece of one, or for many small ones."""
SHOWN = 5
"""Paths in a message."""


class _Changed(Exception):
    """A file is not what the machine's list said."""


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
            await self._write("artefacts.current", lambda: _link_current(target))
        return await asyncio.to_thread(_collected, target, from_json(part.spec).artefacts)

    async def _fetch(self, part: Part, target: Path) -> str | None:
        limits = from_json(part.spec).limits
        folder, lock = await asyncio.to_thread(_partial, target)
        try:
            why = ""
            for _ in range(TRIES):
                tree = await part.runner.manifest(part.job_id, part.epoch, "artefacts")
                problem = _beyond(tree.files, limits)
                if problem is not None:
                    return problem
                await self._copy_known(part, folder, tree.files)
                try:
                    await self._files(part, folder, tree.files)
                except _Changed as change:
                    why = str(change)
                    continue
                await self._write("artefacts.publish", partial(_publish, folder, target, tree))
                return None
            return f"{why} has been changed since the command ended"
        finally:
            os.close(lock)

    async def _copy_known(self, part: Part, folder: Path, files: Manifest) -> None:
        """What is in the store already, and of its own project: the machine says which file it is, and may name any."""
        stored = await asyncio.to_thread(_stored, files, self._store)
        if not stored:
            return
        hashes = {entry.sha256 for entry in stored.values()}
        lacking = await self._gateway.look(lambda session: _lacking_rights(session, part, hashes))
        known = {path: each for path, each in stored.items() if each.sha256 not in lacking}
        await self._write("artefacts.known", partial(_copy, folder, known, self._store))

    async def _files(self, part: Part, folder: Path, files: Manifest) -> None:
        waiting = _parcels(files)

        async def work() -> None:
            for parcel in waiting:
                await self._parcel(part, folder, parcel)

        tasks = [asyncio.create_task(work()) for _ in range(AT_ONCE)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _parcel(self, part: Part, folder: Path, parcel: Manifest) -> None:
        """Several come together. What does not come so is another file by now or cannot be read: by itself it says why."""
        if len(parcel) > 1:
            parcel = await self._gather(part, folder, parcel)
        for path, entry in parcel.items():
            await self._file(part, folder / path, path, entry)

    async def _gather(self, part: Part, folder: Path, parcel: Manifest) -> Manifest:
        """With one call; those that have not come."""
        lacking = await self._write("artefacts.parcel", partial(_absent, folder, parcel))
        if not lacking:
            return lacking
        came = await part.runner.gather(part.job_id, part.epoch, lacking)
        return await self._write("artefacts.gathered", partial(_keep, folder, lacking, came))

    async def _file(self, part: Part, place: Path, path: str, entry: FileEntry) -> None:
        """Whole and verified. What an earlier try left may be torn: then once more, from the beginning."""
        here = await self._write("artefacts.file", partial(_begin, place, entry))
        if here and await self._rest(part, place, path, entry, here):
            return
        if not await self._rest(part, place, path, entry, 0):
            raise _Changed(path)

    async def _rest(self, part: Part, place: Path, path: str, entry: FileEntry, here: int) -> bool:
        """Fetch what follows `here`. False: the file that came out is not the one of the list, and is gone."""
        while here < entry.size:
            try:
                data = await part.runner.read(part.job_id, part.epoch, path, offset=here)
            except RunnerRefused as error:
                if error.code in CHANGED:
                    raise _Changed(path) from error
                raise
            if not data:
                raise _Changed(path)
            here = await self._write("artefacts.piece", partial(_append, place, here, data))
        return await self._write("artefacts.verify", partial(_finish, place, entry))

    async def _write(self, name: str, fn: Callable[[], T]) -> T:
        """Whoever is cancelled meanwhile waits for its end: a thread cannot be stopped, and the folder is somebody else's soon."""
        writing = asyncio.ensure_future(self._gateway.write(name, fn))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise


def _parcels(files: Manifest) -> Iterator[Manifest]:
    """Files that one call can bring, in order of their names; what is too large for one stands alone."""
    parcel: dict[str, FileEntry] = {}
    size = 0
    for path, entry in sorted(files.items()):
        if parcel and (len(parcel) == GATHERED or size + entry.size > PIECE):
            yield parcel
            parcel, size = {}, 0
        parcel[path] = entry
        size += entry.size
    if parcel:
        yield parcel


def _beyond(files: Manifest, limits: Limits) -> str | None:
    """Why so many, or so large, are not fetched: the machine keeps to the limits, but is not trusted to."""
    size = sum(entry.size for entry in files.values())
    if size > limits.artefact_mb << 20:
        largest = sorted(files, key=lambda path: -files[path].size)[:SHOWN]
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


def _begin(place: Path, entry: FileEntry) -> int:
    """How many bytes of a file are here already."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("ab") as file:
        size = os.fstat(file.fileno()).st_size
        if size > entry.size:
            file.truncate(0)
            return 0
    return size


def _absent(folder: Path, parcel: Manifest) -> Manifest:
    """Those that an earlier try has not left whole and right."""

    def is_here(path: str, entry: FileEntry) -> bool:
        place = folder / path
        return _begin(place, entry) == entry.size and _finish(place, entry)

    return {path: entry for path, entry in parcel.items() if not is_here(path, entry)}


def _keep(folder: Path, lacking: Manifest, came: Mapping[str, bytes]) -> Manifest:
    """Write what came; those that are lacking still."""
    for path, data in came.items():
        _append(folder / path, 0, data)
    kept = {path for path in came if _finish(folder / path, lacking[path])}
    return {path: entry for path, entry in lacking.items() if path not in kept}


def _append(place: Path, offset: int, data: bytes) -> int:
    with place.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(data)
    return offset + len(data)


def _finish(place: Path, entry: FileEntry) -> bool:
    """Whether it is the right file; then it is on the disk for good, else gone."""
    place.touch()  # one without content has not been written yet
    if hash_of(place) != entry.sha256:
        place.unlink()
        return False
    with place.open("rb") as file:
        os.fchmod(file.fileno(), entry.mode & 0o755 | 0o600)
        os.fsync(file.fileno())
    return True


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
    told = f"{len(lacking) + unnamed} of the artefacts did not come: {'; '.join(lacking[:SHOWN])}"
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
