"""Lines of logs, sent on as JSON lines: to standard output, a file or an HTTP address, for whoever gathers the logs of a whole company.

What a dispatcher has brought to this disk is read line by line and given to a `Sink`; how far that has come stands with the member of the
attempt (`attempt_members.log_shipped`) and is moved only when the sink has taken the lines. So each line is sent at least once, and where
it is sent twice, job, epoch, rank and offset are the same.

A line is sent when its end is there, or its attempt is over. One that is longer than `LONGEST` is sent in pieces.

Nothing else waits for a sink: what standard output or a file does not take is written by a thread of its own, for which neither the other
tasks of the process wait nor its end. Lines that have not been taken then are sent by the next process.
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from select import POLLOUT, poll
from typing import Protocol

import httpx2
from sqlalchemy import literal, select, tuple_, update
from sqlalchemy.orm import Session

from groupwise.errors import RunError
from groupwise.fleet.files.logs import log_path
from groupwise.fleet.states import AttemptState
from groupwise.fleet.store.database import Database
from groupwise.fleet.store.tables import Attempt, Job, Member

INTERVAL = 1.0
"""Seconds between two looks."""
LONGEST_PAUSE = 60.0
"""Seconds until a sink that does not take anything is asked again."""
MEMBERS_AT_ONCE = 200
PIECE = 1 << 20
"""Bytes of one log that are read at a time."""
LONGEST = 64 * 1024
"""Bytes of a line that are sent as one."""
TAKEN = 30.0
"""Seconds after which it is told that standard output or a file takes nothing."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Behind:
    """A log of which more is here than has been sent."""

    job_id: str
    project: str
    epoch: int
    rank: int
    vm_id: str
    sent: int
    """Bytes."""
    here: int
    over: bool
    """Nothing will be added."""


class Sink(Protocol):
    """Takes lines, each a JSON object and a line end."""

    async def take(self, lines: bytes) -> None:
        """Once this returns they are taken. Raises OSError, httpx2.HTTPError or httpx2.InvalidURL where they are not."""
        ...


_ONE_WRITES = threading.Lock()
"""Where its role was begun anew, the writer of before may still have some lines to end."""


class _Writer:
    """Writes one thing after the other in a thread that may stand still for ever; asyncio's own threads are waited for at the end."""

    def __init__(self, write: Callable[[bytes], None], stalled: str) -> None:
        """`stalled`: what is said, once each time, when it stands still."""
        self._write = write
        self._stalled = stalled
        self._given: queue.SimpleQueue[tuple[bytes, Future[None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def write(self, lines: bytes) -> None:
        """Returns when it is written. Who gives up waiting gets it written all the same, sooner or later."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="log-shipping", daemon=True)
            self._thread.start()
        done: Future[None] = Future()
        self._given.put((lines, done))
        waiting = asyncio.wrap_future(done)
        try:
            await asyncio.wait((waiting,), timeout=TAKEN)
            if not waiting.done():
                logger.warning("%s; lines of logs wait meanwhile, none is lost", self._stalled)
            await waiting
        finally:
            waiting.cancel()

    def _work(self) -> None:
        while True:
            lines, done = self._given.get()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                with _ONE_WRITES:
                    self._write(lines)
            except Exception as error:  # noqa: BLE001 - whoever waits for it raises it
                done.set_exception(error)
            else:
                done.set_result(None)


def _write_all(descriptor: int, lines: bytes) -> None:
    view = memoryview(lines)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # whoever else has it open does not want to wait for it
            ready = poll()
            ready.register(descriptor, POLLOUT)
            ready.poll()


def _own_output() -> int:
    """Not by its buffer, which Python waits for at the end. One that was closed may be anything by now, even the database."""
    if sys.__stdout__ is None:
        raise OSError("this process was begun without a standard output")
    return sys.__stdout__.fileno()


class StandardOutput:
    """Of this process."""

    def __init__(self, descriptor: Callable[[], int] = _own_output) -> None:
        self._descriptor = descriptor
        self._writer = _Writer(self._write, "nobody reads standard output")

    async def take(self, lines: bytes) -> None:
        """See `Sink`."""
        await self._writer.write(lines)

    def _write(self, lines: bytes) -> None:
        _write_all(self._descriptor(), lines)


class File:
    """Opened anew each time, so that it may be rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = _Writer(self._append, f"{path} takes nothing")

    async def take(self, lines: bytes) -> None:
        """See `Sink`."""
        await self._writer.write(lines)

    def _append(self, lines: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            _write_all(file.fileno(), lines)
            os.fsync(file.fileno())


class Address:
    """An HTTP address that takes newline-delimited JSON by POST."""

    def __init__(self, url: str, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._transport = transport

    async def take(self, lines: bytes) -> None:
        """See `Sink`."""
        async with httpx2.AsyncClient(timeout=30.0, transport=self._transport) as http:
            answer = await http.post(
                self._url, content=lines, headers={"Content-Type": "application/x-ndjson"}
            )
            answer.raise_for_status()


def sink_of(word: str) -> Sink:
    """What the setting `ship_logs` names: `stdout`, an http(s) address, or the path of a file."""
    if word == "stdout":
        return StandardOutput()
    if word.startswith(("http://", "https://")):
        return Address(word)
    return File(Path(word).expanduser())


class Shipper:
    """Sends what is there to one sink, again and again."""

    def __init__(
        self, database: Database, logs: Path, sink: Sink, *, interval: float = INTERVAL
    ) -> None:
        self._database = database
        self._logs = logs
        self._sink = sink
        self._interval = interval

    async def run(self) -> None:
        """For ever. A sink that does not take anything is told once, and asked again less and less often."""
        pause = self._interval
        while True:
            try:
                await self.round()
                if pause > self._interval:
                    logger.info("logs are taken again")
                pause = self._interval
            except (OSError, httpx2.HTTPError, httpx2.InvalidURL, RunError) as error:
                if pause == self._interval:
                    logger.warning(
                        "logs are not taken: %s; nothing is lost, it is tried again", error
                    )
                pause = min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def round(self) -> int:
        """Send all that is there now; how many bytes of logs that was."""
        total, last = 0, (0, -1)
        while behind := await self._database.read_in_thread(partial(_behind, after=last)):
            for log in behind:
                total += await self._send(log)
            last = behind[-1].epoch, behind[-1].rank
        return total

    async def _send(self, log: Behind) -> int:
        """All of one log that can be sent; how many bytes of it."""
        begin = log.sent
        while log.sent < log.here:
            lines, end = await asyncio.to_thread(_lines, self._logs, log)
            if end == log.sent:
                break
            if lines:
                await self._sink.take(lines)
            await self._database.in_thread(partial(_moved, log=log, end=end))
            log = replace(log, sent=end)
        return log.sent - begin


def _behind(session: Session, after: tuple[int, int]) -> list[Behind]:
    query = (
        select(Member, Attempt, Job.project)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .join(Job, Job.job_id == Attempt.job_id)
        .where(Member.log_shipped < Member.log_offset)
        .where(tuple_(Member.epoch, Member.rank) > tuple_(*map(literal, after)))
        .order_by(Member.epoch, Member.rank)
        .limit(MEMBERS_AT_ONCE)
    )
    return [
        Behind(
            job_id=attempt.job_id,
            project=project,
            epoch=member.epoch,
            rank=member.rank,
            vm_id=member.vm_id,
            sent=member.log_shipped,
            here=member.log_offset,
            over=attempt.state == AttemptState.ENDED,
        )
        for member, attempt, project in session.execute(query)
    ]


def _moved(session: Session, log: Behind, end: int) -> None:
    """Forwards only: another one may have sent more meanwhile."""
    session.execute(
        update(Member)
        .where(Member.epoch == log.epoch, Member.rank == log.rank, Member.log_shipped < end)
        .values(log_shipped=end)
    )


def _lines(logs: Path, log: Behind) -> tuple[bytes, int]:
    """The lines that can be sent, and the offset behind them. A log that was pruned has none, and is done with."""
    data = b""
    with (
        contextlib.suppress(FileNotFoundError),
        log_path(logs, log.job_id, log.epoch, log.rank).open("rb") as file,
    ):
        data = os.pread(file.fileno(), min(PIECE, log.here - log.sent), log.sent)
    if not data:
        return b"", log.here
    whole = log.over and log.sent + len(data) == log.here
    parts = list(_split(data, whole))
    told = b"".join(_told(log, log.sent + offset, part) for offset, part in parts)
    return told, log.sent + sum(len(part) for _, part in parts)


def _split(data: bytes, whole: bool) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line, its end included; the last without one only where nothing follows, or it is too long."""
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin, begin + LONGEST) + 1
        if not end:
            if len(data) - begin < LONGEST and not whole:
                return
            end = min(begin + LONGEST, len(data))
        yield begin, data[begin:end]
        begin = end


def _told(log: Behind, offset: int, line: bytes) -> bytes:
    document = {
        "job_id": log.job_id,
        "project": log.project,
        "epoch": log.epoch,
        "rank": log.rank,
        "vm_id": log.vm_id,
        "offset": offset,
        "line": line.decode("utf-8", "replace").removesuffix("\n"),
    }
    return json.dumps(document).encode() + b"\n"
