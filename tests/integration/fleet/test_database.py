"""Transactions against a real PostgreSQL that is killed, cut off and contended for.

1. What was acknowledged is there after `kill -9`; what was said not to be committed is not; what is unknown is said to be.
2. A connection that is lost before COMMIT does no harm: the transaction is repeated, and happens once.
3. A connection that is lost during COMMIT raises `CommitUnknown`, whether it happened or not, and is never repeated.
4. Deadlocks and lost races are begun anew.
5. Time limits and flushing hold for every connection, whatever the server's defaults are.
6. A server that only reads, as one that has become a standby does, cannot be written to: connections that lead there are not kept.
"""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.store.database import (
    CommitUnknown,
    Database,
    DatabaseFailure,
    connect,
)
from groupwise.jobs.fleet.store.engine import parse
from groupwise.jobs.fleet.store.tables import Cursor
from tests.fleet_databases import copied
from tests.postgres import Postgres
from tests.unit.jobs.fleet.store.test_database import *  # noqa: F403
from tests.unit.jobs.fleet.store.test_database import names, put

# --- killed ---------------------------------------------------------------------------------------


@dataclass
class Writer:
    """Writes names until it is told to stop, and remembers what it was told of each."""

    database: Database
    prefix: str
    acknowledged: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])

    def write_until(self, stop: threading.Event) -> None:
        """A name that is taken already would mean that a transaction was repeated which had happened: it would raise."""
        for number in itertools.count():
            if stop.is_set():
                return
            name = f"{self.prefix}{number}"
            try:
                self.database.run(put(name))
                self.acknowledged.append(name)
            except CommitUnknown:
                self.unknown.append(name)
            except DatabaseFailure:
                self.refused.append(name)


def test_kill_9_under_writers(database: Database, postgres: Postgres) -> None:
    writers = [Writer(database, f"{letter}-") for letter in "abcd"]
    stop = threading.Event()

    def more_is_written() -> None:
        before = [len(writer.acknowledged) for writer in writers]
        while any(len(w.acknowledged) < n + 5 for w, n in zip(writers, before, strict=True)):
            assert not any(work.done() for work in works), "a writer gave up"

    with ThreadPoolExecutor(len(writers)) as threads:
        works = [threads.submit(writer.write_until, stop) for writer in writers]
        try:
            for _ in range(2):
                more_is_written()
                postgres.kill()
                postgres.start()
            more_is_written()
        finally:
            stop.set()
        for work in works:
            work.result()
    there = set(database.read(names))
    for writer in writers:
        mine = {name for name in there if name.startswith(writer.prefix)}
        assert {*writer.acknowledged} <= mine <= {*writer.acknowledged, *writer.unknown}


# --- cut off --------------------------------------------------------------------------------------


class Wire:
    """Carries bytes between clients and the server, and cuts the first connection that says `word`: before the server hears it, or
    when it has answered."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.word: bytes | None = None
        self.server_hears = False
        self.cuts = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut_at(self, word: bytes, server_hears: bool = False) -> None:
        self.word, self.server_hears = word, server_hears

    def close(self) -> None:
        _hang_up(self._listener)
        self._threads[0].join()
        _hang_up(*self._sockets)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it has been closed
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                doomed = threading.Event()
                for way in (self._to_server, self._to_client):
                    self._threads.append(
                        threading.Thread(target=way, args=(client, server, doomed))
                    )
                    self._threads[-1].start()

    def _to_server(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event
    ) -> None:
        with suppress(OSError):  # the other side was faster
            while data := client.recv(65536):
                if self.word and self.word in data:
                    self.word = None
                    self.cuts += 1
                    doomed.set()
                    if not self.server_hears:
                        break
                server.sendall(data)
        if not doomed.is_set() or not self.server_hears:
            _hang_up(client, server)

    def _to_client(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event
    ) -> None:
        with suppress(OSError):
            while (data := server.recv(65536)) and not doomed.is_set():
                client.sendall(data)
        _hang_up(client, server)


def _hang_up(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wire(postgres: Postgres) -> Iterator[Wire]:
    carrier = Wire(postgres.port)
    yield carrier
    carrier.close()


@pytest.fixture
def by_wire(
    wire: Wire, database: Database, ready_url: str, postgres: Postgres
) -> Iterator[Database]:
    """The same database, by the wire."""
    carried = connect(ready_url.replace(f":{postgres.port}/", f":{wire.port}/"))
    carried.run(names)
    yield carried
    carried.close()


@pytest.mark.parametrize("server_hears", [False, True])
def test_lost_during_commit(
    wire: Wire, by_wire: Database, database: Database, server_hears: bool
) -> None:
    calls: list[Session] = []

    def write(session: Session) -> None:
        calls.append(session)
        put("a")(session)

    wire.cut_at(b"COMMIT\0", server_hears)
    with pytest.raises(CommitUnknown):
        by_wire.run(write)
    assert wire.cuts == len(calls) == 1
    assert database.read(names) == (["a"] if server_hears else [])
    by_wire.run(put("b"))


@pytest.mark.parametrize("server_hears", [False, True])
@pytest.mark.parametrize("word", [b"BEGIN", b"INSERT INTO"])
def test_lost_before_commit(
    wire: Wire, by_wire: Database, database: Database, word: bytes, server_hears: bool
) -> None:
    wire.cut_at(word, server_hears)
    by_wire.run(put("a"))
    assert wire.cuts == 1
    assert database.read(names) == ["a"]
    wire.cut_at(b"SELECT")
    assert by_wire.read(names) == ["a"]
    assert wire.cuts == 2


def only_reads(postgres: Postgres, url: str, truth: bool) -> None:
    """Those who connect from now on; as a standby does it, but for its reason."""
    name = url.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {truth}")


def second_nap(does: Callable[[], object]) -> tuple[list[float], Callable[[float], None]]:
    """How long somebody has slept, and what sleeping is: in the second sleep this happens."""
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            does()

    return naps, sleep


def test_a_read_only_server_makes_the_client_reconnect(
    ready_url: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps, sleep = second_nap(lambda: only_reads(postgres, ready_url, False))
    only_reads(postgres, ready_url, True)
    with monkeypatch.context() as impatient, closing(connect(ready_url)) as database:
        impatient.setattr("groupwise.jobs.fleet.store.database.RETRY_TIMEOUT", 0.0)
        with pytest.raises(DatabaseFailure, match="read-only") as raised:
            database.run(put("a"))
        assert (database.read(names), raised.value.temporary) == ([], True)
    with closing(Database(parse(ready_url), sleep)) as database:
        with ThreadPoolExecutor(2) as threads:  # so many connections are kept
            both = threading.Barrier(2)
            assert list(threads.map(lambda _: database.read(lambda s: both.wait(10)), "ab"))
        database.run(put("a"))
        database.run(put("b"))
        assert database.read(names) == ["a", "b"]
    assert len(naps) == 2


def test_a_standby_is_waited_for_until_it_takes_writes(ready_url: str, postgres: Postgres) -> None:
    naps, sleep = second_nap(postgres.promote)
    postgres.demote()
    try:
        with closing(Database(parse(ready_url), sleep)) as database:
            assert database.read(names) == []
            database.run(put("a"))
            assert database.read(names) == ["a"]
    finally:
        if len(naps) < 2:
            postgres.promote()
    assert len(naps) == 2


# --- contended for --------------------------------------------------------------------------------


def test_transactions_are_repeated_after_a_deadlock(database: Database) -> None:
    database.run(lambda s: s.add_all([Cursor(name="a"), Cursor(name="b")]))
    both_hold_one = threading.Barrier(2)
    calls: list[str] = []

    def swap(first: str, second: str) -> Callable[[Session], None]:
        begun = False

        def write(session: Session) -> None:
            nonlocal begun
            calls.append(first)
            session.execute(ADD, {"name": first})
            if not begun:
                begun = True
                both_hold_one.wait(10)
            session.execute(ADD, {"name": second})

        return write

    database.run(lambda s: s.execute(text("SELECT 1")))
    with ThreadPoolExecutor(2) as threads:
        works = [threads.submit(database.run, swap(*pair)) for pair in (("a", "b"), ("b", "a"))]
        for work in works:
            work.result()
    positions = database.read(lambda s: list(s.scalars(text("SELECT position FROM cursors"))))
    assert positions == [2, 2]
    assert len(calls) >= 3  # who begins anew may be overtaken once more


ADD = text("UPDATE cursors SET position = position + 1 WHERE name = :name")


def test_a_swallowed_error_is_no_commit(database: Database) -> None:
    database.run(put("a"))

    def swallow(session: Session) -> None:
        session.execute(text("INSERT INTO cursors (name) VALUES ('b')"))
        with pytest.raises(IntegrityError):
            session.execute(text("INSERT INTO cursors (name) VALUES ('a')"))

    with pytest.raises(AssertionError, match=r"session\.begin_nested"):
        database.run(swallow)
    assert database.read(names) == ["a"]


def test_settings_of_every_connection(postgres: Postgres, ready_url: str) -> None:
    name = ready_url.rpartition("/")[2]
    for default in ("synchronous_commit = off", "default_transaction_isolation = 'serializable'"):
        postgres.execute(f"ALTER DATABASE {name} SET {default}")
    wanted = {
        "synchronous_commit": "on", "transaction_isolation": "read committed", "statement_timeout": "30s", "lock_timeout": "10s",
        "idle_in_transaction_session_timeout": "15s", "TimeZone": "UTC", "application_name": "groupwise",
    }  # fmt: skip
    with closing(connect(ready_url)) as database:
        found = database.run(lambda s: {n: s.scalar(text(f"SHOW {n}")) for n in wanted})
    assert found == wanted


# --- the queue ------------------------------------------------------------------------------------


JOBS = 20_000
FILL = {
    "postgresql": f"INSERT INTO jobs (job_id, project, batch_size) SELECT 'job-' || n, 'p', n FROM generate_series(1, {JOBS}) n",
    "sqlite": f"WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {JOBS}) "
    "INSERT INTO jobs (job_id, project, batch_size) SELECT 'job-' || n, 'p', n FROM numbers",
}
RANK = f"UPDATE jobs SET rank = batch_size * 7919 % {JOBS}"
HEAD = "SELECT job_id FROM jobs WHERE status = 'queued' AND rank IS NOT NULL AND not_before <= 5 ORDER BY rank, job_id LIMIT 10"


def test_the_head_of_the_queue_is_found_by_its_index(
    ready_url: str, migrated_file: Path, tmp_path: Path
) -> None:
    for url in (ready_url, copied(migrated_file, tmp_path)):
        with closing(connect(url)) as database:
            database.run(lambda s, d=database: s.execute(text(FILL[d.dialect])))
            database.run(lambda s: s.execute(text(RANK)))
            plan = "EXPLAIN QUERY PLAN " + HEAD
            if database.dialect == "postgresql":
                plan = "EXPLAIN " + HEAD + " FOR NO KEY UPDATE SKIP LOCKED"
                database.run(lambda s: s.execute(text("ANALYZE jobs")))
            lines = database.run(lambda s, p=plan: [str(tuple(r)) for r in s.execute(text(p))])
        told = "\n".join(lines)
        assert "ix_jobs_queue" in told
        assert not [costly for costly in ("Sort", "Seq Scan", "TEMP B-TREE") if costly in told]


def test_an_error_of_the_function_is_raised_although_the_rollback_fails(
    wire: Wire, by_wire: Database
) -> None:
    """The function's own error is told, not that nobody was there to be told of the rollback."""

    def fails(session: Session) -> None:
        names(session)
        wire.cut_at(b"ROLLBACK")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        by_wire.run(fails)
    assert by_wire.run(names) == []
