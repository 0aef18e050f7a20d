"""Reports a full disk of the control machine as such: users who start a fleet, or query it, learn which disk is full and what to do.

SQLite does not report that itself: without room for the file that its processes share, it reports an I/O error, or cannot open the file at
all. So the free space is checked directly.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from groupwise.core.errors import RunError, UsageError
from groupwise.core.terminal.quantities import byte_size

MIN_FREE_BYTES = 1_000_000
"""Bytes of free space below which no fleet starts: an empty database needs half of that, and SQLite's other files need some."""
RESERVED_SHARE = 0.05
"""Share of the disk that data from clients and machines must leave free."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
NOT_PERMITTED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST})


class DiskFull(RunError):
    """There is no room on a disk that the fleet writes to."""

    code = "disk_full"

    def __init__(self, folder: Path) -> None:
        super().__init__(f"the fleet cannot write: {words(folder)}")


@contextlib.contextmanager
def explain_disk_errors(folder: Path) -> Generator[None, None, None]:
    """Turn errors of the disk into messages: DiskFull if it is full, UsageError if this user may not write to the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise DiskFull(folder) from error
        if error.errno in NOT_PERMITTED and Path(str(error.filename)).is_relative_to(folder):
            raise UsageError(
                f"the fleet cannot write to {error.filename}: {error.strerror}. "
                "Let this user write there, or name another folder with --fleet."
            ) from error
        raise


def is_full(folder: Path) -> bool:
    """True if so little space is left on the disk that a database fails there."""
    try:
        disk = os.statvfs(_existing_ancestor(folder))
    except OSError:
        return False
    no_names = disk.f_files > 0 and disk.f_favail == 0
    return no_names or disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES


def no_room(folder: Path, size: int) -> str | None:
    """The reason why this many bytes from elsewhere are not written below `folder`: the database needs the space. None: they may be
    written."""
    disk = shutil.disk_usage(_existing_ancestor(folder))
    if size <= disk.free - disk.total * RESERVED_SHARE:
        return None
    return (
        f"its {byte_size(size)} would leave less than {RESERVED_SHARE:.0%} of the control machine's disk free; {byte_size(disk.free)} "
        "are free now"
    )


def words(folder: Path) -> str:
    """The end of a message: the full disk, and the remedy."""
    space = ""
    with contextlib.suppress(OSError):
        disk = os.statvfs(_existing_ancestor(folder))
        space = f" ({byte_size(disk.f_bavail * disk.f_frsize)} left for this user)"
    return (
        f"the disk of {folder} is full{space}. Make room there; nothing that was acknowledged is lost. "
        "`df -h` and `df -i` say what is left."
    )


def _existing_ancestor(folder: Path) -> Path:
    """The folder, or its nearest ancestor that exists."""
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)
