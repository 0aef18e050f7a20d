"""The folder that a job's results are fetched to. Files appear whole under their names, and nothing that is here is lost.

What a later attempt has otherwise, or has not, is set aside in `earlier/`: the record of a run is several files, and those of two attempts
beside each other would be no record. Of checkpoints the folder is a mirror, since a run keeps its last few: one that was brought here and
is gone there is removed here too, once a later one is here.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from groupwise.clouds.port import CloudError
from groupwise.hosts.files import hash_of, sync_folder
from groupwise.hosts.spec import FileEntry, Manifest

INCOMING = ".incoming"
"""The folder of files that are not whole yet, in the one that they are fetched to."""
NOTE = "brought.json"
"""The file in it that says which attempt brought each file."""
EARLIER = "earlier"
MANIFEST = "manifest.json"


@dataclass(slots=True)
class ResultsFolder:
    """Held by this process; `results_folder` makes one."""

    folder: Path
    brought: dict[str, int] = field(default_factory=dict[str, int])
    """Path → the attempt that it came of."""

    @property
    def incoming(self) -> Path:
        """Where files grow until they are whole."""
        return self.folder / INCOMING

    def lacking(self, files: Manifest) -> Manifest:
        """Those that are not here, or are others here."""
        return {path: entry for path, entry in files.items() if not self._is_here(path, entry)}

    def take(self, came: Manifest, there: Iterable[str], attempt: int, *, ended: bool) -> None:
        """Put in place what came of an attempt; `there` are all files that it offers, and has at all if it has `ended`."""
        offered = set(there)
        self._set_aside(came, offered, attempt, ended=ended)
        _put_in_place(self.folder, came)
        self.brought |= dict.fromkeys((path for path in offered if self._has(path)), attempt)
        self._remove_old_checkpoints(offered)
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
        replaced = [path for path in came if self._has(path) and self.brought.get(path) != attempt]
        checkpoints = self._checkpoints()
        gone = [
            path
            for path, of in self.brought.items()
            if ended and of != attempt and path not in offered and self._has(path)
            if str(PurePosixPath(path).parent) not in checkpoints
        ]
        for path in (*replaced, *gone):
            of = self.brought.pop(path, None)
            name = "others" if of is None else f"attempt-{of}"
            target = _free(self.folder / EARLIER / name / path)
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).replace(target)

    def _checkpoints(self) -> set[str]:
        """Folders of them that were brought here."""
        found = (PurePosixPath(path) for path in self.brought)
        return {str(path.parent) for path in found if path.name == MANIFEST}

    def _remove_old_checkpoints(self, offered: set[str]) -> None:
        there = {str(path.parent) for path in map(PurePosixPath, offered) if path.name == MANIFEST}
        for path in sorted(self._checkpoints() - there):
            if self._is_half_removed(path) or self._has_successor(path, there):
                (self.folder / path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(self.folder / path, ignore_errors=True)
                self._forget(path)

    def _is_half_removed(self, checkpoint: str) -> bool:
        return not self._has(f"{checkpoint}/{MANIFEST}")

    def _has_successor(self, checkpoint: str, there: Iterable[str]) -> bool:
        """A later one beside it, which is at the place and here."""
        step, beside = _step(self.folder / checkpoint), PurePosixPath(checkpoint).parent
        others = [each for each in there if PurePosixPath(each).parent == beside]
        steps = [_step(self.folder / each) for each in others]
        return step is not None and any(each is not None and each > step for each in steps)

    def _forget(self, checkpoint: str) -> None:
        inside = f"{checkpoint}/"
        for path in [each for each in self.brought if each.startswith(inside)]:
            del self.brought[path]

    def _write_note(self) -> None:
        note = self.incoming / NOTE
        new = note.with_suffix(".new")
        new.write_text(json.dumps(self.brought, sort_keys=True), "utf-8")
        new.replace(note)


@contextmanager
def results_folder(folder: Path) -> Generator[ResultsFolder]:
    """The folder, for whoever fetches there alone. Raises CloudError where somebody does."""
    incoming = folder / INCOMING
    incoming.mkdir(parents=True, exist_ok=True)
    lock = os.open(incoming, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield ResultsFolder(folder, _read_note(incoming / NOTE))
    except BlockingIOError:
        raise CloudError(f"another process is fetching into {folder} at the moment.") from None
    finally:
        os.close(lock)


def _read_note(note: Path) -> dict[str, int]:
    try:
        said: Mapping[str, int] = json.loads(note.read_bytes())
        return {str(path): int(attempt) for path, attempt in said.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _put_in_place(folder: Path, files: Iterable[str]) -> None:
    """Each appears whole, under its name; the list of a checkpoint's files after these."""
    ordered = sorted(files, key=lambda path: PurePosixPath(path).name == MANIFEST)
    for path in ordered:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        (folder / INCOMING / path).replace(place)
    for parent in {(folder / path).parent for path in ordered}:
        sync_folder(parent)


def _step(checkpoint: Path) -> int | None:
    """Of a whole one."""
    try:
        step = json.loads((checkpoint / MANIFEST).read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _free(path: Path) -> Path:
    """This path, or the first with a number behind it that is free."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}.{number}")
    return found
