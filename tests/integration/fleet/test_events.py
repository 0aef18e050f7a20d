"""Readers and writers of events at the same time.

1. What was committed after a higher number is neither skipped nor handed out twice.
2. What was rolled back holds nobody up.
"""

import threading

import pytest
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.store.database import Database
from tests.unit.jobs.fleet.store.test_events import *  # noqa: F403
from tests.unit.jobs.fleet.store.test_events import happens, read


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
def test_events_of_a_late_commit_are_not_skipped(
    database: Database, savepoint: bool, first: bool
) -> None:
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
