"""Shipping of log lines: each at least once, none before it is complete."""

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.files.log_shipping import (
    LONGEST,
    Address,
    File,
    Shipper,
    StandardOutput,
    sink_of,
)
from groupwise.jobs.fleet.files.logs import append, make
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import VM, Attempt, Job, Member
from tests.disks import fill, small_disk
from tests.processes import wait_until_async


class Taken:
    """A sink that keeps what it takes, and may refuse."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.refuses = 0

    async def take(self, lines: bytes) -> None:
        if self.refuses:
            self.refuses -= 1
            raise OSError("the disk is full")
        self.lines += [json.loads(line) for line in lines.splitlines()]

    def said(self) -> list[str]:
        return [line["line"] for line in self.lines]


class Log:
    """A log of an attempt that a dispatcher is bringing here."""

    def __init__(self, database: Database, logs: Path, job: str = "job-a", epoch: int = 1) -> None:
        self._database = database
        self._path = make(logs, job, epoch)
        self._epoch = epoch

        def begin(session: Session) -> None:
            if session.get(VM, "vm-1") is None:
                session.execute(insert(VM).values(vm_id="vm-1"))
            session.execute(insert(Job).values(job_id=job))
            session.execute(
                insert(Attempt).values(
                    epoch=epoch, job_id=job, generation=0, number=0, created_at=0.0
                )
            )
            session.execute(insert(Member).values(epoch=epoch, rank=0, vm_id="vm-1"))

        database.run(begin)

    def write(self, data: bytes) -> None:
        offset = append(self._path, self._path.stat().st_size, data)
        here = update(Member).where(Member.epoch == self._epoch).values(log_offset=offset)
        self._database.run(lambda session: session.execute(here))

    def end(self) -> None:
        over = update(Attempt).where(Attempt.epoch == self._epoch)
        ended = over.values(state="ended", outcome="void")
        self._database.run(lambda session: session.execute(ended))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


async def test_whole_lines_are_sent_once_with_where_they_stand(
    database: Database, logs: Path
) -> None:
    log, sink = Log(database, logs), Taken()
    shipper = Shipper(database, logs, sink)
    log.write(b"one\ntwo\nthr")
    await shipper.round()
    assert sink.said() == ["one", "two"]
    log.write(b"ee\n")
    await shipper.round()
    await shipper.round()
    assert sink.said() == ["one", "two", "three"]
    assert [line["offset"] for line in sink.lines] == [0, 4, 8]
    about = {"job_id": "job-a", "project": "default", "epoch": 1, "rank": 0, "vm_id": "vm-1"}
    assert sink.lines[0] == {**about, "offset": 0, "line": "one"}
    log.write(b"x" * (2 * LONGEST + 5) + b"\n\xff\xfe\n")
    await shipper.round()
    assert [len(line) for line in sink.said()[3:]] == [LONGEST, LONGEST, 5, 2]
    assert sink.said()[-1] == "\ufffd\ufffd"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its ends for reading and for writing."""
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


async def test_every_sink_takes_lines(tmp_path: Path, pipe: tuple[int, int]) -> None:
    await StandardOutput(lambda: pipe[1]).take(b"{}\n")
    file = File(tmp_path / "lines.jsonl")
    await file.take(b"1\n")
    await file.take(b"2\n")
    posted: list[bytes] = []

    async def answer(request: httpx2.Request) -> httpx2.Response:
        posted.append(await request.aread())
        return httpx2.Response(200 if len(posted) == 1 else 503)

    address = Address("http://logs.example/in", httpx2.MockTransport(answer))
    await address.take(b"3\n")
    with pytest.raises(httpx2.HTTPStatusError):
        await address.take(b"4\n")
    assert os.read(pipe[0], 100) == b"{}\n"
    assert (tmp_path / "lines.jsonl").read_bytes() == b"1\n2\n"
    assert posted == [b"3\n", b"4\n"]
    names = {"stdout": StandardOutput, "https://logs.example/in": Address, "~/logs.jsonl": File}
    assert {name: type(sink_of(name)) for name in names} == names


async def test_lines_after_a_full_disk_stand_whole(
    database: Database, logs: Path, tmp_path: Path
) -> None:
    """The disk takes a part of them; they are sent again, and none is glued to that part."""
    log = Log(database, logs)
    texts = [f"{number} {'x' * 1000}" for number in range(20)]
    log.write("".join(f"{text}\n" for text in texts).encode())
    with small_disk(tmp_path / "disk", "1m") as disk:
        file = disk / "lines.jsonl"
        shipper = Shipper(database, logs, File(file))
        ballast = fill(disk, leave=8192)
        with pytest.raises(OSError, match="No space"):
            await shipper.round()
        assert not file.read_bytes().endswith(b"\n"), "a part of a line is there"
        ballast.unlink()
        await shipper.round()
        lines = file.read_bytes().splitlines()
    whole = [json.loads(line)["line"] for line in lines if line.endswith(b"}")]
    assert whole[-len(texts) :] == texts


class Posted:
    """An address that answers as `refuses` says to the bytes of a post; None: it takes them."""

    def __init__(self, refuses: Callable[[bytes], int | None]) -> None:
        self.refuses = refuses
        self.posts: list[bytes] = []
        self.lines: list[dict[str, Any]] = []

    def sink(self) -> Address:
        return Address("http://logs.example/in", httpx2.MockTransport(self._answer))

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.posts.append(request.content)
        status = self.refuses(request.content)
        if status is None:
            self.lines += [json.loads(line) for line in request.content.splitlines()]
        return httpx2.Response(status or 200)

    def said(self, job: str) -> list[str]:
        return [line["line"] for line in self.lines if line["job_id"] == job]


@pytest.mark.parametrize("status", [403, 413])
async def test_a_line_that_is_refused_alone_is_left_out_and_its_place_says_so(
    database: Database, logs: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    Log(database, logs, "odd", 1).write(b"one\nbad\nthree\nfour\nbad\n")
    Log(database, logs, "fine", 2).write(b"one\n")
    posted = Posted(lambda content: status if b'"bad"' in content else None)
    assert await Shipper(database, logs, posted.sink()).round() == 27
    left_out = f"[4 bytes are left out here: HTTP {status}]"
    assert posted.said("odd") == ["one", left_out, "three", "four", left_out]
    assert [line.get("left_out") for line in posted.lines[:3]] == [None, f"HTTP {status}", None]
    assert [line["offset"] for line in posted.lines[:5]] == [0, 4, 8, 14, 19]
    assert posted.said("fine") == ["one"]
    assert len(caplog.records) == 1


async def test_a_log_of_which_nothing_is_taken_waits_and_the_others_continue(
    database: Database, logs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused, fine = Log(database, logs, "refused", 1), Log(database, logs, "fine", 2)
    posted = Posted(lambda content: 403 if b'"refused"' in content else None)
    shipper = Shipper(database, logs, posted.sink(), interval=0.05)
    refused.write(b"one\ntwo\n")
    for number in range(3):
        fine.write(b"%d\n" % number)
        await shipper.round()
    assert posted.said("fine") == ["0", "1", "2"]
    assert len(caplog.records) == 1
    assert "attempt 1, rank 0" in caplog.text
    posted.refuses = lambda _: None
    async with asyncio.timeout(20):
        while not posted.said("refused"):
            await asyncio.sleep(0.01)
            await shipper.round()
    assert posted.said("refused") == ["one", "two"]


async def test_unread_output_blocks_nothing_and_is_not_lost(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("groupwise.jobs.fleet.files.log_shipping.TAKEN", 0.01)
    reading, writing = pipe

    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 4096)
    data = b"".join(b"%d\n" % number for number in range(50_000))
    took = asyncio.create_task(StandardOutput(lambda: writing).take(data))
    await wait_until_async(lambda: caplog.records)  # the loop goes on: this is what is tested
    assert "standard output has no reader" in caplog.text
    assert not took.done()
    read = asyncio.create_task(asyncio.to_thread(_read, reading, len(data)))
    await took
    assert await read == data
    assert len(caplog.records) == 1


def _read(end: int, size: int) -> bytes:
    found = b""
    while len(found) < size and (piece := os.read(end, 1 << 16)):
        found += piece
    return found
