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
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from groupwise.core.terminal.quantities import byte_size
from groupwise.jobs.clouds.backend import Busy, CloudError
from groupwise.jobs.hosts.files import hash_of, sync_folder
from groupwise.jobs.hosts.spec import FileEntry, Manifest, path_problems

INCOMING = ".incoming"
"""The subfolder for the note and for incomplete files."""
NOTE = "brought.json"
"""The file in INCOMING that contains the owner of these results, and the hash of each file as fetched."""
PARTIAL = "files"
"""The folder next to the note for files that are being fetched. It is separate, since a machine could offer a file with the note's name."""
EARLIER = "earlier"
RESERVED_BYTES = 1 << 30
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
    owner: str
    """The job and its place. Two jobs must not share a folder of results."""
    fetched: dict[str, FetchedFile] = field(default_factory=dict[str, "FetchedFile"])
    """Fetched files, by path."""

    @property
    def incoming(self) -> Path:
        """The folder for files that are still incomplete."""
        return self.folder / INCOMING / PARTIAL

    def missing(self, files: Manifest) -> Manifest:
        """The files that are missing or different here."""
        missing: dict[str, FileEntry] = {}
        for path, entry in files.items():
            target = self.folder / path
            same_size = target.is_file() and target.stat().st_size == entry.size
            if not same_size or hash_of(target) != entry.sha256:
                missing[path] = entry
        return missing

    def check_room(self, manifest: Manifest) -> None:
        """Raise CloudError if the files do not fit: a job with too many results, or a machine that lies, must not fill the disk."""
        needed = 0
        for path, entry in manifest.items():
            partial = self.incoming / path
            received = partial.stat().st_size if partial.is_file() else 0
            needed += max(0, entry.size - received)
        disk = shutil.disk_usage(self.folder)
        if needed and needed > disk.free - min(RESERVED_BYTES, disk.total // 20):
            raise CloudError(
                f"{self.owner} offers {byte_size(needed)} that are not here yet, and {byte_size(disk.free)} are free where they would go, "
                f"in {self.folder}. They are at their place; make room here, or fetch to another disk: --to DIR."
            )

    def accept(
        self, fetched: Manifest, available: Manifest, attempt: int, *, has_ended: bool
    ) -> None:
        """Move an attempt's fetched files (`fetched`) to their names. `available`: all files that the place offers; once the attempt
        `has_ended`, all that it has."""
        offered = set(available)
        self._set_aside(fetched, offered, attempt, has_ended=has_ended)
        # Complete files move to their names, a checkpoint's manifest after its other files.
        ordered = sorted(fetched, key=lambda path: PurePosixPath(path).name == MANIFEST)
        for path in ordered:
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.incoming / path).replace(target)
        for parent in {(self.folder / path).parent for path in ordered}:
            sync_folder(parent)
        for path, entry in available.items():
            if self._exists(path):
                self.fetched[path] = FetchedFile(attempt, entry.sha256)
        self._remove_old_checkpoints(offered)
        files = {path: [file.attempt, file.sha256] for path, file in self.fetched.items()}
        atomic_files.write_json(self.folder / INCOMING / NOTE, {"of": self.owner, "files": files})

    def write_files(self, files: Mapping[str, bytes], attempt: int) -> None:
        """Write files about an attempt that are made here; files of earlier attempts under these names are moved to `earlier/` too."""
        entries: Manifest = {}
        for path, data in files.items():
            new = self.incoming / path
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(data)
            entries[path] = FileEntry(hashlib.sha256(data).hexdigest(), 0o644, len(data))
        self.accept(entries, entries, attempt, has_ended=False)

    def _exists(self, path: str) -> bool:
        return (self.folder / path).is_file()

    def _set_aside(
        self, fetched: Manifest, offered: set[str], attempt: int, *, has_ended: bool
    ) -> None:
        """Move files of other attempts to `earlier/` if this attempt has replaced or removed them."""
        replaced: list[str] = []
        for path in filter(self._exists, fetched):
            earlier = self.fetched.get(path)
            is_ours = earlier is not None and earlier.attempt == attempt
            if not is_ours or not self._is_unchanged(path):
                replaced.append(path)
        checkpoints = self._checkpoint_folders()
        removed = [
            path
            for path, file in self.fetched.items()
            if has_ended and file.attempt != attempt and path not in offered and self._exists(path)
            if str(PurePosixPath(path).parent) not in checkpoints
        ]
        for path in (*replaced, *removed):
            changed = not self._is_unchanged(path)
            file = self.fetched.pop(path, None)
            name = "changed" if file is None or changed else f"attempt-{file.attempt}"
            target = _unused_path(self.folder / EARLIER / name / path)
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).replace(target)

    def _is_unchanged(self, path: str) -> bool:
        file = self.fetched.get(path)
        return file is not None and hash_of(self.folder / path) == file.sha256

    def _checkpoint_folders(self) -> set[str]:
        """Folders of the fetched checkpoints."""
        paths = (PurePosixPath(path) for path in self.fetched)
        return {str(path.parent) for path in paths if path.name == MANIFEST}

    def _remove_old_checkpoints(self, offered: set[str]) -> None:
        """Remove checkpoints that the place no longer offers, once a later one of the same folder is both offered and fetched."""
        still_offered = {
            str(path.parent) for path in map(PurePosixPath, offered) if path.name == MANIFEST
        }
        for path in sorted(self._checkpoint_folders() - still_offered):
            step, parent = _checkpoint_step(self.folder / path), PurePosixPath(path).parent
            siblings = [other for other in still_offered if PurePosixPath(other).parent == parent]
            steps = [_checkpoint_step(self.folder / other) for other in siblings]
            later = [
                number
                for number in steps
                if number is not None and step is not None and number > step
            ]
            if not later and self._exists(f"{path}/{MANIFEST}"):
                continue
            # Remove the manifest first; files that were not fetched are kept.
            files = [file for file in self.fetched if file.startswith(f"{path}/")]
            for file in sorted(files, key=lambda file: PurePosixPath(file).name != MANIFEST):
                (self.folder / file).unlink(missing_ok=True)
                del self.fetched[file]
            for folder in sorted({(self.folder / file).parent for file in files}, reverse=True):
                with suppress(OSError):
                    folder.rmdir()


def is_allowed_path(path: str) -> bool:
    """True if a machine may offer a file with this path: inside the folder, and not in one of our own subfolders."""
    return not path_problems("file", path) and path.split("/")[0].lower() not in (INCOMING, EARLIER)


@contextmanager
def results_folder(folder: Path, of: str) -> Generator[ResultsFolder]:
    """Lock the folder while results are fetched to it. Raises Busy if another process has it locked, CloudError if it contains another
    job's results."""
    with _locked(folder):
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
    with _locked(folder):
        if not note.exists():  # another process has moved them while this one waited for the lock
            return None
        _, brought = _read_note(note)
        target = _unused_path(folder / EARLIER / "job")
        target.mkdir(parents=True)
        for path in filter(lambda path: (folder / path).is_file(), sorted(brought)):
            moved_path = target / path
            moved_path.parent.mkdir(parents=True, exist_ok=True)
            (folder / path).replace(moved_path)
            parent = (folder / path).parent
            with suppress(OSError):  # only empty folders can be removed
                while parent != folder:
                    parent.rmdir()
                    parent = parent.parent
        note.unlink()
        shutil.rmtree(note.parent)  # including incomplete files
    return target


@contextmanager
def _locked(folder: Path) -> Generator[None]:
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
            if not os.path.samestat(os.fstat(lock), incoming.stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):  # the latter: `set_aside` has just removed it
            raise Busy(f"another process is fetching into {folder} at the moment.") from None
        yield
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise CloudError(
            f"the results cannot be written to {folder}: {reason}. They are at their place; make room here, and fetch again."
        ) from None
    finally:
        os.close(lock)


def _read_note(note: Path) -> tuple[str | None, dict[str, FetchedFile]]:
    try:
        document = json.loads(note.read_bytes())
        files = {
            path: FetchedFile(int(n), str(sha)) for path, (n, sha) in document["files"].items()
        }
        return str(document["of"]), {
            path: file for path, file in files.items() if is_allowed_path(path)
        }
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None, {}


def _checkpoint_step(checkpoint: Path) -> int | None:
    """The step of a checkpoint; None if its manifest cannot be read."""
    try:
        step = json.loads((checkpoint / MANIFEST).read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _unused_path(path: Path) -> Path:
    """The path itself if it does not exist, otherwise the first free one with a number appended."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate
