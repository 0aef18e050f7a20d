"""Reading the working folder of a job without following links: the job may change it at any moment."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import stat
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.protocol import RequestProgress, RequestRejected, as_list, is_utf8

if TYPE_CHECKING:
    from typing import Any

KINDS = {
    stat.S_IFLNK: "link",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}
NO_FILES = frozenset({*KINDS.values(), "special"})
"""Reasons for refusal that lose no content. Any other reason means that a file is missing from the answer."""
MAX_ENTRIES = 200_000
"""Most files and folders that are visited below a working folder, unless its job may have more."""
DEEPEST = 60


def parts_of(path: object) -> list[str]:
    """The parts of a path inside the working folder. Raises RequestRejected `refused_path`."""
    parts = path.split("/") if isinstance(path, str) else [""]
    joined = "".join(parts)
    if "\0" in joined or any(p in ("", ".", "..") for p in parts) or not is_utf8(joined):
        raise RequestRejected(
            "refused_path", "a path relative to the working folder is expected, without .."
        )
    return parts


def paths_in(value: Any) -> list[str]:
    """The valid paths of a list, i.e. those inside the working folder."""
    paths: list[str] = []
    for path in as_list(value):
        with contextlib.suppress(RequestRejected):
            parts_of(path)
            paths.append(path)
    return paths


def open_inside(work: str, path: str) -> int:
    """Open a file or folder below the working folder. Each part is opened relative to its parent and links are refused, so no link is
    followed."""
    parts = parts_of(path)
    try:
        fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise RequestRejected(
            "not_found", "the attempt has no working folder on this machine"
        ) from None
    for part in parts:
        try:
            kind = stat.S_IFMT(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode)
            if kind in KINDS:  # opening a device may have side effects
                raise RequestRejected(
                    "refused_path", f"{path} is a {KINDS[kind]}", kind=KINDS[kind]
                )
            child_fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        except FileNotFoundError:
            raise RequestRejected("not_found", f"{path} is not in the working folder") from None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            # It was replaced by a link a moment ago, or its parent is a file.
            message = f"{path}: not all above it are folders"
            raise RequestRejected("refused_path", message, kind="link") from None
        finally:
            os.close(fd)
        fd = child_fd
    return fd


def read_inside(work: str, path: str, max_bytes: int) -> bytes:
    """Read a file of the working folder, at most `max_bytes` bytes."""
    with open(open_regular(work, path), "rb") as file:
        return file.read(max_bytes)


def read_if_unchanged(work: str, path: str, sha: str, size: int) -> bytes | None:
    """A file's bytes if it still has that size and hash, else None. At most one byte more than `size` is read, even of an endless file."""
    try:
        data = read_inside(work, path, size + 1)
    except (OSError, RequestRejected):
        return None
    return data if len(data) == size and hashlib.sha256(data).hexdigest() == sha else None


def open_regular(work: str, path: str) -> int:
    """Open a plain file below the working folder; RequestRejected for anything else."""
    fd = open_inside(work, path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RequestRejected("refused_path", f"{path} is not a plain file", kind="folder")
    return fd


class Walk:
    """Collects all plain files below some folders of the working folder; `refused` maps every other path to the reason why it is left
    out."""

    def __init__(self, work: str, max_entries: int | None = None) -> None:
        self.work, self.max_entries = work, MAX_ENTRIES if max_entries is None else max_entries
        self.files: dict[str, os.stat_result] = {}
        self.refused: dict[str, str] = {}
        self.entry_count = 0

    def enter(self, path: str) -> None:
        """Add a file or folder; skip it if it is missing."""
        try:
            fd = open_inside(self.work, path)
        except (RequestRejected, OSError) as error:
            if not isinstance(error, RequestRejected):
                self.refused[path] = "unreadable"
            elif error.body["code"] != "not_found":
                self.refused[path] = error.body["kind"]
            return
        try:
            file_stat = os.fstat(fd)
            if stat.S_ISDIR(file_stat.st_mode):
                self._walk_folder(fd, path, 0)
            else:
                self._add_file(path, file_stat)
        finally:
            os.close(fd)

    def _walk_folder(self, fd: int, path: str, depth: int) -> None:
        try:
            with os.scandir(fd) as entries:
                # Read one name more than the limit, which shows that there are too many.
                limit = max(0, self.max_entries - self.entry_count) + 1
                names = sorted(e.name for e in itertools.islice(entries, limit))
        except OSError:
            self.refused[path] = "unreadable"
            return
        for name in names:
            self.entry_count += 1
            RequestProgress.done += 1
            child_path = f"{path}/{name}"
            if self.entry_count > self.max_entries:
                self.refused[path] = "too_many"
                return
            if not is_utf8(name):
                self.refused[child_path.encode("utf-8", "replace").decode()] = "not_utf8"
                continue
            try:
                file_stat = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue  # removed meanwhile
            self._add_child(fd, name, child_path, file_stat, depth)

    def _add_child(
        self, fd: int, name: str, child_path: str, file_stat: os.stat_result, depth: int
    ) -> None:
        if not stat.S_ISDIR(file_stat.st_mode):
            self._add_file(child_path, file_stat)
        elif depth >= DEEPEST:
            self.refused[child_path] = "too_deep"
        else:
            try:
                child_fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            except OSError:
                self.refused[child_path] = "unreadable"
                return
            try:
                self._walk_folder(child_fd, child_path, depth + 1)
            finally:
                os.close(child_fd)

    def _add_file(self, path: str, file_stat: os.stat_result) -> None:
        if stat.S_ISREG(file_stat.st_mode):
            self.files[path] = file_stat
        else:
            self.refused[path] = KINDS.get(stat.S_IFMT(file_stat.st_mode), "special")
