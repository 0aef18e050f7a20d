"""Fetches files of an attempt from its machine into a local folder.

The machine lists the files (path, sha256, mode, size). Large files are fetched in pieces, small ones many in one call. Each file is
hashed here and flushed to disk; a file that an earlier try left incomplete is continued. If a file differs from the list, it has changed
meanwhile: that raises `FileChanged`, and the caller has to request the list again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from groupwise.core.interruption import wait_until_done
from groupwise.jobs.hosts.driver import MAX_GATHERED_FILES, PIECE, Runner, batches_by_size
from groupwise.jobs.hosts.files import hash_of
from groupwise.jobs.hosts.host import RunnerRefused
from groupwise.jobs.hosts.spec import FileEntry, Manifest

T = TypeVar("T")

MAX_CONCURRENT_CALLS = 4
"""Most concurrent calls to the machine, each for a piece of one file or for many small files."""
CHANGED_CODES = frozenset({"not_found", "changed", "refused_path"})
"""Error codes by which a machine refuses a file that it listed before: something has changed the file since."""


class FileChanged(Exception):
    """A file differs from the machine's list. The message is its path."""


class DiskWork(Protocol):
    """Runs disk work in a thread; `name` is one word that describes the work."""

    def __call__(self, name: str, fn: Callable[[], T], /) -> Awaitable[T]: ...


def run_in_thread(name: str, fn: Callable[[], T]) -> Awaitable[T]:
    """The default `DiskWork`."""
    return asyncio.to_thread(fn)


class Fetcher:
    """Copies files from the working folder of one attempt into `folder`, which no other caller uses meanwhile."""

    def __init__(
        self, runner: Runner, job: str, epoch: int, folder: Path, write: DiskWork = run_in_thread
    ) -> None:
        self._runner, self._job, self._epoch = runner, job, epoch
        self._folder = folder
        self._run_in_thread = write

    async def fetch(self, files: Manifest) -> None:
        """Fetch all `files`. Raises FileChanged, HostError, OSError; what has been fetched remains for the next try."""
        sized = [(path, files[path].size) for path in sorted(files)]
        pending = batches_by_size(sized, PIECE, MAX_GATHERED_FILES)

        async def work() -> None:
            for paths in pending:
                batch = {path: files[path] for path in paths}
                # A file that is not part of the answer has changed or cannot be read. Fetch it alone: then the error gives the reason.
                remaining = await self._fetch_batch(batch) if len(batch) > 1 else batch
                for path, entry in remaining.items():
                    offset = await self._run_disk_work(
                        "file", partial(_create_file, self._folder / path, entry)
                    )
                    # If what an earlier try left turns out to be wrong, fetch once more from the start.
                    if offset and await self._fetch_rest(path, entry, offset):
                        continue
                    if not await self._fetch_rest(path, entry, 0):
                        raise FileChanged(path)

        tasks = [asyncio.create_task(work()) for _ in range(MAX_CONCURRENT_CALLS)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _fetch_batch(self, batch: Manifest) -> Manifest:
        """Fetch several files with one call; returns those that were not fetched."""
        missing = await self._run_disk_work("parcel", partial(_missing_files, self._folder, batch))
        if not missing:
            return missing
        contents = await self._runner.gather(self._job, self._epoch, missing)
        return await self._run_disk_work(
            "gathered", partial(_write_batch, self._folder, missing, contents)
        )

    async def _fetch_rest(self, path: str, entry: FileEntry, offset: int) -> bool:
        """Fetch the bytes from offset `offset`. False if the result differs from the list; it is then removed."""
        target = self._folder / path
        while offset < entry.size:
            try:
                data = await self._runner.read(self._job, self._epoch, path, offset=offset)
            except RunnerRefused as error:
                if error.code in CHANGED_CODES:
                    raise FileChanged(path) from error
                raise
            if not data:
                raise FileChanged(path)
            offset = await self._run_disk_work(
                "piece", partial(_append_bytes, target, offset, data)
            )
        return await self._run_disk_work("verify", partial(_verify_file, target, entry))

    async def _run_disk_work(self, name: str, fn: Callable[[], T]) -> T:
        return await wait_until_done(self._run_in_thread(name, fn))


def _create_file(path: Path, entry: FileEntry) -> int:
    """Create the file if necessary; returns how many bytes of it exist already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        size = os.fstat(file.fileno()).st_size
        if size > entry.size:
            file.truncate(0)
            return 0
    return size


def _missing_files(folder: Path, batch: Manifest) -> Manifest:
    """The files that an earlier try has not fetched completely and correctly."""

    def is_here(path: str, entry: FileEntry) -> bool:
        target = folder / path
        return _create_file(target, entry) == entry.size and _verify_file(target, entry)

    return {path: entry for path, entry in batch.items() if not is_here(path, entry)}


def _write_batch(folder: Path, missing: Manifest, contents: Mapping[str, bytes]) -> Manifest:
    """Write the fetched files; returns those that are still missing."""
    for path, data in contents.items():
        _append_bytes(folder / path, 0, data)
    verified = {path for path in contents if _verify_file(folder / path, missing[path])}
    return {path: entry for path, entry in missing.items() if path not in verified}


def _append_bytes(path: Path, offset: int, data: bytes) -> int:
    with path.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(data)
    return offset + len(data)


def _verify_file(path: Path, entry: FileEntry) -> bool:
    """True if the file is correct, in which case it is flushed to disk; a wrong file is removed."""
    path.touch()  # an empty file has not been written yet
    if hash_of(path) != entry.sha256:
        path.unlink()
        return False
    with path.open("rb") as file:
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
