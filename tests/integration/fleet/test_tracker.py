"""Ends of jobs over a real NATS that is absent, frozen, killed and emptied; events of a real PostgreSQL."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.waiting import cancel_and_wait
from groupwise.jobs.fleet import tracker
from groupwise.jobs.fleet.notify.nats import NatsAccess, NatsLink
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import Cursor, Job
from groupwise.jobs.fleet.tracker import NatsOutlet, Tracker, position_of
from tests import nats
from tests.processes import TIMEOUT_S, wait_until_async


@pytest.fixture
def server(tmp_path: Path) -> Iterator[nats.Nats]:
    with nats.server(tmp_path) as running:
        yield running


@asynccontextmanager
async def tracking(server: nats.Nats, database: Database):
    link = NatsLink(NatsAccess(server.url, token=server.token))
    link.open()
    running = asyncio.create_task(Tracker(database, NatsOutlet(link), interval=0.02).run())
    await wait_until_async(
        lambda: database.read(lambda s: s.get(Cursor, NatsOutlet.name)) is not None
    )
    try:
        yield
    finally:
        await cancel_and_wait(running)
        await link.close()


def end(database: Database, name: str, status: str = "completed") -> None:
    def write(session: Any) -> None:
        session.add(Job(job_id=name))
        session.flush()
        detail = {"exit_code": 0 if status == "completed" else 1, "tail": f"last line of {name}"}
        events.append(session, actor="d", kind=f"job.{status}", job_id=name, detail=detail)

    database.run(write)


async def next_payload(payloads: Iterator[bytes]) -> dict[str, Any]:
    async with asyncio.timeout(TIMEOUT_S):
        return json.loads(await asyncio.to_thread(next, payloads))


def kept(database: Database) -> int:
    return database.read(lambda s: position_of(s, NatsOutlet.name))


async def test_a_restart_of_the_server_loses_nothing(
    server: nats.Nats, database: Database, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG, "groupwise.jobs.fleet.tracker")
    async with tracking(server, database):
        with server.subscribed("jobs.completed") as good, server.subscribed("jobs.errored") as bad:
            end(database, "a")
            end(database, "b", "failed")
            first, second = await next_payload(good), await next_payload(bad)
        told = (first["job_id"], first["exit_code"], first["log_tail"])
        assert told == ("a", 0, ["last line of a"])
        assert (second["job_id"], second["status"], second["exit_code"]) == ("b", "failed", 1)
        await wait_until_async(lambda: kept(database) == 2)
        server.kill()
        end(database, "meanwhile")
        # Two failed attempts: the round of the first one is over.
        await wait_until_async(lambda: [r.name for r in caplog.records].count(tracker.__name__) > 1)
        assert kept(database) == 2, "not past what no server has taken"
        server.drop_store()
        server.start()
        await wait_until_async(lambda: kept(database) == 3)
        with server.subscribed("jobs.*") as payloads:
            end(database, "after")
            assert (await next_payload(payloads))["job_id"] == "after"


STRICT = """
no_auth_user: other
authorization { users: [
  { user: other, password: other }
  { user: tracker, password: tracker, permissions: { publish: "jobs.completed" } }
] }
"""


async def test_a_forbidden_publication_does_not_block_the_others(
    tmp_path: Path, database: Database, caplog: pytest.LogCaptureFixture
):
    """The server acknowledges a publication that it has thrown away, and says beside that it has."""
    with (
        nats.server(tmp_path, token=None, more=STRICT) as server,
        server.subscribed("jobs.*") as payloads,
    ):
        link = NatsLink(NatsAccess(server.url, user="tracker", password="tracker"))
        link.open()
        await link.until_there()
        telling = Tracker(database, NatsOutlet(link))
        end(database, "a", "failed")
        for name in "bc":
            end(database, name)
            await telling.round()
            assert (await next_payload(payloads))["job_id"] == name
        assert kept(database) == 0
        assert link.trouble is not None
        assert 'publish to "jobs.errored"' in link.trouble
        assert len([r for r in caplog.records if link.trouble in r.getMessage()]) == 1
        await link.close()
