"""From a plain message to a job that runs: the id of a row that somebody inserted, published by somebody who knows nothing of us."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.fleet.dispatcher import GlobalJobDispatcher, Parts
from groupwise.fleet.doorbells.local import LocalDoorbell
from groupwise.fleet.doorbells.nats import NatsAccess, NatsDoorbell
from groupwise.fleet.doorbells.port import Doorbell
from groupwise.fleet.doorbells.several import SeveralDoorbells
from groupwise.fleet.store.database import Database
from groupwise.fleet.store.tables import Job
from tests import nats
from tests.fleet_rig import Rig, quick

pytestmark = pytest.mark.fleet

NEVER = 3600.0
SECONDS = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[nats.Nats]:
    with nats.server(tmp_path) as running:
        yield running


@pytest.fixture
def rig(database: Database, tmp_path: Path) -> Rig:
    return Rig(database, tmp_path, {"a": ["GPU-a0"]})


def dispatcher(rig: Rig, bell: Doorbell) -> GlobalJobDispatcher:
    """One that looks at the queue when it is rung, and at no other time."""
    tuning = quick()
    tuning = replace(tuning, rhythm=replace(tuning.rhythm, sweep=NEVER))
    parts = Parts(rig.database, rig.host, bell, rig.fetched, rig.fetched, rig.fetched, rig.store)
    return GlobalJobDispatcher(parts, tuning)


def insert(rig: Rig, job_id: str) -> None:
    request = {"arguments": ["true"], "resources": {"gpus": 1}}
    rig.database.run(lambda s: s.add(Job(job_id=job_id, job_type="COMMAND", request=request)))


async def test_a_published_id_starts_the_job_of_an_inserted_row(rig: Rig, server: nats.Nats):
    bell = SeveralDoorbells(
        [LocalDoorbell(), NatsDoorbell(NatsAccess(server.url, token=server.token))]
    )
    dispatching = dispatcher(rig, bell)
    running = asyncio.create_task(dispatching.run())
    insert(rig, "by-message")
    await asyncio.sleep(0.3)
    assert rig.job("by-message").admitted_at is None, "nobody rang"
    deadline = time.monotonic() + SECONDS
    while rig.job("by-message").status == "queued":
        assert time.monotonic() < deadline
        server.publish("jobs.new", b"garbage \xff", b"no-such-job", b"by-message", b"by-message")
        await asyncio.sleep(0.1)
    assert len(rig.attempts("by-message")) == 1
    dispatching.stop()
    await running
    await bell.close()
