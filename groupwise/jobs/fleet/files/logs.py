"""Logs of jobs on the control machine: `logs/<job>/<epoch>.log`, the exact output of the command, and `logs/<job>.log`, the newest.

The machine has the log; this is a copy of its beginning. The dispatcher that drives an attempt fetches new bytes (`LogMirror.catch_up`):
it requests them from the file's real end and only appends there, under the file's lock, so two processes at once write each byte once. The
offset is reported when the bytes are on the disk. After a crash, bytes beyond the last reported offset may be torn; they are cut off and
requested again.

In a gang, rank 0 writes `<epoch>.log` and rank r `<epoch>.<r>.log`.

A reader (`Follower`) keeps a position, the epoch and the offset, and opens the file by its name each time. It therefore continues where it
was, even if the file was replaced meanwhile, and then with the next epoch when there is one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.records import locked_attempt
from groupwise.jobs.fleet.store.tables import Member
from groupwise.jobs.hosts.driver import PIECE
from groupwise.jobs.hosts.files import sync_folder
from groupwise.jobs.hosts.spec import JOB_ID

if TYPE_CHECKING:
    from groupwise.jobs.fleet.attempts.controller import MemberOutput
    from groupwise.jobs.fleet.attempts.effects import Gateway

_NAME = re.compile(r"(0|[1-9][0-9]*)\.log")
REMEMBERED = 10_000
"""Maximum number of logs that a mirror remembers to have cut."""
LOOK_AGAIN = 0.25
"""Seconds until a follower that has read everything tries again."""
LONGEST_TAIL = 16 << 20
"""Bytes at the end of a log that are searched for its last lines; if they hold too few lines, no more is shown."""
TAIL_PIECE = 256 << 10
"""Bytes that are read at a time for that search."""
_LINE_END = re.compile(rb"\r\n?|\n")
"""Line ends as on a terminal: a progress bar ends its line with a carriage return."""
NOBODYS = ".none"
"""The folder name for invalid job ids: no job has it, and nothing is ever written there."""


def folder_name(job: str) -> str:
    """The folder of a job within those of logs and artefacts: its id. A row written by hand may have an id that leads out of the folder:
    such a job never runs, and has left no files."""
    return job if JOB_ID.fullmatch(job) else NOBODYS


def log_path(logs: Path, job: str, epoch: int, rank: int = 0) -> Path:
    """The path of a log, whether it exists or not."""
    return logs / folder_name(job) / (f"{epoch}.log" if rank == 0 else f"{epoch}.{rank}.log")


def newest_link(logs: Path, job: str) -> Path:
    """The link to the newest log of a job."""
    return logs / f"{folder_name(job)}.log"


def epochs(logs: Path, job: str) -> list[int]:
    """Epochs of the job that have a log here, oldest first."""
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(log_path(logs, job, 0).parent)
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)
    return []


# ---------------------------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------------------------


def append(path: Path, offset: int, data: bytes) -> int:
    """Add bytes that belong at `offset`, and return the file's size, flushed. If the file does not end at `offset`, nothing is written.

    Raises OSError; the file is then as long as before.
    """
    with _open_locked(path) as file:
        size = os.fstat(file).st_size
        if size != offset:
            return size
        try:
            remaining, position = memoryview(data), offset
            while remaining:
                count = os.pwrite(file, remaining, position)
                remaining, position = remaining[count:], position + count
            os.fsync(file)
        except OSError:
            os.ftruncate(file, offset)  # a full disk may have taken a part of it
            raise
        return offset + len(data)


def cut(path: Path, reported: int) -> int:
    """Remove bytes beyond the reported offset, which may be torn. Returns the file's size."""
    if not path.exists():
        return 0
    with _open_locked(path) as file:
        size = os.fstat(file).st_size
        if size > reported:
            os.ftruncate(file, reported)
            os.fsync(file)
        return min(size, reported)


def make(logs: Path, job: str, epoch: int, rank: int = 0) -> Path:
    """Create an empty log if there is none. Rank 0's becomes the newest of its job, unless a later epoch has one."""
    path = log_path(logs, job, epoch, rank)
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(0o600)
        sync_folder(path.parent)
        sync_folder(logs)
    if rank != 0:
        return path
    link = newest_link(logs, job)
    with _open_locked(logs / job, os.O_RDONLY | os.O_DIRECTORY):
        with contextlib.suppress(OSError):  # there is no link yet
            newest = _NAME.fullmatch(Path(os.readlink(link)).name)
            if newest and int(newest[1]) >= epoch:
                return path
        temporary = logs / job / ".newest"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(f"{job}/{epoch}.log")
        temporary.replace(link)
        sync_folder(logs)
    return path


@contextlib.contextmanager
def _open_locked(
    path: Path, flags: int = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
) -> Generator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


class LogMirror:
    """Copies logs to this machine's disk, for the attempts of one dispatcher."""

    def __init__(self, logs: Path, gateway: Gateway) -> None:
        self._logs = logs
        self._gateway = gateway
        self._checked: set[tuple[int, int]] = set()
        """Logs (epoch, rank) whose torn end was cut off since this process started, as far as they are remembered."""

    async def catch_up(self, output: MemberOutput, size: int) -> None:
        """Fetch the missing part of the first `size` bytes. Safe to repeat, and to cancel. Raises HostError, OSError, Stale."""

        def open_log() -> tuple[Path, int]:
            path = make(self._logs, output.job_id, output.epoch, output.rank)
            if (output.epoch, output.rank) not in self._checked:
                return path, cut(path, output.log_offset)
            return path, path.stat().st_size

        path, local_size = await self._gateway.write("log.open", open_log)
        if len(self._checked) >= REMEMBERED:
            self._checked.clear()  # cutting again costs one check, and at most bytes that are fetched again
        self._checked.add((output.epoch, output.rank))
        while local_size < size:
            piece = await output.runner.log(output.job_id, output.epoch, local_size, limit=PIECE)
            if not piece.data:
                break  # the log is shorter than reported: all of it is here
            data, offset = piece.data, local_size
            local_size = await self._gateway.write("log.append", lambda: append(path, offset, data))  # noqa: B023  # awaited at once
        if local_size != output.log_offset:
            await self._gateway.commit(
                "log.offset", lambda session: _store_offset(session, output, local_size)
            )


def _store_offset(session: Session, output: MemberOutput, offset: int) -> None:
    locked_attempt(session, output.epoch, output.owner)
    session.get_one(Member, (output.epoch, output.rank)).log_offset = offset


# ---------------------------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Position:
    """The position up to which a reader has read."""

    epoch: int
    offset: int


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Bytes of a log, and the position after them."""

    data: bytes
    end: Position


class Follower:
    """Reads the logs of a job, one epoch after the other, from a position on; without one, from the start of the newest."""

    def __init__(
        self, logs: Path, job: str, *, position: Position | None = None, rank: int = 0
    ) -> None:
        self._logs, self._job, self._rank = logs, job, rank
        self.position = position

    def read(self, limit: int = PIECE) -> LogPiece | None:
        """The next bytes; None: none yet. A later epoch follows once all of the one before has been read."""
        if self.position is None:
            known_epochs = epochs(self._logs, self._job)
            if not known_epochs:
                return None
            self.position = Position(known_epochs[-1], 0)
        while True:
            epoch, offset = self.position.epoch, self.position.offset
            # The epochs are listed before reading: all of this one is read before the next one starts.
            following = [e for e in epochs(self._logs, self._job) if e > epoch]
            data = b""
            with (
                contextlib.suppress(FileNotFoundError),
                log_path(self._logs, self._job, epoch, self._rank).open("rb") as file,
            ):
                data = os.pread(file.fileno(), limit, offset)
            if data:
                self.position = Position(epoch, offset + len(data))
                return LogPiece(data, self.position)
            if not following:
                return None
            self.position = Position(following[0], 0)


def follower_at(
    logs: Path,
    job: str,
    *,
    epoch: int | None = None,
    offset: int = 0,
    rank: int = 0,
    tail: int | None = None,
) -> Follower:
    """A reader from this offset on; without `epoch`, of the newest log. `tail`: start this many lines before its present end instead."""
    if tail is not None and epoch is None:
        epoch = next(reversed(epochs(logs, job)), None)
    if epoch is None:
        return Follower(logs, job, rank=rank)
    if tail is not None:
        offset = _offset_of_tail(log_path(logs, job, epoch, rank), tail)
    return Follower(logs, job, position=Position(epoch, offset), rank=rank)


def _offset_of_tail(path: Path, lines: int) -> int:
    """Offset of the last `lines` lines of a file. Reads backwards from its end, at most LONGEST_TAIL bytes."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    pieces: list[bytes] = []
    with file:
        size = file.seek(0, os.SEEK_END)
        line_ends, start, first = 0, size, max(0, size - LONGEST_TAIL)
        # A line end of two bytes may be split between two pieces, and is then counted twice.
        while start > first and line_ends <= lines + len(pieces):
            piece_end, start = start, max(first, start - TAIL_PIECE)
            file.seek(start)
            piece = file.read(piece_end - start)
            line_ends += piece.count(b"\n") + piece.count(b"\r") - piece.count(b"\r\n")
            pieces.append(piece)
    tail = b"".join(reversed(pieces))
    starts = (match.end() for match in _LINE_END.finditer(tail) if match.end() < len(tail))
    last_starts = deque(starts, maxlen=lines)
    if len(last_starts) < lines:
        return size - len(tail)
    return size - len(tail) + last_starts[0] if lines else size
