"""Notifiers over a real NATS and a real PostgreSQL, which are killed, frozen, emptied and lied to."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from groupwise.jobs.fleet.notify.composite import SeveralNotifiers
from groupwise.jobs.fleet.notify.local import LocalNotifier
from groupwise.jobs.fleet.notify.nats import NatsAccess, NatsNotifier
from groupwise.jobs.fleet.notify.postgres import CHANNEL, PostgresNotifier
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
async def notifier(impatient: None, server: nats.Nats) -> AsyncIterator[NatsNotifier]:
    notifier = NatsNotifier(access(server))
    await hears(notifier, lambda: server.publish("jobs.new", b"at-first"), "at-first")
    yield notifier
    await notifier.close()


async def hears(notifier: NatsNotifier | PostgresNotifier, ring, name: str) -> None:
    """Call `ring` until `name` is received: ids sent before anyone listens are received by nobody."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            await asyncio.to_thread(ring)
            if name in await notifier.wait(0.1):
                return


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if word in r.getMessage()]


class TestNats:
    async def test_publications_work_with_any_publisher_and_subscriber(self, server, notifier):
        """It hears any publisher, in each form of a message. Any subscriber hears it, even if it is closed at once."""
        for message in (b"job-1", b'{"job_id": "job-1"}', b'["job-1"]', b'"job-1"'):
            server.publish("jobs.new", message)
            assert await notifier.wait(TIMEOUT_S) == {"job-1"}
        with server.subscribed("jobs.new") as heard:
            notifier.notify(["job-1"])
            assert await asyncio.to_thread(next, heard) == b"job-1"
            brief = NatsNotifier(access(server))
            brief.notify(["job-2", "job-3"])
            await brief.close()
            assert await asyncio.to_thread(next, heard) == b'["job-2","job-3"]'

    async def test_garbage_and_headers_that_kill_the_librarys_reader_do_not_make_it_deaf(
        self, server, notifier
    ):
        server.publish("jobs.new", b"[" * 60_000, b'{"job_id": null}', b"\xff" * 1000, b"job-1")
        assert await notifier.wait(TIMEOUT_S) == {"job-1"}
        library = logging.getLogger("nats.aio.client")
        library.disabled = True
        try:
            server.publish("jobs.new", b"", headers=b"NATS/1.0 \xff\xff\xff\r\n\r\n")
            await hears(notifier, lambda: server.publish("jobs.new", b"after"), "after")
        finally:
            library.disabled = False

    async def test_killed_emptied_and_back_with_one_line_each(self, server, notifier, caplog):
        """And a frozen one is noticed."""
        caplog.set_level(logging.INFO)
        for turn in range(3):
            (server.freeze if turn == 2 else server.kill)()
            await wait_until_async(lambda n=turn: len(lines(caplog, "has gone")) > n)
            assert await notifier.wait(0.3) == frozenset()
            if turn == 2:
                server.thaw()
            else:
                server.drop_store()
                server.start()
            name = f"after-{turn}"
            await hears(notifier, lambda n=name: server.publish("jobs.new", n.encode()), name)
        assert len(lines(caplog, "has gone")) == len(lines(caplog, "is there")) == 3
        assert len(caplog.records) == 6
        assert nats.TOKEN not in caplog.text

    async def test_a_server_that_is_absent_at_first_delays_nothing_and_is_logged_once(
        self, absent, caplog
    ):
        caplog.set_level(logging.INFO)
        notifier = NatsNotifier(access(absent))
        notifier.notify(["a"])
        async with asyncio.timeout(AT_ONCE):
            assert await notifier.wait(TIMEOUT_S) == {"a"}
        assert await notifier.wait(1.5) == frozenset()
        assert len(lines(caplog, "is not there")) == len(caplog.records) == 1
        other = NatsNotifier(access(absent))
        other.open()
        other.notify(["b"])
        async with asyncio.timeout(AT_ONCE):
            await other.close()
        absent.start()
        listener = NatsNotifier(access(absent))
        await hears(listener, lambda: notifier.notify(["c"]), "c")
        await notifier.close()
        await listener.close()

    async def test_a_token_is_never_shown(self, server, caplog):
        caplog.set_level(logging.INFO)
        wrong = NatsNotifier(NatsAccess(server.url, token="wrong-canary"))
        assert await wrong.wait(1) == frozenset()
        await wrong.close()
        assert len(lines(caplog, "Authorization")) == len(caplog.records) == 1
        given = NatsAccess(server.url.replace("nats://", f"nats://{nats.TOKEN}@"))
        assert nats.TOKEN not in repr(given)
        notifier = NatsNotifier(given)
        await hears(notifier, lambda: server.publish("jobs.new", b"a"), "a")
        await notifier.close()
        assert lines(caplog, "is there")
        assert not [token for token in ("wrong-canary", nats.TOKEN) if token in caplog.text]

    async def test_a_publish_without_permission_is_not_retried(self, tmp_path, caplog):
        more = "authorization { users: [{ user: u, password: p, permissions: { publish: x } }] }"
        with nats.server(tmp_path, token=None, more=more) as strict:
            notifier = NatsNotifier(NatsAccess(strict.url, user="u", password="p"))
            notifier.open()
            notifier.notify(["a"])
            await wait_until_async(lambda: lines(caplog, 'publish to "jobs.new"'))
            await asyncio.sleep(0.5)
            await notifier.close()
            assert strict.log().count("Publish Violation") == 1


@pytest.fixture
def database(postgres: Postgres) -> Postgres:
    return postgres


def arguments(database: Postgres) -> dict[str, object]:
    return {"host": "127.0.0.1", "port": database.port, "user": "fleet", "dbname": "postgres", "connect_timeout": 2}  # fmt: skip


@pytest.fixture
async def notifiers(database: Postgres) -> AsyncIterator[Callable[[int], list[PostgresNotifier]]]:
    """So many, closed at the end."""
    made: list[PostgresNotifier] = []

    def make(count: int) -> list[PostgresNotifier]:
        made.extend(PostgresNotifier(arguments(database)) for _ in range(count))
        return made

    yield make
    for each in made:
        await each.close()


class TestPostgres:
    async def test_a_notification_reaches_all_listeners(self, database, notifiers):
        ringer, first, second = notifiers(3)
        for notifier in (first, second):
            await listening(notifier)
        ringer.open()
        ringer.notify(["a", "b"])
        assert [await first.wait(TIMEOUT_S), await second.wait(TIMEOUT_S)] == [{"a", "b"}] * 2
        for text in ("", "no id", "{", "[" * 7000, "job-1"):  # anybody's, and garbage
            database.execute(f"SELECT pg_notify('{CHANNEL}', '{text}')")
        assert await first.wait(TIMEOUT_S) == {"job-1"}

    async def test_killed_and_back_with_one_line_each(self, database, notifiers, caplog):
        caplog.set_level(logging.INFO)
        notifier, other = notifiers(2)
        await listening(notifier)
        other.open()
        other.notify(["before"])
        assert await notifier.wait(TIMEOUT_S) == {"before"}
        database.kill()
        await wait_until_async(lambda: not notifier.is_listening)
        other.notify(["meanwhile"])
        assert await notifier.wait(0.5) == frozenset()
        database.start()
        await hears(notifier, lambda: other.notify(["after"]), "after")
        assert (
            len(lines(caplog, "no notifications of PostgreSQL arrive")) <= 2
        )  # each of the two may say it
        assert len(lines(caplog, "arrive again")) == 1


async def listening(notifier: PostgresNotifier) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not notifier.is_listening:
            await notifier.wait(0.01)


async def test_any_one_alive_is_enough(server: nats.Nats, database: Postgres, tmp_path: Path):
    heard_by = [
        LocalNotifier(tmp_path),
        NatsNotifier(access(server)),
        PostgresNotifier(arguments(database)),
    ]
    listener = SeveralNotifiers(heard_by)
    await hears(listener, lambda: server.publish("jobs.new", b"by-nats"), "by-nats")  # type: ignore[arg-type]
    notify = f"SELECT pg_notify('{CHANNEL}', 'by-postgres')"
    await hears(listener, lambda: database.execute(notify), "by-postgres")  # type: ignore[arg-type]
    server.kill()
    LocalNotifier(tmp_path).notify(["by-socket"])
    assert await listener.wait(TIMEOUT_S) == {"by-socket"}
    async with asyncio.timeout(AT_ONCE):
        await listener.close()
