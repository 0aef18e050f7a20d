"""Fetches files of an attempt from its machine into a local folder.

The machine lists the files (path, sha256, mode, size). Large files are fetched in pieces, small ones many in one call. Each file is
hashed here and flushed to disk; a file that an earlier try left incomplete is continued. If a file differs from the list, it has changed
meanwhile: that raises `Changed`, and the caller has to request the list again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from groupwise.jobs.hosts.driver import GATHERED, PIECE, Runner, grouped
from groupwise.jobs.hosts.files import hash_of
from groupwise.jobs.hosts.port import RunnerRefused
from groupwise.jobs.hosts.spec import FileEntry, Manifest

T = TypeVar("T")

AT_ONCE = 4
"""Most concurrent calls to the machine, each for a piece of one file or for many small files."""
CHANGED = frozenset({"not_found", "changed", "refused_path"})
"""Error codes by which a machine refuses a file that it listed before: something has changed the file since."""


class Changed(Exception):
    """A file differs from the machine's list. The message is its path."""


class Write(Protocol):
    """Runs disk work in a thread; `name` is one word that describes the work."""

    def __call__(self, name: str, fn: Callable[[], T], /) -> Awaitable[T]: ...


def in_a_thread(name: str, fn: Callable[[], T]) -> Awaitable[T]:
    """The default `Write`."""
    return asyncio.to_thread(fn)


async def to_its_end(work: Awaitable[T]) -> T:
    """Wait for the work's end even if cancelled: a thread cannot be stopped, and another caller may use the folder next."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


class Fetching:
    """Copies files from the working folder of one attempt into `folder`, which no other caller uses meanwhile."""

    def __init__(
        self, runner: Runner, job: str, epoch: int, folder: Path, write: Write = in_a_thread
    ) -> None:
        self._runner, self._job, self._epoch = runner, job, epoch
        self._folder = folder
        self._do = write

    async def files(self, files: Manifest) -> None:
        """Fetch all `files`. Raises Changed, HostError, OSError; what has been fetched remains for the next try."""
        sized = [(path, files[path].size) for path in sorted(files)]
        waiting = grouped(sized, PIECE, GATHERED)

        async def work() -> None:
            for paths in waiting:
                parcel = {path: files[path] for path in paths}
                # A file that is not part of the answer has changed or cannot be read. Fetch it alone: then the error gives the reason.
                single = await self._gather(parcel) if len(parcel) > 1 else parcel
                for path, entry in single.items():
                    await self._file(path, entry)

        tasks = [asyncio.create_task(work()) for _ in range(AT_ONCE)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _gather(self, parcel: Manifest) -> Manifest:
        """Fetch several files with one call; returns those that were not fetched."""
        lacking = await self._write("parcel", partial(_missing_files, self._folder, parcel))
        if not lacking:
            return lacking
        came = await self._runner.gather(self._job, self._epoch, lacking)
        return await self._write("gathered", partial(_keep, self._folder, lacking, came))

    async def _file(self, path: str, entry: FileEntry) -> None:
        """Fetch a file completely and verify it. If what an earlier try left turns out to be wrong, fetch once more from the start."""
        here = await self._write("file", partial(_begin, self._folder / path, entry))
        if here and await self._rest(path, entry, here):
            return
        if not await self._rest(path, entry, 0):
            raise Changed(path)

    async def _rest(self, path: str, entry: FileEntry, here: int) -> bool:
        """Fetch the bytes from offset `here`. False if the result differs from the list; it is then removed."""
        place = self._folder / path
        while here < entry.size:
            try:
                data = await self._runner.read(self._job, self._epoch, path, offset=here)
            except RunnerRefused as error:
                if error.code in CHANGED:
                    raise Changed(path) from error
                raise
            if not data:
                raise Changed(path)
            here = await self._write("piece", partial(_append, place, here, data))
        return await self._write("verify", partial(_finish, place, entry))

    async def _write(self, name: str, fn: Callable[[], T]) -> T:
        return await to_its_end(self._do(name, fn))


def _begin(place: Path, entry: FileEntry) -> int:
    """Create the file if necessary; returns how many bytes of it exist already."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("ab") as file:
        size = os.fstat(file.fileno()).st_size
        if size > entry.size:
            file.truncate(0)
            return 0
    return size


def _missing_files(folder: Path, parcel: Manifest) -> Manifest:
    """The files that an earlier try has not fetched completely and correctly."""

    def is_here(path: str, entry: FileEntry) -> bool:
        place = folder / path
        return _begin(place, entry) == entry.size and _finish(place, entry)

    return {path: entry for path, entry in parcel.items() if not is_here(path, entry)}


def _keep(folder: Path, lacking: Manifest, came: Mapping[str, bytes]) -> Manifest:
    """Write the fetched files; returns those that are still missing."""
    for path, data in came.items():
        _append(folder / path, 0, data)
    whole = {path for path in came if _finish(folder / path, lacking[path])}
    return {path: entry for path, entry in lacking.items() if path not in whole}


def _append(place: Path, offset: int, data: bytes) -> int:
    with place.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(data)
    return offset + len(data)


def _finish(place: Path, entry: FileEntry) -> bool:
    """True if the file is correct, in which case it is flushed to disk; a wrong file is removed."""
    place.touch()  # an empty file has not been written yet
    if hash_of(place) != entry.sha256:
        place.unlink()
        return False
    with place.open("rb") as file:
        set_mode(file.fileno(), entry)
        os.fsync(file.fileno())
    return True


def set_mode(descriptor: int, entry: FileEntry) -> None:
    """Make a new local file executable for its readers if it was executable on the machine, but never grant more than the machine's file
    did."""
    mode = os.fstat(descriptor).st_mode
    if entry.mode & 0o100:
        mode |= (mode & 0o444) >> 2
    os.fchmod(descriptor, mode & (entry.mode | 0o600) & 0o755)
