"""Transactions of a fleet. `tests/integration/fleet/test_database.py` has the same of PostgreSQL, and what only a server can do to them."""

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.synchronize import Event

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.store.database import (
    Database,
    connect,
    on_commit,
)
from groupwise.jobs.fleet.store.tables import Cursor


def put(name: str, position: int = 0) -> Callable[[Session], None]:
    return lambda session: session.add(Cursor(name=name, position=position))


def names(session: Session) -> list[str]:
    return sorted(session.scalars(text("SELECT name FROM cursors")))


def add_one(session: Session) -> None:
    """Reads, and writes what it made of it: the transaction that loses updates if anything does."""
    cursor = session.get(Cursor, "counter", with_for_update=True)
    assert cursor is not None
    cursor.position += 1


def position(database: Database) -> int:
    return database.read(lambda s: s.execute(text("SELECT position FROM cursors")).scalar_one())


def count_up(url: str, times: int, begun: Event) -> None:
    database = connect(url)
    try:
        begun.set()
        for _ in range(times):
            database.run(add_one)
    finally:
        database.close()


# --- one transaction ------------------------------------------------------------------------------


def test_an_error_undoes_everything(database: Database) -> None:
    def fails(session: Session) -> None:
        session.add(Cursor(name="a"))
        session.flush()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        database.run(fails)
    assert database.read(names) == []
    database.run(put("a"))


def test_a_look_changes_nothing(database: Database) -> None:
    with pytest.raises(Exception, match=r"read-?only"):
        database.read(lambda s: s.execute(text("INSERT INTO cursors (name) VALUES ('a')")))
    database.run(put("b"))
    assert database.read(names) == ["b"]


def test_a_look_sees_one_moment(database: Database) -> None:
    database.run(put("a"))

    def look(session: Session) -> tuple[list[str], list[str]]:
        first = names(session)
        writer = threading.Thread(target=database.run, args=(put("b"),))
        writer.start()
        writer.join()
        return first, names(session)

    assert database.read(look) == (["a"], ["a"])
    assert database.read(names) == ["a", "b"]


def test_a_transaction_within_another_is_refused(database: Database) -> None:
    with pytest.raises(AssertionError, match="pass the session on"):
        database.run(lambda _: database.run(names))
    with pytest.raises(AssertionError, match="pass the session on"):
        database.run(lambda _: database.read(names))
    database.run(names)


# --- after the commit -----------------------------------------------------------------------------


def test_hooks_follow_the_commit_and_one_that_fails_is_no_failed_transaction(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[str]] = []

    def fails() -> None:
        raise OSError("nobody listens")

    def write(session: Session) -> None:
        session.add(Cursor(name="a"))
        on_commit(session, fails)
        on_commit(session, lambda: seen.append(database.read(names)))
        assert seen == []

    def undone(session: Session) -> None:
        on_commit(session, lambda: seen.append([]))
        raise ValueError("no")

    database.run(write)
    assert seen == [["a"]]
    assert "follow a commit failed" in caplog.text
    with pytest.raises(ValueError, match="no"):
        database.run(undone)
    database.run(names)
    assert len(seen) == 1


# --- many -----------------------------------------------------------------------------------------


def test_processes_lose_no_update(database: Database) -> None:
    database.run(put("counter"))
    url = database.engine.url.render_as_string(hide_password=False)
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=count_up, args=(url, 25, begun))
    process.start()
    assert begun.wait(60)
    here = 0
    while process.is_alive():
        database.run(add_one)
        here += 1
    process.join()
    assert process.exitcode == 0
    assert position(database) == here + 25


# --- threads --------------------------------------------------------------------------------------


async def test_a_cancelled_task_waits_for_its_transaction(database: Database) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def write(session: Session) -> None:
        session.add(Cursor(name="a"))
        begun.set()
        assert go_on.wait(10)

    task = asyncio.ensure_future(database.in_thread(write))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert database.read(names) == ["a"]
