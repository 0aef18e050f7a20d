"""A lock that lets only one live process work on a run folder.

The holder keeps an exclusive `flock` on the file `lock`, and writes its process id and host into it. The kernel releases the lock when the
process ends in any way. So a lock that can be taken is free. The text in the file is only for messages, and no process id is checked.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from groupwise.core.errors import RunInUseError, UsageError

LOCK = "lock"

RETRY_DELAYS = (0.0, 0.01, 0.02, 0.05, 0.1)
"""Seconds between attempts: another process that calls `is_held` or `holder` briefly takes a shared lock."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run folder."""

    pid: int
    started_at: float
    """Seconds since 1970 when it took the lock."""
    host: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_at))
        return f"process {self.pid} on {self.host} (since {since})"


class RunLock:
    """An exclusive lock on a run folder, until `release` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, folder: Path) -> RunLock:
        """Lock the folder; RunInUseError names the live process that holds it, UsageError if the folder is not writable."""
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be taken, because nothing can be written there: {error.strerror}. Fix its permissions, "
                "or copy the run to another folder."
            ) from error
        if not _try_flock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            raise RunInUseError(
                f"{folder} is in use by {_read_holder(folder) or 'another process'}. "
                "Wait for it or stop it, or start another run with run.name=<another name>."
            )
        me = Holder(pid=os.getpid(), started_at=time.time(), host=socket.gethostname())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(me)).encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        """Release the folder; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_held(folder: Path) -> bool:
    """True if a live process holds the folder (this one included)."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try_flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def holder(folder: Path) -> Holder | None:
    """The live process that holds the folder, if any."""
    return _read_holder(folder) if is_held(folder) else None


def _try_flock(descriptor: int, kind: int) -> bool:
    for pause in RETRY_DELAYS:
        time.sleep(pause)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            # Only exclusive attempts are retried: they may meet the brief shared lock of `is_held`.
            if kind == fcntl.LOCK_SH:
                return False
        else:
            return True
    return False


def _read_holder(folder: Path) -> Holder | None:
    try:
        return Holder(**json.loads((folder / LOCK).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
