"""Reading the working folder of a job without following links: the job may change it at any moment."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import stat
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.protocol import Refusal, Work, as_list, is_utf8

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
MOST_ENTRIES = 200_000
"""Most files and folders that are visited below a working folder, unless its job may have more."""
DEEPEST = 60


def parts_of(path: object) -> list[str]:
    """The parts of a path inside the working folder. Raises Refusal `refused_path`."""
    parts = path.split("/") if isinstance(path, str) else [""]
    whole = "".join(parts)
    if "\0" in whole or any(p in ("", ".", "..") for p in parts) or not is_utf8(whole):
        raise Refusal(
            "refused_path", "a path relative to the working folder is expected, without .."
        )
    return parts


def paths_in(value: Any) -> list[str]:
    """The valid paths of a list, i.e. those inside the working folder."""
    found: list[str] = []
    for path in as_list(value):
        with contextlib.suppress(Refusal):
            parts_of(path)
            found.append(path)
    return found


def open_inside(work: str, path: str) -> int:
    """Open a file or folder below the working folder. Each part is opened relative to its parent and links are refused, so no link is
    followed."""
    parts = parts_of(path)
    try:
        fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise Refusal("not_found", "the attempt has no working folder on this machine") from None
    for part in parts:
        try:
            kind = stat.S_IFMT(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode)
            if kind in KINDS:  # opening a device may have side effects
                raise Refusal(
                    "refused_path", f"{path}: a {KINDS[kind]} stands there", kind=KINDS[kind]
                )
            below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        except FileNotFoundError:
            raise Refusal("not_found", f"{path} is not in the working folder") from None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            # It was replaced by a link a moment ago, or its parent is a file.
            message = f"{path}: not all above it are folders"
            raise Refusal("refused_path", message, kind="link") from None
        finally:
            os.close(fd)
        fd = below
    return fd


def read_inside(work: str, path: str, most: int) -> bytes:
    """Read a file of the working folder, at most `most` bytes."""
    with open(open_regular(work, path), "rb") as file:
        return file.read(most)


def whole_inside(work: str, path: str, sha: str, size: int) -> bytes | None:
    """A file's bytes if it still has that size and hash, else None. At most one byte more than `size` is read, even of an endless file."""
    try:
        data = read_inside(work, path, size + 1)
    except (OSError, Refusal):
        return None
    return data if len(data) == size and hashlib.sha256(data).hexdigest() == sha else None


def open_regular(work: str, path: str) -> int:
    """Open a plain file below the working folder; Refusal for anything else."""
    fd = open_inside(work, path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refusal("refused_path", f"{path} is no plain file", kind="folder")
    return fd


class Walk:
    """Collects all plain files below some folders of the working folder; `refused` maps every other path to the reason why it is left
    out."""

    def __init__(self, work: str, most: int | None = None) -> None:
        self.work, self.most = work, MOST_ENTRIES if most is None else most
        self.files: dict[str, os.stat_result] = {}
        self.refused: dict[str, str] = {}
        self.seen = 0

    def enter(self, path: str) -> None:
        """Add a file or folder; skip it if it is missing."""
        try:
            fd = open_inside(self.work, path)
        except (Refusal, OSError) as error:
            if not isinstance(error, Refusal):
                self.refused[path] = "unreadable"
            elif error.body["code"] != "not_found":
                self.refused[path] = error.body["kind"]
            return
        try:
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                self._folder(fd, path, 0)
            else:
                self._entry(path, found)
        finally:
            os.close(fd)

    def _folder(self, fd: int, path: str, depth: int) -> None:
        try:
            with os.scandir(fd) as entries:
                # Read one name more than the limit, which shows that there are too many.
                left = max(0, self.most - self.seen) + 1
                names = sorted(e.name for e in itertools.islice(entries, left))
        except OSError:
            self.refused[path] = "unreadable"
            return
        for name in names:
            self.seen += 1
            Work.done += 1
            below = f"{path}/{name}"
            if self.seen > self.most:
                self.refused[path] = "too_many"
                return
            if not is_utf8(name):
                self.refused[below.encode("utf-8", "replace").decode()] = "not_utf8"
                continue
            try:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue  # removed meanwhile
            self._one(fd, name, below, found, depth)

    def _one(self, fd: int, name: str, below: str, found: os.stat_result, depth: int) -> None:
        if not stat.S_ISDIR(found.st_mode):
            self._entry(below, found)
        elif depth >= DEEPEST:
            self.refused[below] = "too_deep"
        else:
            try:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            except OSError:
                self.refused[below] = "unreadable"
                return
            try:
                self._folder(inner, below, depth + 1)
            finally:
                os.close(inner)

    def _entry(self, path: str, found: os.stat_result) -> None:
        if stat.S_ISREG(found.st_mode):
            self.files[path] = found
        else:
            self.refused[path] = KINDS.get(stat.S_IFMT(found.st_mode), "special")
