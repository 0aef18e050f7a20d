"""Doorbells over a real NATS and a real PostgreSQL, which are killed, frozen, emptied and lied to."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from groupwise.jobs.fleet.notify.composite import SeveralDoorbells
from groupwise.jobs.fleet.notify.local import LocalDoorbell
from groupwise.jobs.fleet.notify.nats import NatsAccess, NatsDoorbell
from groupwise.jobs.fleet.notify.postgres import CHANNEL, PostgresDoorbell
from tests import nats
from tests.postgres import Postgres
from tests.processes import TIMEOUT_S, wait_until_async

AT_ONCE = 20.0
"""Seconds for what waits for nobody: enough for a busy machine, and fewer than any wait would take."""


def access(server: nats.Nats) -> NatsAccess:
    return NatsAccess(server.url, token=server.token)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[nats.Nats]:
    with nats.server(tmp_path) as running:
        yield running


@pytest.fixture
def absent(tmp_path: Path) -> Iterator[nats.Nats]:
    with nats.server(tmp_path, started=False) as running:
        yield running


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.jobs.fleet.notify.nats.CHECKED", 0.2)
    monkeypatch.setattr("groupwise.jobs.fleet.notify.nats.ANSWERING", 1)


@pytest.fixture
async def doorbell(impatient: None, server: nats.Nats) -> AsyncIterator[NatsDoorbell]:
    bell = NatsDoorbell(access(server))
    await hears(bell, lambda: server.publish("jobs.new", b"at-first"), "at-first")
    yield bell
    await bell.close()


async def hears(bell: NatsDoorbell | PostgresDoorbell, ring, name: str) -> None:
    """Ring, by `ring`, until `name` is heard: what is rung before somebody listens is heard by nobody."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            await asyncio.to_thread(ring)
            if name in await bell.wait(0.1):
                return


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if word in r.getMessage()]


class TestNats:
    async def test_a_publication_is_a_plain_one(self, server, doorbell):
        """It hears any publisher, in each form of a message. Any subscriber hears it, even if it is closed at once."""
        for message in (b"job-1", b'{"job_id": "job-1"}', b'["job-1"]', b'"job-1"'):
            server.publish("jobs.new", message)
            assert await doorbell.wait(TIMEOUT_S) == {"job-1"}
        with server.subscribed("jobs.new") as heard:
            doorbell.ring(["job-1"])
            assert await asyncio.to_thread(next, heard) == b"job-1"
            brief = NatsDoorbell(access(server))
            brief.ring(["job-2", "job-3"])
            await brief.close()
            assert await asyncio.to_thread(next, heard) == b'["job-2","job-3"]'

    async def test_garbage_and_headers_that_kill_the_librarys_reader_do_not_make_it_deaf(
        self, server, doorbell
    ):
        server.publish("jobs.new", b"[" * 60_000, b'{"job_id": null}', b"\xff" * 1000, b"job-1")
        assert await doorbell.wait(TIMEOUT_S) == {"job-1"}
        library = logging.getLogger("nats.aio.client")
        library.disabled = True
        try:
            server.publish("jobs.new", b"", headers=b"NATS/1.0 \xff\xff\xff\r\n\r\n")
            await hears(doorbell, lambda: server.publish("jobs.new", b"after"), "after")
        finally:
            library.disabled = False

    async def test_killed_emptied_and_back_with_one_line_each(self, server, doorbell, caplog):
        """And a frozen one is noticed."""
        caplog.set_level(logging.INFO)
        for turn in range(3):
            (server.freeze if turn == 2 else server.kill)()
            await wait_until_async(lambda n=turn: len(lines(caplog, "has gone")) > n)
            assert await doorbell.wait(0.3) == frozenset()
            if turn == 2:
                server.thaw()
            else:
                server.drop_store()
                server.start()
            name = f"after-{turn}"
            await hears(doorbell, lambda n=name: server.publish("jobs.new", n.encode()), name)
        assert len(lines(caplog, "has gone")) == len(lines(caplog, "is there")) == 3
        assert len(caplog.records) == 6
        assert nats.TOKEN not in caplog.text

    async def test_absent_at_first_it_holds_nobody_up_and_is_told_later(self, absent, caplog):
        caplog.set_level(logging.INFO)
        bell = NatsDoorbell(access(absent))
        bell.ring(["a"])
        async with asyncio.timeout(AT_ONCE):
            assert await bell.wait(TIMEOUT_S) == {"a"}
        assert await bell.wait(1.5) == frozenset()
        assert len(lines(caplog, "is not there")) == len(caplog.records) == 1
        other = NatsDoorbell(access(absent))
        other.open()
        other.ring(["b"])
        async with asyncio.timeout(AT_ONCE):
            await other.close()
        absent.start()
        listener = NatsDoorbell(access(absent))
        await hears(listener, lambda: bell.ring(["c"]), "c")
        await bell.close()
        await listener.close()

    async def test_a_token_is_never_shown(self, server, caplog):
        caplog.set_level(logging.INFO)
        wrong = NatsDoorbell(NatsAccess(server.url, token="wrong-canary"))
        assert await wrong.wait(1) == frozenset()
        await wrong.close()
        assert len(lines(caplog, "Authorization")) == len(caplog.records) == 1
        given = NatsAccess(server.url.replace("nats://", f"nats://{nats.TOKEN}@"))
        assert nats.TOKEN not in repr(given)
        bell = NatsDoorbell(given)
        await hears(bell, lambda: server.publish("jobs.new", b"a"), "a")
        await bell.close()
        assert lines(caplog, "is there")
        assert not [token for token in ("wrong-canary", nats.TOKEN) if token in caplog.text]

    async def test_a_publish_without_permission_is_not_retried(self, tmp_path, caplog):
        more = "authorization { users: [{ user: u, password: p, permissions: { publish: x } }] }"
        with nats.server(tmp_path, token=None, more=more) as strict:
            bell = NatsDoorbell(NatsAccess(strict.url, user="u", password="p"))
            bell.open()
            bell.ring(["a"])
            await wait_until_async(lambda: lines(caplog, 'publish to "jobs.new"'))
            await asyncio.sleep(0.5)
            await bell.close()
            assert strict.log().count("Publish Violation") == 1


@pytest.fixture
def database(postgres: Postgres) -> Postgres:
    return postgres


def arguments(database: Postgres) -> dict[str, object]:
    return {"host": "127.0.0.1", "port": database.port, "user": "fleet", "dbname": "postgres", "connect_timeout": 2}  # fmt: skip


@pytest.fixture
async def bells(database: Postgres) -> AsyncIterator[Callable[[int], list[PostgresDoorbell]]]:
    """So many, closed at the end."""
    made: list[PostgresDoorbell] = []

    def make(count: int) -> list[PostgresDoorbell]:
        made.extend(PostgresDoorbell(arguments(database)) for _ in range(count))
        return made

    yield make
    for each in made:
        await each.close()


class TestPostgres:
    async def test_one_rings_and_all_hear(self, database, bells):
        ringer, first, second = bells(3)
        for bell in (first, second):
            await listening(bell)
        ringer.open()
        ringer.ring(["a", "b"])
        assert [await first.wait(TIMEOUT_S), await second.wait(TIMEOUT_S)] == [{"a", "b"}] * 2
        for text in ("", "no id", "{", "[" * 7000, "job-1"):  # anybody's, and garbage
            database.execute(f"SELECT pg_notify('{CHANNEL}', '{text}')")
        assert await first.wait(TIMEOUT_S) == {"job-1"}

    async def test_killed_and_back_with_one_line_each(self, database, bells, caplog):
        caplog.set_level(logging.INFO)
        bell, other = bells(2)
        await listening(bell)
        other.open()
        other.ring(["before"])
        assert await bell.wait(TIMEOUT_S) == {"before"}
        database.kill()
        await wait_until_async(lambda: not bell.is_listening)
        other.ring(["meanwhile"])
        assert await bell.wait(0.5) == frozenset()
        database.start()
        await hears(bell, lambda: other.ring(["after"]), "after")
        assert (
            len(lines(caplog, "no notifications of PostgreSQL arrive")) <= 2
        )  # each of the two may say it
        assert len(lines(caplog, "arrive again")) == 1


async def listening(bell: PostgresDoorbell) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not bell.is_listening:
            await bell.wait(0.01)


async def test_any_one_alive_is_enough(server: nats.Nats, database: Postgres, tmp_path: Path):
    heard_by = [
        LocalDoorbell(tmp_path),
        NatsDoorbell(access(server)),
        PostgresDoorbell(arguments(database)),
    ]
    listener = SeveralDoorbells(heard_by)
    await hears(listener, lambda: server.publish("jobs.new", b"by-nats"), "by-nats")  # type: ignore[arg-type]
    notify = f"SELECT pg_notify('{CHANNEL}', 'by-postgres')"
    await hears(listener, lambda: database.execute(notify), "by-postgres")  # type: ignore[arg-type]
    server.kill()
    LocalDoorbell(tmp_path).ring(["by-socket"])
    assert await listener.wait(TIMEOUT_S) == {"by-socket"}
    async with asyncio.timeout(AT_ONCE):
        await listener.close()
