"""Test files go to /dev/shm if there is room: each run calls fsync dozens of times, and no test can tell memory from a disk.

A session has its own folder there and holds a lock on it. What killed sessions leave behind (databases, models, runs: gigabytes of
memory) is removed by the next one.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "gw-tests-"
ENOUGH = 6 << 30
"""Bytes that must be free in the folder and in memory: files there use up memory."""


class SessionFolder:
    """The folder of one session."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.wanted = False
        """True: keep the files, because somebody may want to look at them."""
        self._lock = lock

    def end(self) -> None:
        """Remove the folder, unless it is `wanted`; then the next session removes it."""
        if not self.wanted:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def session_folder(memory: Path = MEMORY, enough: int = ENOUGH) -> SessionFolder | None:
    """Make a new folder, after removing those of dead sessions. None: there is no room."""
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        return None
    sweep(memory)
    room = os.statvfs(memory)
    free = min(room.f_bavail * room.f_frsize, available())
    if free < enough or room.f_flag & os.ST_NOEXEC:
        return None
    while True:
        # Hexadecimal, as lighteval takes a model for OpenAI's if its path has `o1` in it; short, as paths of sockets are limited.
        path = Path(memory, f"{PREFIX}{secrets.token_hex(4)}")
        path.mkdir(mode=0o700)
        path.chmod(0o755)  # machines and databases of tests are other users'
        lock = _locked(path, wait=True)
        if lock is not None and path.exists():  # nobody swept it between the two lines
            return SessionFolder(path, lock)


def sweep(memory: Path = MEMORY) -> list[Path]:
    """Remove the folders of sessions that have ended, and return them."""
    gone: list[Path] = []
    for path in memory.glob(PREFIX + "*"):
        lock = _locked(path, wait=False)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            gone.append(path)
    return gone


def _locked(path: Path, *, wait: bool) -> int | None:
    """A descriptor that locks the folder; None: another process has it, or it is gone."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return folder
        except BlockingIOError:
            os.close(folder)
    return None


def available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of memory that can be used without swapping."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
