"""The folder that a job's results are fetched to: files appear whole under their names, and stay; of checkpoints it is a mirror.

A run keeps its last few checkpoints and removes older ones. One that was brought here and is gone there is removed here too, once a later
one is here: else a long training would fill the disk of whoever watches it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from groupwise.clouds.port import CloudError
from groupwise.hosts.files import hash_of, sync_folder
from groupwise.hosts.spec import FileEntry, Manifest

INCOMING = ".incoming"
"""The folder of files that are not whole yet, in the one that they are fetched to."""
BROUGHT = "checkpoints"
"""The file in it that lists checkpoints which were brought here: only these are removed."""
MANIFEST = "manifest.json"


def alone_in(folder: Path) -> int:
    """The lock of whoever fetches there. Raises CloudError where somebody does."""
    incoming = folder / INCOMING
    incoming.mkdir(parents=True, exist_ok=True)
    lock = os.open(incoming, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise CloudError(f"another process is fetching into {folder} at the moment.") from None
    return lock


def lacking(folder: Path, files: Manifest) -> Manifest:
    """Those that are not in the folder, or are others there."""

    def is_here(path: str, entry: FileEntry) -> bool:
        place = folder / path
        return (
            place.is_file()
            and place.stat().st_size == entry.size
            and hash_of(place) == entry.sha256
        )

    return {path: entry for path, entry in files.items() if not is_here(path, entry)}


def put_in_place(folder: Path, files: Manifest) -> None:
    """Each appears whole, under its name; a checkpoint's list of files after the files."""
    for path in sorted(files, key=lambda path: PurePosixPath(path).name == MANIFEST):
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        (folder / INCOMING / path).replace(place)
    for parent in {(folder / path).parent for path in files}:
        sync_folder(parent)


def mirror_checkpoints(folder: Path, files: Iterable[str]) -> None:
    """After `files` of the place have come: remove checkpoints that came earlier, are gone there, and have a successor here."""
    there = {str(PurePosixPath(path).parent) for path in files if _is_manifest(path)}
    brought = _brought(folder) | {path for path in there if _step(folder / path) is not None}
    for path in sorted(brought - there):
        half_removed = not (folder / path / MANIFEST).exists()
        if half_removed or _has_successor(folder, path, there):
            (folder / path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder / path, ignore_errors=True)
            brought.remove(path)
    note = folder / INCOMING / BROUGHT
    new = note.with_suffix(".new")
    new.write_text(json.dumps(sorted(brought)), "utf-8")
    new.replace(note)


def _is_manifest(path: str) -> bool:
    return PurePosixPath(path).name == MANIFEST


def _brought(folder: Path) -> set[str]:
    try:
        return set(json.loads((folder / INCOMING / BROUGHT).read_bytes()))
    except (OSError, ValueError):
        return set()


def _step(checkpoint: Path) -> int | None:
    """Of a whole one."""
    try:
        step = json.loads((checkpoint / MANIFEST).read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _has_successor(folder: Path, path: str, there: Iterable[str]) -> bool:
    """A later one beside it, which is at the place and here."""
    step, beside = _step(folder / path), PurePosixPath(path).parent
    steps = [_step(folder / each) for each in there if PurePosixPath(each).parent == beside]
    return step is not None and any(each is not None and each > step for each in steps)
