"""Ships the lines of logs as JSON lines to standard output, a file or an HTTP address, from where a company's log system collects them.

The logs that a dispatcher has fetched to this disk are read line by line and passed to a `Sink`. The position is stored with the member of
the attempt (`attempt_members.log_shipped`) and moves only after the sink has taken the lines. So each line is sent at least once, and a
repeated line has the same job, epoch, rank and offset.

A line is sent when its line end has arrived, or its attempt is over. One that is longer than `LONGEST` is sent in pieces.

If an address refuses lines because of their content (too large, or invalid to it), they are sent in halves, and so on. A line that is
refused alone is left out, and a short note with the same offset is sent in its place. If the note is refused as well, the line is not the
cause: this log waits, and the others continue. If nothing is taken at all, everything waits.

Nothing else waits for a sink: standard output and files are written by a separate thread, for which neither the other tasks of the process
nor its end wait. Lines that were not taken by then are sent by the next process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from select import POLLOUT, poll
from typing import Protocol

import httpx2
from sqlalchemy import literal, select, tuple_, update
from sqlalchemy.orm import Session

from groupwise.core.errors import RunError
from groupwise.core.loopback import async_direct_transport
from groupwise.core.retry import Backoff
from groupwise.jobs.fleet.files.logs import log_path
from groupwise.jobs.fleet.states import AttemptState
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import Attempt, Job, Member

INTERVAL = 1.0
"""Seconds between two rounds."""
LONGEST_PAUSE = 60.0
"""Longest pause in seconds before a sink that takes nothing is tried again."""
MEMBERS_AT_ONCE = 200
PIECE = 256 * 1024
"""Bytes of one log that are read at a time: in the worst case each is a line, which becomes a hundred bytes of JSON."""
LARGEST = 512 * 1024
"""Maximum bytes given to a sink at once: many HTTP sinks take a megabyte at most. Any line of `LONGEST` fits."""
LEAST = 16 * 1024
"""Bytes below which that limit does not shrink for an address that accepts less."""
TOO_LARGE = 413
SINK_STATUSES = frozenset({401, 404, 405, 407, 408, 410, 421, 425, 429})
"""HTTP statuses that do not concern the lines sent, but the address, the credentials or the rate."""
REFUSED_IN_A_ROW = 10
"""Logs refused in a row, with nothing taken, after which a round ends: then the sink is the cause, not the logs."""
LONGEST = 64 * 1024
"""Maximum bytes of a line that is sent as one."""
TAKEN = 30.0
"""Seconds after which a warning says that standard output or a file takes nothing."""

AWAY = (OSError, httpx2.HTTPError, httpx2.InvalidURL)
"""Errors of a sink that takes nothing now."""
NONE = (0, -1)
"""The key that sorts before all logs."""
LAST = (2**63 - 1, 2**31 - 1)
"""The key that sorts after all logs."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnshippedLog:
    """A log with bytes on this disk that have not been sent."""

    job_id: str
    project: str
    epoch: int
    rank: int
    vm_id: str
    shipped: int
    """Bytes sent so far."""
    available: int
    """Bytes on this disk."""
    has_ended: bool
    """True if nothing will be added."""

    @property
    def key(self) -> tuple[int, int]:
        """The key by which logs are ordered: epoch and rank."""
        return self.epoch, self.rank


@dataclass(frozen=True, slots=True)
class _LogLine:
    """A line of a log, encoded for the sink; `begin` and `end` are its offsets in the log."""

    begin: int
    end: int
    encoded: bytes


class Refused(Exception):
    """The sink will never take these lines, no matter how often they are sent."""

    def __init__(self, status: int) -> None:
        """`status`: the HTTP status of the refusal."""
        self.status = status
        super().__init__(f"HTTP {status}")


class Sink(Protocol):
    """Accepts lines, each a JSON object and a line end."""

    async def take(self, lines: bytes) -> None:
        """Returns once the lines are taken. Raises OSError, httpx2.HTTPError or httpx2.InvalidURL if they are not taken now, and Refused if
        they never will be."""
        ...


_ONE_WRITES = threading.Lock()
"""Only one thread writes at a time: after a restart of the role, the earlier writer may still have lines to finish."""


class _Writer:
    """A sink that writes in a daemon thread, which may block for ever; at exit, Python would wait for asyncio's own threads."""

    def __init__(self, write: Callable[[bytes], None], stalled: str) -> None:
        """`stalled`: the warning to log when a write blocks."""
        self._write = write
        self._stalled = stalled
        self._queue: queue.SimpleQueue[tuple[bytes, Future[None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def take(self, lines: bytes) -> None:
        """Return once the lines are written. If the caller is cancelled, they may still be written later."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_writer, name="log-shipping", daemon=True
            )
            self._thread.start()
        done: Future[None] = Future()
        self._queue.put((lines, done))
        future = asyncio.wrap_future(done)
        try:
            await asyncio.wait((future,), timeout=TAKEN)
            if not future.done():
                logger.warning("%s; lines of logs wait meanwhile, none is lost", self._stalled)
            await future
        finally:
            future.cancel()

    def _run_writer(self) -> None:
        while True:
            lines, done = self._queue.get()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                with _ONE_WRITES:
                    self._write(lines)
            except Exception as error:  # noqa: BLE001 - raised again by the waiting task
                done.set_exception(error)
            else:
                done.set_result(None)


def _write_all(descriptor: int, lines: bytes) -> None:
    view = memoryview(lines)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another process has set it to non-blocking
            ready = poll()
            ready.register(descriptor, POLLOUT)
            ready.poll()


def _own_output() -> int:
    """The descriptor of standard output, looked up at each write: after a close the number may be any other file, even the database.

    Its buffer is not used, because Python waits at exit until it is written.
    """
    if sys.__stdout__ is None:
        raise OSError("this process was begun without a standard output")
    return sys.__stdout__.fileno()


class StandardOutput(_Writer):
    """Writes to the standard output of this process."""

    def __init__(self, descriptor: Callable[[], int] = _own_output) -> None:
        super().__init__(
            lambda lines: _write_all(descriptor(), lines), "standard output has no reader"
        )


class File(_Writer):
    """Writes to a file, which is opened at each write and may therefore be rotated.

    A full disk or a power loss may leave the beginning of a line; what is sent next then begins on a line of its own.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(self._append_lines, f"{path} takes nothing")
        self._path = path

    def _append_lines(self, lines: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            if _ends_within_line(self._path):
                lines = b"\n" + lines
            _write_all(file.fileno(), lines)
            os.fsync(file.fileno())


def _ends_within_line(path: Path) -> bool:
    """True if the last byte of a regular file is not a line end."""
    size = path.stat().st_size if path.is_file() else 0
    if size == 0:
        return False
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"


class Address:
    """An HTTP address that takes newline-delimited JSON by POST."""

    def __init__(self, url: str, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._transport = transport

    async def take(self, lines: bytes) -> None:
        """See `Sink`."""
        transport = self._transport or async_direct_transport(self._url)
        async with httpx2.AsyncClient(timeout=30.0, transport=transport) as http:
            response = await http.post(
                self._url, content=lines, headers={"Content-Type": "application/x-ndjson"}
            )
            if response.is_client_error and response.status_code not in SINK_STATUSES:
                raise Refused(response.status_code)
            response.raise_for_status()


def sink_of(setting: str) -> Sink:
    """The sink that the setting `ship_logs` names: `stdout`, an http(s) address, or the path of a file."""
    if setting == "stdout":
        return StandardOutput()
    if setting.startswith(("http://", "https://")):
        return Address(setting)
    return File(Path(setting).expanduser())


class Shipper:
    """Sends new lines of all logs to one sink, again and again."""

    def __init__(
        self, database: Database, logs: Path, sink: Sink, *, interval: float = INTERVAL
    ) -> None:
        self._database = database
        self._logs = logs
        self._sink = sink
        self._interval = interval
        self._largest = LARGEST
        self._first_key = NONE
        """The next round starts after this log: a log that ends rounds is then not always the first."""
        self._taken_bytes = 0
        """Bytes of logs that the sink has taken since this process started."""
        self._refused_logs: dict[tuple[int, int], tuple[float, Backoff]] = {}
        """Logs that the sink refuses while it takes others: the monotonic time until which each waits, and its backoff."""
        self._warned_of_left_out = False

    async def run(self) -> None:
        """Ship until cancelled. A sink that takes nothing is logged once, and tried again less and less often."""
        backoff, failing = self._backoff(), False
        while True:
            pause = self._interval
            try:
                await self.round()
                if failing:
                    logger.info("logs are taken again")
                failing = False
                backoff.reset()
            except (*AWAY, Refused, RunError) as error:
                if not failing:
                    logger.warning(
                        "logs are not taken: %s; nothing is lost, it is tried again", error
                    )
                failing, pause = True, backoff.next()
            await asyncio.sleep(pause)

    def _backoff(self) -> Backoff:
        return Backoff(2 * self._interval, LONGEST_PAUSE, low=1.0)

    async def round(self) -> int:
        """Send all lines that are available now. Returns how many bytes of logs they were."""
        taken_before, seen_keys = self._taken_bytes, set[tuple[int, int]]()
        refusals: dict[tuple[int, int], Refused] = {}
        async for log in self._all_behind():
            seen_keys.add(log.key)
            if log.key in self._refused_logs and time.monotonic() < self._refused_logs[log.key][0]:
                continue
            try:
                await self._ship(log)
                self._refused_logs.pop(log.key, None)
            except Refused as error:
                refusals[log.key] = error
                new_refusals = refusals.keys() - self._refused_logs.keys()
                if self._taken_bytes == taken_before and len(new_refusals) >= REFUSED_IN_A_ROW:
                    break
            except AWAY:
                self._first_key = log.key
                raise
        self._pause_refused(refusals, seen_keys, nothing_taken=self._taken_bytes == taken_before)
        return self._taken_bytes - taken_before

    async def _all_behind(self) -> AsyncIterator[UnshippedLog]:
        """Yield each log with unsent bytes once, in order, starting after the log at which the last round ended."""
        first, self._first_key = self._first_key, NONE
        for start, end in ((first, LAST), (NONE, first)):
            if start == end:
                break
            while batch := await self._database.read_in_thread(
                partial(_logs_behind, start=start, end=end)
            ):
                for log in batch:
                    yield log
                start = batch[-1].key

    def _pause_refused(
        self,
        refusals: Mapping[tuple[int, int], Refused],
        seen_keys: Set[tuple[int, int]],
        *,
        nothing_taken: bool,
    ) -> None:
        """After a whole round, pause the refused logs. Raises Refused if nothing was taken: then the sink seems to be the cause."""
        new_refusals = {
            key: error for key, error in refusals.items() if key not in self._refused_logs
        }
        if new_refusals and nothing_taken:
            self._first_key, error = next(reversed(new_refusals.items()))
            raise error
        for (epoch, rank), error in new_refusals.items():
            logger.warning(
                "of the log of attempt %d, rank %d, nothing is taken (%s), not even that a line was left out; it waits, the others do not",
                epoch,
                rank,
                error,
            )
        self._refused_logs = {
            key: pause for key, pause in self._refused_logs.items() if key in seen_keys
        }
        for key in refusals:
            backoff = self._refused_logs[key][1] if key in self._refused_logs else self._backoff()
            self._refused_logs[key] = time.monotonic() + backoff.next(), backoff

    async def _ship(self, log: UnshippedLog) -> None:
        """Send all available lines of one log."""
        while log.shipped < log.available:
            lines, end = await asyncio.to_thread(_read_lines, self._logs, log)
            if end == log.shipped:
                break
            if lines:
                await self._ship_lines(log, lines)
            else:
                await self._store_position(log, log.shipped, end)
            log = replace(log, shipped=end)

    async def _ship_lines(self, log: UnshippedLog, lines: Sequence[_LogLine]) -> None:
        """Send these lines, in halves if they are too many or refused; the second half follows the first, to keep the order."""
        if await self._is_taken(log, lines):
            await self._store_position(log, lines[0].begin, lines[-1].end)
            return
        half = len(lines) // 2
        await self._ship_lines(log, lines[:half])
        await self._ship_lines(log, lines[half:])

    async def _is_taken(self, log: UnshippedLog, lines: Sequence[_LogLine]) -> bool:
        """True once the lines are taken. A single line always is, if only as a note that it was left out."""
        size = sum(len(line.encoded) for line in lines)
        if size > self._largest and len(lines) > 1:
            return False
        try:
            await self._sink.take(b"".join(line.encoded for line in lines))
        except Refused as error:
            if error.status == TOO_LARGE:
                self._largest = min(self._largest, max(size // 2, LEAST))
            if len(lines) > 1:
                return False
            line = lines[0]
            note = f"[{line.end - line.begin} bytes are left out here: {error}]"
            await self._sink.take(_encode_line(log, line.begin, note, left_out=str(error)))
            if not self._warned_of_left_out:
                logger.warning(
                    "where logs are sent a line of %s was refused (%s): it is left out there, "
                    "and `left_out` says so, as of all further ones",
                    log.job_id,
                    error,
                )
            self._warned_of_left_out = True
        return True

    async def _store_position(self, log: UnshippedLog, begin: int, end: int) -> None:
        def move(session: Session) -> None:
            """Store the position. It never moves back: another process may have sent more meanwhile."""
            session.execute(
                update(Member)
                .where(Member.epoch == log.epoch, Member.rank == log.rank)
                .where(Member.log_shipped < end)
                .values(log_shipped=end)
            )

        await self._database.in_thread(move)
        self._taken_bytes += end - begin


def _logs_behind(
    session: Session, start: tuple[int, int], end: tuple[int, int]
) -> list[UnshippedLog]:
    query = (
        select(Member, Attempt, Job.project)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .join(Job, Job.job_id == Attempt.job_id)
        .where(Member.log_shipped < Member.log_offset)
        .where(tuple_(Member.epoch, Member.rank) > tuple_(*map(literal, start)))
        .where(tuple_(Member.epoch, Member.rank) <= tuple_(*map(literal, end)))
        .order_by(Member.epoch, Member.rank)
        .limit(MEMBERS_AT_ONCE)
    )
    return [
        UnshippedLog(
            job_id=attempt.job_id,
            project=project,
            epoch=member.epoch,
            rank=member.rank,
            vm_id=member.vm_id,
            shipped=member.log_shipped,
            available=member.log_offset,
            has_ended=attempt.state == AttemptState.ENDED,
        )
        for member, attempt, project in session.execute(query)
    ]


def _read_lines(logs: Path, log: UnshippedLog) -> tuple[list[_LogLine], int]:
    """The lines that can be sent, and the offset after them. A pruned log has no lines and counts as sent."""
    data = b""
    with (
        contextlib.suppress(FileNotFoundError),
        log_path(logs, log.job_id, log.epoch, log.rank).open("rb") as file,
    ):
        data = os.pread(file.fileno(), min(PIECE, log.available - log.shipped), log.shipped)
    if not data:
        return [], log.available
    is_complete = log.has_ended and log.shipped + len(data) == log.available
    lines: list[_LogLine] = []
    for offset, part in _split_lines(data, is_complete):
        begin = log.shipped + offset
        text = part.decode("utf-8", "replace").removesuffix("\n")
        lines.append(_LogLine(begin, begin + len(part), _encode_line(log, begin, text)))
    return lines, lines[-1].end if lines else log.shipped


def _split_lines(data: bytes, is_complete: bool) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line, including its line end. The last line may lack one only if nothing follows, or it is too long."""
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin, begin + LONGEST) + 1
        if not end:
            if len(data) - begin < LONGEST and not is_complete:
                return
            end = min(begin + LONGEST, len(data))
        yield begin, data[begin:end]
        begin = end


def _encode_line(log: UnshippedLog, offset: int, line: str, **fields: str) -> bytes:
    document = {
        "job_id": log.job_id,
        "project": log.project,
        "epoch": log.epoch,
        "rank": log.rank,
        "vm_id": log.vm_id,
        "offset": offset,
        "line": line,
        **fields,
    }
    return json.dumps(document).encode() + b"\n"
