"""Writes files and folders that must survive a crash: every change is atomic and flushed to the disk.

A run may be killed at any instant. Each change therefore becomes visible in one step: a file by renaming a
finished copy over it, a folder by renaming it into place after everything in it was flushed, a database transaction by
its commit. Before that step the old state is visible, after it the new one, and nothing in between. Only data appended to
a file may be there in part; a program that continues such a file truncates it first (`cut`).

Both sides of each such step are *crash points*: `on_write` is called with their name. It does nothing in a real run. A test
replaces it, dies there, and then checks that the remaining files can still be read. The names are `<kind>:<subject>:<moment>`:

        file:<file name>:before      the copy is flushed, the old file is still in place
        file:<file name>:after       the new file is in place
        folder:<folder name>:before  everything in it is flushed, it still has its building name
        folder:<folder name>:after   it has its final name
        append:<file name>:before    the file is unchanged
        append:<file name>:after     all of the data is at its end
        cut:<file name>:before       the file is unchanged
        cut:<file name>:after        it is truncated
        remove:<name>:before         it still exists
        remove:<name>:moved          it has a hidden name, its files still exist
        remove:<name>:after          it is deleted
    commit:<action>:before       the transaction is complete but not committed
    commit:<action>:after        it is committed

The names of files under construction start with `.building-`, those of files being deleted with `.removing-`; `sweep` deletes the
ones that dead writers left.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from groupwise.core.errors import StoreError, UsageError

BUILDING = ".building-"
REMOVING = ".removing-"


def _ignore_crash_point(name: str) -> None:
    """The default `on_write`."""


on_write: Callable[[str], None] = _ignore_crash_point
"""Called with the name of every crash point, in this process."""


def crash_point(name: str) -> None:
    """Call `on_write` with this crash point."""
    on_write(name)


def building_path(final: Path) -> Path:
    """Path at which this thread builds `final`: in the same folder, so that the rename is one atomic step."""
    return final.with_name(f"{BUILDING}{final.name}-{os.getpid()}-{threading.get_native_id()}")


def write_file(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write `data` to `path`, all of it or nothing.

    With `replace=False` an existing file is left unchanged and FileExistsError is raised.
    StoreError if the disk is full or permissions are missing.
    """
    building = building_path(path)
    with explaining_disk_errors(path):
        try:
            _write_flushed(building, data)
            crash_point(f"file:{path.name}:before")
            _rename_into_place(building, path, replace)
        finally:
            building.unlink(missing_ok=True)
        flush_folder(path.parent)
    crash_point(f"file:{path.name}:after")


def write_json(path: Path, value: Any, *, replace: bool = True) -> None:
    """`write_file` of a value as readable JSON; see `without_nan`."""
    text = json.dumps(without_nan(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(path, text.encode("utf-8", "backslashreplace"), replace=replace)


def publish_file(building: Path, path: Path, *, replace: bool = True) -> None:
    """Flush a finished file to the disk, then give it its name; an earlier one of that name is replaced.

    With `replace=False` an earlier one is left unchanged and FileExistsError is raised.
    """
    with explaining_disk_errors(path):
        _flush(building)
        crash_point(f"file:{path.name}:before")
        _rename_into_place(building, path, replace)
        flush_folder(path.parent)
    crash_point(f"file:{path.name}:after")


def append(path: Path, data: bytes) -> None:
    """Append to a file; create it if it is missing. After a crash it may end with a part of `data`: see `cut`."""
    is_new = not path.exists()
    with explaining_disk_errors(path):
        crash_point(f"append:{path.name}:before")
        with path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            flush_folder(path.parent)
    crash_point(f"append:{path.name}:after")


def cut(path: Path, size: int) -> None:
    """Truncate a file to `size` bytes."""
    with explaining_disk_errors(path):
        crash_point(f"cut:{path.name}:before")
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
    crash_point(f"cut:{path.name}:after")


def remove_file(path: Path) -> None:
    """Delete a file, if it exists."""
    with explaining_disk_errors(path):
        crash_point(f"remove:{path.name}:before")
        path.unlink(missing_ok=True)
    crash_point(f"remove:{path.name}:after")


def keep_file(finished: Path, path: Path) -> None:
    """Hard-link `path` to a finished file that is about to be deleted; copy it if the file system has no hard links."""
    building = building_path(path)
    with explaining_disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        building.unlink(missing_ok=True)
        link(finished, building)
        publish_file(building, path)


def link(finished: Path, path: Path) -> None:
    """Hard-link a file that never changes again into a folder under construction; copy it if the file system has no hard links."""
    try:
        os.link(finished, path)
    except OSError:
        shutil.copyfile(finished, path)


def without_nan(value: Any) -> Any:
    """The value with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: without_nan(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in cast("Sequence[Any]", value)]
    return value


def check_can_write(file: Path) -> None:
    """Call before long work: UsageError if `file` could not be written at its end. Its folder may be missing."""
    try:
        try_to_write(file.parent)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written: {_nearest_existing(file.parent)}: {error.strerror or error}. Nothing has been done yet. "
            "Fix that, or name another place."
        ) from error


def try_to_write(folder: Path) -> None:
    """OSError if a folder is not writable (if it is missing: the nearest existing one above it). Leaves no file."""
    with tempfile.TemporaryFile(dir=_nearest_existing(folder)):
        pass


def _nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def publish_folder(building: Path, final: Path) -> None:
    """Flush a finished folder to the disk, then give it its name.

    An existing empty `final` is replaced; FileExistsError if it holds anything.
    """
    with explaining_disk_errors(final):
        for folder, _, names in os.walk(building):
            for name in names:
                _flush(Path(folder, name))
            _flush(Path(folder))
        crash_point(f"folder:{final.name}:before")
        try:
            building.rename(final)
        except OSError as error:
            if final.exists():
                raise FileExistsError(f"{final} is there already") from error
            raise
        flush_folder(final.parent)
    crash_point(f"folder:{final.name}:after")


def make_folder(final: Path, fill: Callable[[Path], None], *, replace: bool) -> None:
    """`making_folder` for a function that writes the files into the folder that it receives."""
    with making_folder(final, replace=replace) as building:
        fill(building)


@contextmanager
def making_folder(final: Path, *, replace: bool) -> Generator[Path]:
    """Inside, there is a temporary folder to be filled; it appears as `final` in one step.

    An earlier folder is deleted if `replace`; otherwise FileExistsError if it is not empty.
    """
    building = building_path(final)
    shutil.rmtree(building, ignore_errors=True)
    try:
        with explaining_disk_errors(final):
            building.mkdir(parents=True)
            yield building
            if replace and final.is_dir():
                remove_folder(final)
            publish_folder(building, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder, if it exists. A rename hides it in one step: no reader sees half of it."""
    with explaining_disk_errors(path):
        crash_point(f"remove:{path.name}:before")
        hidden = path.with_name(f"{REMOVING}{path.name}-{os.getpid()}")
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            path.rename(hidden)
        except FileNotFoundError:  # it never existed, or another process has just deleted it
            return
        flush_folder(path.parent)
        crash_point(f"remove:{path.name}:moved")
        shutil.rmtree(hidden)
    crash_point(f"remove:{path.name}:after")


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, sorted; links to folders are not followed.

    Anything that another thread or process removes meanwhile is left out: a glob would raise FileNotFoundError.
    """
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sorted(path for path in paths if path.is_file())


def commit(connection: sqlite3.Connection, action: str) -> None:
    """Commit the open transaction; `action` names it at its crash points."""
    crash_point(f"commit:{action}:before")
    connection.execute("COMMIT")
    crash_point(f"commit:{action}:after")


def sweep(folder: Path) -> tuple[str, ...]:
    """Delete the unfinished files of dead writers in `folder`, and return their names. Only its one live writer may call it."""
    leftovers = [
        path for path in sorted(folder.iterdir()) if path.name.startswith((BUILDING, REMOVING))
    ]
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return tuple(path.name for path in leftovers)


def flush_folder(path: Path) -> None:
    """Flush a folder's directory entries to the disk."""
    _flush(path)


@contextmanager
def explaining_disk_errors(path: Path) -> Generator[None, None, None]:
    """Turn an OSError into a StoreError that says what to do. FileExistsError passes."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}. "
            "Free space on that disk (or fix its permissions), then go on with --resume: what was complete still stands."
        ) from error


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _rename_into_place(building: Path, path: Path, replace: bool) -> None:
    if replace:
        building.replace(path)
    else:
        # A hard link, unlike a rename, fails if the name exists.
        os.link(building, path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
