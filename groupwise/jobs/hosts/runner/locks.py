"""File locks. A lock is released when the last process that has the file open ends, so a crash leaves none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import open_plain
from groupwise.jobs.hosts.runner.protocol import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Generator

LOCK_TIMEOUT = 10.0
"""Seconds to wait for locks that are held only while a request is answered."""


def take_lock(path: str, mode: int = fcntl.LOCK_EX, timeout: float = 0.0) -> int | None:
    """Take a lock. Returns the open file that holds it; None if another process holds it for all of `timeout` seconds."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
        except BaseException:
            os.close(fd)
            raise
        time.sleep(0.01)


def is_locked(path: str) -> bool:
    """True if another process holds the lock exclusively."""
    try:
        fd = open_plain(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def one_at_a_time(folder: str) -> Generator[None, None, None]:
    """Lock for slow work that may be requested again after its caller was disconnected: later requests wait, and then find the work done.
    The process exits if the caller of this request disconnects meanwhile."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = select.poll()
    listener.register(1, 0)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if listener.poll(100):
                    os._exit(0)  # the caller has disconnected
        yield
    finally:
        os.close(lock)


class HeldLock:
    """A lock for the duration of a `with`, released explicitly: a child that was forked meanwhile would otherwise keep it. Raises
    RequestRejected `busy`."""

    def __init__(self, path: str, mode: int = fcntl.LOCK_EX) -> None:
        self.path, self.mode = path, mode

    def __enter__(self) -> None:
        fd = take_lock(self.path, self.mode, LOCK_TIMEOUT)
        if fd is None:
            raise RequestRejected(
                "busy", f"another request holds {os.path.basename(self.path)}; ask again"
            )
        self.fd = fd

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)
