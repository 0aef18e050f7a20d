"""The local folder to which a job's results are fetched. Files appear complete under their names, and no existing file is lost.

A file is moved to `earlier/` if it was changed here, or if a later attempt has a different version of it or none: the record of a run
consists of several files, and must not mix those of two attempts. For checkpoints the folder is a mirror, since a run keeps only its
last few: a checkpoint that was fetched and no longer exists at the place is removed here too, once a later one has been fetched."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from groupwise.core.terminal.quantities import byte_size
from groupwise.jobs.clouds.backend import Busy, CloudError
from groupwise.jobs.hosts.files import hash_of, sync_folder
from groupwise.jobs.hosts.spec import FileEntry, Manifest, path_problems

INCOMING = ".incoming"
"""The subfolder for the note and for incomplete files."""
NOTE = "brought.json"
"""The file in INCOMING that contains the owner of these results, and the hash of each file as fetched."""
NOT_WHOLE = "files"
"""The folder next to the note for files that are being fetched. It is separate, since a machine could offer a file with the note's name."""
EARLIER = "earlier"
SPARED = 1 << 30
"""Bytes of disk space that fetching leaves free; on a small disk a twentieth of it."""
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A file as it was fetched."""

    attempt: int
    sha256: str


@dataclass(slots=True)
class ResultsFolder:
    """The results folder while this process has it locked; created by `results_folder`."""

    folder: Path
    of: str
    """The job and its place. Two jobs must not share a folder of results."""
    brought: dict[str, FetchedFile] = field(default_factory=dict[str, "FetchedFile"])
    """Fetched files, by path."""

    @property
    def incoming(self) -> Path:
        """The folder for files that are still incomplete."""
        return self.folder / INCOMING / NOT_WHOLE

    def lacking(self, files: Manifest) -> Manifest:
        """The files that are missing or different here."""
        found: dict[str, FileEntry] = {}
        for path, entry in files.items():
            place = self.folder / path
            same_size = place.is_file() and place.stat().st_size == entry.size
            if not same_size or hash_of(place) != entry.sha256:
                found[path] = entry
        return found

    def check_room(self, manifest: Manifest) -> None:
        """Raise CloudError if the files do not fit: a job with too many results, or a machine that lies, must not fill the disk."""
        left = 0
        for path, entry in manifest.items():
            partial = self.incoming / path
            here = partial.stat().st_size if partial.is_file() else 0
            left += max(0, entry.size - here)
        disk = shutil.disk_usage(self.folder)
        if left and left > disk.free - min(SPARED, disk.total // 20):
            raise CloudError(
                f"{self.of} offers {byte_size(left)} that are not here yet, and {byte_size(disk.free)} are free where they would go, in "
                f"{self.folder}. They are at their place; make room here, or fetch to another disk: --to DIR."
            )

    def take(self, came: Manifest, there: Manifest, attempt: int, *, ended: bool) -> None:
        """Move an attempt's fetched files (`came`) to their names. `there`: all files that the place offers; once the attempt has `ended`,
        all that it has."""
        offered = set(there)
        self._set_aside(came, offered, attempt, ended=ended)
        self._put_in_place(came)
        for path, entry in there.items():
            if self._has(path):
                self.brought[path] = FetchedFile(attempt, entry.sha256)
        self._remove_old_checkpoints(offered)
        self._write_note()

    def take_written(self, files: Mapping[str, bytes], attempt: int) -> None:
        """Write files about an attempt that are made here; files of earlier attempts under these names are moved to `earlier/` too."""
        entries: Manifest = {}
        for path, data in files.items():
            new = self.incoming / path
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(data)
            entries[path] = FileEntry(hashlib.sha256(data).hexdigest(), 0o644, len(data))
        self.take(entries, entries, attempt, ended=False)

    def _has(self, path: str) -> bool:
        return (self.folder / path).is_file()

    def _set_aside(self, came: Manifest, offered: set[str], attempt: int, *, ended: bool) -> None:
        """Move files of other attempts to `earlier/` if this attempt has replaced or removed them."""
        replaced: list[str] = []
        for path in filter(self._has, came):
            known = self.brought.get(path)
            is_ours = known is not None and known.attempt == attempt
            if not is_ours or not self._is_as_it_came(path):
                replaced.append(path)
        checkpoints = self._checkpoints()
        gone = [
            path
            for path, found in self.brought.items()
            if ended and found.attempt != attempt and path not in offered and self._has(path)
            if str(PurePosixPath(path).parent) not in checkpoints
        ]
        for path in (*replaced, *gone):
            changed = not self._is_as_it_came(path)
            found = self.brought.pop(path, None)
            name = "changed" if found is None or changed else f"attempt-{found.attempt}"
            target = _free(self.folder / EARLIER / name / path)
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).replace(target)

    def _is_as_it_came(self, path: str) -> bool:
        found = self.brought.get(path)
        return found is not None and hash_of(self.folder / path) == found.sha256

    def _checkpoints(self) -> set[str]:
        """Folders of the fetched checkpoints."""
        found = (PurePosixPath(path) for path in self.brought)
        return {str(path.parent) for path in found if path.name == MANIFEST}

    def _remove_old_checkpoints(self, offered: set[str]) -> None:
        """Remove checkpoints that the place no longer offers, once a later one of the same folder is both offered and fetched."""
        there = {str(path.parent) for path in map(PurePosixPath, offered) if path.name == MANIFEST}
        for path in sorted(self._checkpoints() - there):
            step, beside = _step(self.folder / path), PurePosixPath(path).parent
            others = [each for each in there if PurePosixPath(each).parent == beside]
            steps = [_step(self.folder / each) for each in others]
            later = [
                each for each in steps if each is not None and step is not None and each > step
            ]
            if not later and self._has(f"{path}/{MANIFEST}"):
                continue
            # Remove the manifest first; files that were not fetched are kept.
            inside = [each for each in self.brought if each.startswith(f"{path}/")]
            for each in sorted(inside, key=lambda each: PurePosixPath(each).name != MANIFEST):
                (self.folder / each).unlink(missing_ok=True)
                del self.brought[each]
            for folder in sorted({(self.folder / each).parent for each in inside}, reverse=True):
                with suppress(OSError):
                    folder.rmdir()

    def _write_note(self) -> None:
        note = self.folder / INCOMING / NOTE
        new = note.with_suffix(".new")
        files = {path: [each.attempt, each.sha256] for path, each in self.brought.items()}
        new.write_text(json.dumps({"of": self.of, "files": files}, sort_keys=True), "utf-8")
        new.replace(note)

    def _put_in_place(self, files: Iterable[str]) -> None:
        """Move complete files to their names, a checkpoint's manifest after its other files."""
        ordered = sorted(files, key=lambda path: PurePosixPath(path).name == MANIFEST)
        for path in ordered:
            place = self.folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            (self.incoming / path).replace(place)
        for parent in {(self.folder / path).parent for path in ordered}:
            sync_folder(parent)


def may_come(path: str) -> bool:
    """True if a machine may offer a file with this path: inside the folder, and not in one of our own subfolders."""
    return not path_problems("file", path) and path.split("/")[0].lower() not in (INCOMING, EARLIER)


@contextmanager
def results_folder(folder: Path, of: str) -> Generator[ResultsFolder]:
    """Lock the folder while results are fetched to it. Raises Busy if another process has it locked, CloudError if it contains another
    job's results."""
    with _alone(folder):
        owner, brought = _read_note(folder / INCOMING / NOTE)
        if owner not in (None, of):
            raise CloudError(
                f"{folder} holds the results of {owner}; those of {of} need a folder of their own: --to DIR."
            )
        yield ResultsFolder(folder, of, brought)


def set_aside(folder: Path) -> Path | None:
    """Move the results of an earlier job to a new folder in `earlier/`, before another job's are fetched; returns that folder, or None if
    there are no results. Raises Busy, CloudError."""
    note = folder / INCOMING / NOTE
    if not note.exists():
        return None
    with _alone(folder):
        _, brought = _read_note(note)
        target = _free(folder / EARLIER / "job")
        target.mkdir(parents=True)
        for path in filter(lambda path: (folder / path).is_file(), sorted(brought)):
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            (folder / path).replace(place)
            above = (folder / path).parent
            with suppress(OSError):  # only empty folders can be removed
                while above != folder:
                    above.rmdir()
                    above = above.parent
        note.unlink()
        shutil.rmtree(note.parent)  # including incomplete files
    return target


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Lock the folder against other processes. Raises Busy; CloudError if it is not writable."""
    incoming = folder / INCOMING
    try:
        incoming.mkdir(parents=True, exist_ok=True)
        lock = os.open(incoming, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CloudError(f"nothing can be brought to {folder}: {error.strerror}.") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another process is fetching into {folder} at the moment.") from None
        yield
    except OSError as error:
        raise CloudError(
            f"the results cannot be written to {folder}: {error.strerror}. They are at their place; make room here, and fetch again."
        ) from None
    finally:
        os.close(lock)


def _read_note(note: Path) -> tuple[str | None, dict[str, FetchedFile]]:
    try:
        document = json.loads(note.read_bytes())
        found = {
            path: FetchedFile(int(n), str(sha)) for path, (n, sha) in document["files"].items()
        }
        return str(document["of"]), {path: each for path, each in found.items() if may_come(path)}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None, {}


def _step(checkpoint: Path) -> int | None:
    """The step of a checkpoint; None if its manifest cannot be read."""
    try:
        step = json.loads((checkpoint / MANIFEST).read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _free(path: Path) -> Path:
    """The path itself if it does not exist, otherwise the first free one with a number appended."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}.{number}")
    return found
