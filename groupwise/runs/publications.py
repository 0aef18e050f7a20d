"""Chooses the folder for a run's published weights, which the sampler loads: in memory if there is room, else on the disk.

    /dev/shm/groupwise-<user>/      (or the folder for temporary files)
        <run>/v000000012/           the weights that the learner published; the last two versions are kept
        <server>/socket             where a vLLM of a run's own listens, which claims a folder in the same way
        <run>.lock                  held by the process that publishes there
        lock                        held briefly while a process claims, sweeps or releases a folder

No other user can write there: the sampler must load exactly what the learner published. A killed process leaves its folder, but its lock
is released: the next process that claims a folder deletes those whose lock is not held.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from groupwise.core import atomic_files

MEMORY = Path("/dev/shm")
COPIES = 3
"""Two versions are kept while the next one is written."""
SHARE = 4
"""Published weights may take 1/SHARE of the free memory: training needs several times their size."""

_claims: dict[Path, int] = {}
"""The folders that this process has claimed, and the file descriptors of their locks."""


def claim(run_folder: Path, size: int) -> Path:
    """Claim a folder for the publications of a run, empty or still missing; `size` is the size of one publication in bytes.

    Deletes the folders of dead processes. StoreError if nothing can be written.
    """
    with atomic_files.explaining_disk_errors(Path(tempfile.gettempdir())):
        # Memory only if it has room: in containers /dev/shm is often very small.
        root, needed = Path(tempfile.gettempdir()), COPIES * size
        if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= needed:
            root = MEMORY if free_memory() >= SHARE * needed else root
        user_folder = root / f"groupwise-{os.getuid()}"
        user_folder.mkdir(mode=0o700, exist_ok=True)
        status = user_folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022 or user_folder.is_symlink():
            # Other users may write there, so it is not used: the sampler must load exactly what the learner published.
            user_folder = Path(tempfile.mkdtemp(prefix="groupwise-"))
        with _exclusive_access(user_folder):
            for path in user_folder.glob("*.lock"):
                folder = path.with_suffix("")
                descriptor = os.open(path, os.O_RDWR)
                if _try_lock(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
                    path.unlink()
                os.close(descriptor)
            name = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
            for number in count(1):
                folder = user_folder / (name if number == 1 else f"{name}-{number}")
                if _try_claim(folder):
                    return folder
    raise AssertionError("unreachable")


def release(folder: Path) -> None:
    """Delete the publications in a claimed folder, and release the claim; a second call does nothing."""
    descriptor = _claims.pop(folder, None)
    if descriptor is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError), _exclusive_access(folder.parent):
        _lock_of(folder).unlink()
    os.close(descriptor)


def version_folder(publications: Path, version: int) -> Path:
    """Make an empty folder for a version. Raises StoreError if the disk (or memory) refuses."""
    folder = publications / f"v{version:09d}"
    shutil.rmtree(folder, ignore_errors=True)
    with atomic_files.explaining_disk_errors(folder):
        folder.mkdir(parents=True)
    return folder


def remove_old(publications: Path, version: int, keep: int) -> list[Path]:
    """Delete all but the last `keep` versions up to `version`; returns the deleted folders."""
    old_folders = [
        folder for folder in publications.glob("v*") if int(folder.name[1:]) <= version - keep
    ]
    for folder in old_folders:
        shutil.rmtree(folder, ignore_errors=True)
    return old_folders


def free_memory() -> int:
    """Bytes of memory that this process can still allocate, within the container's limit if there is one."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    available = next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no container limit
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available


def _try_claim(folder: Path) -> bool:
    if folder in _claims:
        return False
    descriptor = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT, 0o600)
    # Another live process holds the folder.
    if not _try_lock(descriptor):
        os.close(descriptor)
        return False
    shutil.rmtree(folder, ignore_errors=True)
    _claims[folder] = descriptor
    return True


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _exclusive_access(user_folder: Path) -> Generator[None, None, None]:
    """Lets one process at a time claim, sweep or release: a lock file that was just made, and is not locked yet, would look dead."""
    descriptor = os.open(user_folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
