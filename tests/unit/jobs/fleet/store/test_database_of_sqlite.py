"""Transactions that are special to SQLite: other processes that write, files that are no databases, a disk that fails."""

import sqlite3
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.store.database import CommitUnknown, Database, DatabaseFailure, connect
from groupwise.jobs.fleet.store.engine import LOCK_SECONDS, parse
from tests.unit.jobs.fleet.store.test_database import names, put


class Naps:
    """In place of sleeping."""

    def __init__(self, then: Callable[[int], object] | None = None) -> None:
        self.taken: list[float] = []
        self._then = then

    def __call__(self, pause: float) -> None:
        self.taken.append(pause)
        if self._then:
            self._then(len(self.taken))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database with one table, whose users do not wait for each other."""
    path = tmp_path / "busy.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cursors (name TEXT PRIMARY KEY, position INTEGER)")
    connection.close()
    return path


def impatient(path: Path, naps: Naps, monkeypatch: pytest.MonkeyPatch) -> Database:
    monkeypatch.setattr("groupwise.jobs.fleet.store.engine.BUSY_SECONDS", 0)
    return Database(parse(f"sqlite:///{path}"), sleep=naps)


def test_a_busy_database_is_tried_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    def end_at_last(naps: int) -> None:
        if naps == 5:
            other.execute("COMMIT")

    naps = Naps(end_at_last)
    database = impatient(file, naps, monkeypatch)
    try:
        database.run(put("a"))
        assert database.read(names) == ["a"]
    finally:
        database.close()
        other.close()
    assert len(naps.taken) == 5
    assert all(0 <= nap <= 0.01 * 2**n for n, nap in enumerate(naps.taken))
    assert len(set(naps.taken)) == 5


def test_a_wait_for_a_lock_is_repeated(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it takes as long as PostgreSQL lets a transaction wait."""
    clock = SimpleNamespace(monotonic=count(step=LOCK_SECONDS).__next__)
    monkeypatch.setattr("groupwise.jobs.fleet.store.database.time", clock)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    database = impatient(file, Naps(lambda _: other.execute("COMMIT")), monkeypatch)
    try:
        database.run(put("a"))
        assert database.read(names) == ["a"]
    finally:
        database.close()
        other.close()


def test_a_writing_transaction_takes_its_lock_before_it_reads(file: Path) -> None:
    """A transaction that only reads lets others write."""
    database = connect(f"sqlite:///{file}")
    other = sqlite3.connect(file, isolation_level=None, timeout=0)

    def another_writes(session: Session) -> None:
        names(session)
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")

    try:
        database.read(another_writes)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            database.run(another_writes)
    finally:
        database.close()
        other.close()


def test_patience_ends(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.jobs.fleet.store.database.RETRY_TIMEOUT", 0.05)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    database = impatient(file, Naps(), monkeypatch)
    try:
        with pytest.raises(DatabaseFailure, match=r"busy.*locked.*end that") as raised:
            database.run(put("a"))
        assert raised.value.temporary
    finally:
        database.close()
        other.close()


def test_a_failed_write_at_commit_is_no_answer(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite cannot say whether the disk will show the last frames after a crash."""
    broken = sqlite3.OperationalError("disk I/O error")
    broken.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC

    def commit(_: object) -> None:
        raise broken

    monkeypatch.setattr(database.engine.dialect, "do_commit", commit)
    with pytest.raises(CommitUnknown, match="there or not"):
        database.run(put("a"))
    broken.sqlite_errorcode = sqlite3.SQLITE_FULL
    broken.args = ("database or disk is full",)
    with pytest.raises(DatabaseFailure, match=r"disk of \S+ is full"):
        database.run(put("a"))
