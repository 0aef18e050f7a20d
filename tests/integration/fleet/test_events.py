"""Readers of events and those who write them at once.

1. What was committed after a higher number is neither skipped nor handed out twice.
2. What was rolled back holds nobody up.
3. Under many writers a reader sees every event that was committed, once, in order, while they write.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from groupwise.fleet.store.database import Database
from tests.unit.fleet.store.test_events import *  # noqa: F403
from tests.unit.fleet.store.test_events import happens, read


class Late:
    """A transaction that does its work and commits, or is undone, when it is told to."""

    def __init__(self, database: Database, savepoint: bool = False) -> None:
        self.event_id = 0
        self._written, self._end = threading.Event(), threading.Event()
        self._undo = False
        self._thread = threading.Thread(target=self._run, args=(database, savepoint))
        self._thread.start()
        assert self._written.wait(10)

    def _run(self, database: Database, savepoint: bool) -> None:
        def write(session: Session) -> None:
            if savepoint:
                with session.begin_nested() as nested:
                    happens()(session)
                    nested.rollback()
            self.event_id = happens()(session)
            self._written.set()
            assert self._end.wait(10)
            if self._undo:
                raise InterruptedError

        try:
            database.run(write)
        except InterruptedError:
            assert self._undo

    def end(self, undo: bool = False) -> None:
        """A second time does nothing."""
        self._undo = undo
        self._end.set()
        self._thread.join()

    def __enter__(self) -> "Late":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("savepoint", [False, True])
def test_who_commits_late_is_not_skipped(database: Database, savepoint: bool, first: bool) -> None:
    """And what was undone holds nobody up."""
    before = [] if first else [database.run(happens())]
    with Late(database, savepoint) as late:
        early = database.run(happens())
        assert early > late.event_id
        assert read(database) == before
        late.end()
        assert read(database) == [*before, late.event_id, early]
    with Late(database) as other:
        last = database.run(happens())
        assert last not in read(database)
        other.end(undo=True)
        assert read(database) == [*before, late.event_id, early, last]


def write_many(database: Database, number: int, times: int) -> None:
    """Transactions of several events that take their time; every fifth is undone."""
    chance = random.Random(number)

    def transaction(session: Session, undo: bool) -> None:
        for _ in range(chance.randint(1, 3)):
            happens(job_id=f"j{number}")(session)
            session.execute(text(f"SELECT pg_sleep({chance.random() * 0.005})"))
        if undo:
            raise InterruptedError

    for _ in range(times):
        with suppress(InterruptedError):
            database.run(partial(transaction, undo=chance.random() < 0.2))


def follow(database: Database, until: threading.Event) -> list[int]:
    """What a reader sees who keeps his place, until nobody writes any more."""
    seen: list[int] = []
    last_look = False
    while True:
        found = read(database, seen[-1] if seen else 0, limit=7)
        seen.extend(found)
        if not found and last_look:
            return seen
        last_look = until.is_set()


def test_a_reader_beside_many_writers(database: Database) -> None:
    writers, times = 6, 20
    written = threading.Event()
    with ThreadPoolExecutor(writers + 1) as threads:
        reader = threads.submit(follow, database, written)
        for work in [threads.submit(write_many, database, n, times) for n in range(writers)]:
            work.result()
        written.set()
    there = database.read(
        lambda s: list(s.scalars(text("SELECT event_id FROM events ORDER BY event_id")))
    )
    assert len(there) > writers * times
    assert reader.result() == there
