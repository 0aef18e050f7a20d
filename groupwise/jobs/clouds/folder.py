"""The folder that a job's results are fetched to. Files appear whole under their names, and nothing that is here is lost.

What somebody changed here, or a later attempt has otherwise, or has not, is set aside in `earlier/`: the record of a run is several
files, and those of two attempts beside each other would be no record. Of checkpoints the folder is a mirror, since a run keeps its last
few: one that was brought here and is gone there is removed here too, once a later one is here.
"""

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
"""The subfolder in which we keep the note and the files that have not come whole."""
NOTE = "brought.json"
"""The file in it that says whose results these are, and the hash that each file had when it came."""
NOT_WHOLE = "files"
"""The folder beside the note for files that are still being fetched. A machine could call one of its files like the note."""
EARLIER = "earlier"
SPARED = 1 << 30
"""Bytes of the disk that results leave free; of a small disk a twentieth."""
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Brought:
    """A file, as it came."""

    attempt: int
    sha256: str


@dataclass(slots=True)
class ResultsFolder:
    """Held by this process; `results_folder` makes one."""

    folder: Path
    of: str
    """The job, and where it is: results of two jobs do not belong into one folder."""
    brought: dict[str, Brought] = field(default_factory=dict[str, "Brought"])
    """By its path."""

    @property
    def incoming(self) -> Path:
        """Where files grow until they are whole."""
        return self.folder / INCOMING / NOT_WHOLE

    def lacking(self, files: Manifest) -> Manifest:
        """Those that are not here, or are others here."""
        return {path: entry for path, entry in files.items() if not self._is_here(path, entry)}

    def check_room(self, wanted: Manifest) -> None:
        """A machine that lies, or has made more than fits, does not fill the disk. Raises CloudError."""
        left = sum(self._left(path, entry) for path, entry in wanted.items())
        disk = shutil.disk_usage(self.folder)
        if left and left > disk.free - min(SPARED, disk.total // 20):
            raise CloudError(
                f"{self.of} offers {byte_size(left)} that are not here yet, and {byte_size(disk.free)} are free where they would go, in "
                f"{self.folder}. They are at their place; make room here, or fetch to another disk: --to DIR."
            )

    def _left(self, path: str, entry: FileEntry) -> int:
        """Bytes of it that have not come."""
        place = self.incoming / path
        return max(0, entry.size - place.stat().st_size) if place.is_file() else entry.size

    def take(self, came: Manifest, there: Manifest, attempt: int, *, ended: bool) -> None:
        """Put in place what came of an attempt; `there` are all files that it offers, and has at all if it has `ended`."""
        offered = set(there)
        self._set_aside(came, offered, attempt, ended=ended)
        self._put_in_place(came)
        for path, entry in there.items():
            if self._has(path):
                self.brought[path] = Brought(attempt, entry.sha256)
        self._remove_old_checkpoints(offered)
        self._write_note()

    def take_written(self, files: Mapping[str, bytes], attempt: int) -> None:
        """Put in place what is told of an attempt beside what it offers; what an earlier one had there is set aside, too."""
        entries: Manifest = {}
        for path, data in files.items():
            new = self.incoming / path
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(data)
            entries[path] = FileEntry(hashlib.sha256(data).hexdigest(), 0o644, len(data))
        self._set_aside(entries, set(entries), attempt, ended=False)
        self._put_in_place(entries)
        for path, entry in entries.items():
            self.brought[path] = Brought(attempt, entry.sha256)
        self._write_note()

    def _is_here(self, path: str, entry: FileEntry) -> bool:
        place = self.folder / path
        if not place.is_file() or place.stat().st_size != entry.size:
            return False
        return hash_of(place) == entry.sha256

    def _has(self, path: str) -> bool:
        return (self.folder / path).is_file()

    def _set_aside(self, came: Manifest, offered: set[str], attempt: int, *, ended: bool) -> None:
        """What others than this attempt have left where it has something else."""
        replaced = [path for path in came if self._has(path) and not self._came(path, attempt)]
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

    def _came(self, path: str, attempt: int) -> bool:
        """Of this attempt, and nobody has changed it since."""
        found = self.brought.get(path)
        return found is not None and found.attempt == attempt and self._is_as_it_came(path)

    def _is_as_it_came(self, path: str) -> bool:
        found = self.brought.get(path)
        return found is not None and hash_of(self.folder / path) == found.sha256

    def _checkpoints(self) -> set[str]:
        """Folders of them that were brought here."""
        found = (PurePosixPath(path) for path in self.brought)
        return {str(path.parent) for path in found if path.name == MANIFEST}

    def _remove_old_checkpoints(self, offered: set[str]) -> None:
        there = {str(path.parent) for path in map(PurePosixPath, offered) if path.name == MANIFEST}
        for path in sorted(self._checkpoints() - there):
            if self._is_half_removed(path) or self._has_successor(path, there):
                self._remove(path)

    def _is_half_removed(self, checkpoint: str) -> bool:
        return not self._has(f"{checkpoint}/{MANIFEST}")

    def _has_successor(self, checkpoint: str, there: Iterable[str]) -> bool:
        """A later one beside it, which is at the place and here."""
        step, beside = _step(self.folder / checkpoint), PurePosixPath(checkpoint).parent
        others = [each for each in there if PurePosixPath(each).parent == beside]
        steps = [_step(self.folder / each) for each in others]
        return step is not None and any(each is not None and each > step for each in steps)

    def _remove(self, checkpoint: str) -> None:
        """Its list of files first; what somebody else put beside them stays."""
        inside = [each for each in self.brought if each.startswith(f"{checkpoint}/")]
        for path in sorted(inside, key=lambda path: PurePosixPath(path).name != MANIFEST):
            (self.folder / path).unlink(missing_ok=True)
            del self.brought[path]
        for folder in sorted({(self.folder / path).parent for path in inside}, reverse=True):
            with suppress(OSError):
                folder.rmdir()

    def _write_note(self) -> None:
        note = self.folder / INCOMING / NOTE
        new = note.with_suffix(".new")
        files = {path: [each.attempt, each.sha256] for path, each in self.brought.items()}
        new.write_text(json.dumps({"of": self.of, "files": files}, sort_keys=True), "utf-8")
        new.replace(note)

    def _put_in_place(self, files: Iterable[str]) -> None:
        """Move files that have come whole to their names, a checkpoint's manifest after its other files."""
        ordered = sorted(files, key=lambda path: PurePosixPath(path).name == MANIFEST)
        for path in ordered:
            place = self.folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            (self.incoming / path).replace(place)
        for parent in {(self.folder / path).parent for path in ordered}:
            sync_folder(parent)


def may_come(path: str) -> bool:
    """Whether a machine may bring a file of this path: it lies inside the folder, and not in one of our own subfolders."""
    return not path_problems("file", path) and path.split("/")[0].lower() not in (INCOMING, EARLIER)


@contextmanager
def results_folder(folder: Path, of: str) -> Generator[ResultsFolder]:
    """The folder, for whoever fetches there alone. Raises Busy where somebody does, CloudError where it is another job's."""
    with _alone(folder):
        owner, brought = _read_note(folder / INCOMING / NOTE)
        if owner not in (None, of):
            raise CloudError(
                f"{folder} holds the results of {owner}; those of {of} need a folder of their own: --to DIR."
            )
        yield ResultsFolder(folder, of, brought)


def set_aside(folder: Path) -> Path | None:
    """Before another job brings its results here: what earlier ones have brought goes to a folder in `earlier`, this one. None: there is
    nothing. Raises Busy, CloudError."""
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
            _remove_empty(folder, (folder / path).parent)
        note.unlink()
        shutil.rmtree(note.parent)  # what of them is not whole
    return target


def _remove_empty(folder: Path, inside: Path) -> None:
    """Folders in it that nothing is left in."""
    with suppress(OSError):
        while inside != folder:
            inside.rmdir()
            inside = inside.parent


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Nobody else brings anything there. Raises Busy; CloudError where it cannot be written."""
    incoming = folder / INCOMING
    try:
        incoming.mkdir(parents=True, exist_ok=True)
        lock = os.open(incoming, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CloudError(f"nothing can be brought to {folder}: {error.strerror}.") from None
    try:
        _take(lock, folder)
        yield
    except OSError as error:
        raise CloudError(
            f"the results cannot be written to {folder}: {error.strerror}. They are at their place; make room here, and fetch again."
        ) from None
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(f"another process is fetching into {folder} at the moment.") from None


def _read_note(note: Path) -> tuple[str | None, dict[str, Brought]]:
    try:
        said = json.loads(note.read_bytes())
        found = {path: Brought(int(n), str(sha)) for path, (n, sha) in said["files"].items()}
        return str(said["of"]), {path: each for path, each in found.items() if may_come(path)}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None, {}


def _step(checkpoint: Path) -> int | None:
    """Of a whole one."""
    try:
        step = json.loads((checkpoint / MANIFEST).read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _free(path: Path) -> Path:
    """This path, or the first with a number behind it that is free."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}.{number}")
    return found
