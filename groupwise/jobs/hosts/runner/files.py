"""Reading and writing files safely. A job may put a pipe, a link or an endless file in any place that it can write to. So every file is
opened only if it is a plain file, and read up to a limit. A new file is written to disk before its name, so it is either complete or
missing."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.protocol import NO_JSON, as_bytes, as_object, parse_json

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import Any

CELL = 64
"""Size in bytes of a cell: a file that is overwritten in place, which needs no space on a full disk."""
LARGEST_TEXT = 16 << 20
LARGEST_RECORD = 4 << 20
"""Largest size in bytes of our own files in an attempt's folder. The job runs as the same user and may write anything to them."""
STAYS = ".stays"
"""Name prefix of a folder that could not be removed completely."""
TAIL = 4000
"""How many bytes of the log's end the exit record contains."""


def is_disk_full(error: OSError) -> bool:
    """True if the disk or this user's quota is full, or the file would exceed the largest size allowed."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_plain(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a plain file; OSError if it is anything else. A job may put a pipe in place of one of our files, and opening a pipe blocks."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "no plain file", path)


def read_plain(path: str, max_bytes: int) -> bytes:
    """Read a plain file, at most `max_bytes` bytes."""
    fd, content = open_plain(path), bytearray()
    try:
        while len(content) < max_bytes:
            data = os.read(fd, min(max_bytes - len(content), 1 << 16))
            if not data:
                break
            content += data
    finally:
        os.close(fd)
    return bytes(content)


def read_text(path: str, max_bytes: int = LARGEST_TEXT) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return read_plain(path, max_bytes).decode("utf-8", "replace")
    except OSError:
        return ""


def read_json(path: str, max_bytes: int = LARGEST_RECORD) -> dict[str, Any] | None:
    """A JSON object from a file; None if the file is missing, damaged or longer than `max_bytes`."""
    try:
        data = read_plain(path, max_bytes + 1)
        return as_object(parse_json(data)) if len(data) <= max_bytes else None
    except (OSError, *NO_JSON):
        return None


def read_end(path: str) -> str:
    """The last TAIL bytes of a file; empty if it cannot be read."""
    try:
        fd = open_plain(path)
    except OSError:
        return ""
    try:
        return os.pread(fd, TAIL, max(0, os.fstat(fd).st_size - TAIL)).decode("utf-8", "replace")
    finally:
        os.close(fd)


def sync_folder(path: str) -> None:
    """Write a folder's entries to disk: then the names in it survive a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: str, data: bytes) -> None:
    """Write a new file to disk. Its name is durable only after `sync_folder`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: str, document: dict[str, Any]) -> None:
    """Replace a file atomically and durably; if that fails the old file remains."""
    temporary = f"{path}.{os.getpid()}.new"
    try:
        write_file(temporary, as_bytes(document))
        os.rename(temporary, path)
    except OSError:
        remove_file(temporary)
        raise
    sync_folder(os.path.dirname(path))


def make_folder(path: str) -> str:
    """Create a folder and its missing parents, for this user alone."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def size_of(path: str) -> int:
    """A file's size in bytes; 0 if the file is missing."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def modification_time(path: str) -> float:
    """Modification time of a file; 0 if the file is missing."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def changed_before(path: str, moment: float) -> bool:
    """True if the file last changed at `moment` or before. Uses ctime, the only file time that a job cannot set."""
    try:
        return os.lstat(path).st_ctime <= moment
    except OSError:
        return False


def set_cell(path: str, text: str) -> bool:
    """Overwrite a small file in place, with one write and no new disk space. False if the file does not exist."""
    try:
        fd = open_plain(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.pwrite(fd, text.ljust(CELL)[:CELL].encode("ascii"), 0)
    finally:
        os.close(fd)
    return True


def write_once(path: str, text: str, flags: int = 0) -> bool:
    """Write to a pipe or a kernel's control file in one call; False if it is missing or rejects the write."""
    try:
        fd = os.open(path, os.O_WRONLY | flags)
    except OSError:
        return False
    try:
        os.write(fd, text.encode("ascii"))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def cell_words(path: str) -> list[str]:
    """The words in a cell, a small file written by `set_cell`."""
    return read_text(path, CELL).split()


def number_in(words: Sequence[str]) -> float | None:
    """The first word as a number; None if it is not a number, or its absolute value is 1e12 or more."""
    try:
        number = float(words[0])
    except (IndexError, ValueError):
        return None
    return number if abs(number) < 1e12 else None


def remove_file(path: str) -> None:
    """Remove a file if possible; ignore errors."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_tree(path: str) -> None:
    """Remove as much of a folder as possible. A job may have removed the permissions of its folders or nested them without limit: so each
    is opened to this user first, and deeper folders are moved to the top before they are emptied."""
    with contextlib.suppress(OSError):
        with open_folder(path) as top:
            todo = empty_folder(top, top)
            while todo:
                name = todo.pop()
                with contextlib.suppress(OSError), open_folder(name, top) as folder:
                    todo += empty_folder(folder, top)
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=top)
        os.rmdir(path)


def remove_or_mark(path: str) -> None:
    """Remove a folder. If a part remains, because only another user may remove it, rename the folder with the prefix STAYS."""
    remove_tree(path)
    parent, name = os.path.split(path)
    if not name.startswith(STAYS):
        with contextlib.suppress(OSError):
            os.rename(path, os.path.join(parent, STAYS + name))


@contextlib.contextmanager
def open_folder(name: str, parent_fd: int | None = None) -> Generator[int, None, None]:
    """Open a folder that is not a link. If it belongs to this user, give its owner all permissions first."""
    path_fd = os.open(
        name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd
    )
    try:
        proc_path = f"/proc/self/fd/{path_fd}"
        with contextlib.suppress(OSError):  # it belongs to another user
            os.chmod(proc_path, 0o700)
        folder = os.open(proc_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(path_fd)
    try:
        yield folder
    finally:
        os.close(folder)


def empty_folder(folder: int, top: int) -> list[str]:
    """Remove everything except folders, and move those into `top`; returns their names in `top`."""
    names: list[str] = []
    with os.scandir(folder) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in children:
        with contextlib.suppress(OSError):  # skip what cannot be removed
            if not is_folder:
                os.unlink(name, dir_fd=folder)
            elif folder == top:
                names.append(name)
            else:
                names += move_up(name, folder, top)
    return names


def move_up(name: str, folder: int, top: int) -> list[str]:
    """Move a folder into `top` and return its new name; an empty folder is removed instead. Moving requires write permission for the folder
    itself, removing an empty one only for its parent."""
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=folder)
        return []
    unique_name = os.urandom(16).hex()
    with open_folder(name, folder):
        os.rename(name, unique_name, src_dir_fd=folder, dst_dir_fd=top)
    return [unique_name]
