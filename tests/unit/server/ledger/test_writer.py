"""The contract of the ledger's one thread.

1. A caller is resolved after the commit of its batch, never before.
2. Operations that wait together are committed together; the commit is named after those that changed something.
3. An operation that raises is undone alone.
4. A commit that fails fails all of its batch, keeps nothing of it, and does not stop the next one.
5. A batch that changed nothing commits nothing; reads see what was committed before.
6. A caller that goes away takes nothing with it.
7. Closing finishes what is queued and refuses the rest.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing

import pytest

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from groupwise.server.ledger.events import add_event, count, counters_of, events_after
from groupwise.server.ledger.file import DiskFull, open_file
from groupwise.server.ledger.writer import Ledger
from tests.disks import fill, small_disk


@pytest.fixture
async def opened(tmp_path):
    opened = Ledger.open(tmp_path / "server.db")
    yield opened
    await opened.close()


@pytest.fixture
def points(opened, monkeypatch):
    """The crash points that were passed since the ledger was opened."""
    seen = []
    monkeypatch.setattr(atomic_files, "on_write", seen.append)
    return seen


def on_disk(path) -> dict[str, int]:
    """The counters that another connection sees."""
    with closing(sqlite3.connect(path)) as other:
        return dict(other.execute("SELECT name, value FROM counters"))


class Gate:
    """An operation that keeps the thread busy until it is opened, so that others queue up."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, transaction) -> None:
        self.entered.set()
        assert self.opened.wait(60)


async def together(ledger, *calls):
    """What each of the calls comes to when they are queued while the thread is busy, so that they are one batch."""
    gate = Gate()
    first = asyncio.create_task(ledger.do(gate))
    await asyncio.to_thread(gate.entered.wait, 60)
    tasks = [asyncio.create_task(ledger.do(*call)) for call in calls]
    for _ in range(3):
        await asyncio.sleep(0)  # each has queued its operation
    gate.opened.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def fails(transaction) -> None:
    count(transaction, "r", "never")
    raise ValueError("no")


def nothing(transaction) -> str:
    return "nothing"


async def test_a_cancelled_caller_does_not_undo_its_write(opened):
    gate = Gate()
    first = asyncio.create_task(opened.do(gate))
    gone = asyncio.create_task(opened.do(count, "r", "a"))
    await asyncio.to_thread(gate.entered.wait, 60)
    gone.cancel()
    gate.opened.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await gone
    await opened.do(count, "r", "b")
    assert on_disk(opened.path) == {"a": 1, "b": 1}


def refuses(ledger) -> None:
    """Wait until it takes nothing more."""
    with ledger._condition:
        assert ledger._condition.wait_for(lambda: ledger._closing, 60)


async def test_closing_finishes_what_is_queued_and_refuses_the_rest(tmp_path):
    opened, gate = Ledger.open(tmp_path / "server.db"), Gate()
    queued = [asyncio.create_task(opened.do(gate))]
    await asyncio.to_thread(gate.entered.wait, 60)
    queued += [asyncio.create_task(opened.do(count, "r", "a")) for _ in range(1200)]
    await asyncio.sleep(0)
    closing_ = asyncio.create_task(opened.close())
    await asyncio.to_thread(refuses, opened)
    with pytest.raises(StoreError, match="is closed"):
        await opened.do(nothing)
    gate.opened.set()
    await asyncio.gather(*queued)
    await closing_
    await opened.close()
    assert on_disk(tmp_path / "server.db") == {"a": 1200}


async def test_a_full_disk_fails_and_writing_continues_with_room_again(tmp_path):
    with small_disk(tmp_path / "disk", "2m") as disk:
        opened = Ledger.open(disk / "server.db")
        await opened.do(add_event, "r", "before", {})
        ballast = fill(disk)
        outcomes = []
        while not any(isinstance(outcome, DiskFull) for outcome in outcomes):
            data = {"text": "x" * 100_000}  # until the log's own room is used up too
            outcomes += await together(opened, (add_event, "r", "full", data), (count, "r", "a"))
        assert [type(outcome) for outcome in outcomes[-2:]] == [DiskFull, DiskFull]
        told_of = [event for event in outcomes[::2] if isinstance(event, int)]
        stand = await opened.do(events_after, 0, 1000)
        assert [event.id for event in stand] == [1, *told_of]
        ballast.unlink()
        assert await opened.do(add_event, "r", "after", {}) == len(stand) + 1
        await opened.close()
        with closing(open_file(disk / "server.db")) as connection:
            assert connection.execute("SELECT count(*) FROM events").fetchone()[0] == len(stand) + 1


async def test_callers_share_a_commit_and_only_the_failed_one_is_rolled_back(opened, points):
    calls = [(count, "r", f"c{number}") for number in range(40)]
    *results, failed = await together(
        opened, *calls, (add_event, "r", "told", {}), (nothing,), (fails,)
    )
    assert results == [*[None] * 40, 1, "nothing"]
    assert isinstance(failed, ValueError)
    assert points == ["commit:add_event+count:before", "commit:add_event+count:after"]
    assert on_disk(opened.path) == {f"c{number}": 1 for number in range(40)}
    assert await opened.do(counters_of, "r") == on_disk(opened.path)
    with pytest.raises(ValueError, match="no"):
        await opened.do(fails)
    assert len(points) == 2, "what changes nothing is not committed"


async def test_a_caller_gets_its_answer_after_the_commit(opened, monkeypatch):
    waiting, go = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "commit:count:before":
            waiting.set()
            assert go.wait(60)

    monkeypatch.setattr(atomic_files, "on_write", hold)
    task = asyncio.create_task(opened.do(count, "r", "x"))
    await asyncio.to_thread(waiting.wait, 60)
    assert (task.done(), on_disk(opened.path)) == (False, {})
    go.set()
    await task
    assert on_disk(opened.path) == {"x": 1}


async def test_a_failed_commit_fails_everybody_and_nothing_stays(opened, monkeypatch):
    def ends(transaction) -> None:
        transaction.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    results = [await together(opened, (count, "r", "a"), (ends,), (count, "r", "b"))]
    for error in (sqlite3.OperationalError("disk I/O error"), RuntimeError("?")):

        def refuse(name: str, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(atomic_files, "on_write", refuse)
            results.append(await together(opened, (count, "r", "a"), (fails,), (nothing,)))
    kinds = (StoreError, StoreError, RuntimeError)
    assert [[*map(type, each)] for each in results] == [[kind] * 3 for kind in kinds]
    assert on_disk(opened.path) == {}
    await opened.do(count, "r", "b")
    assert on_disk(opened.path) == {"b": 1}
