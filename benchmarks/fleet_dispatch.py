"""How many jobs a second one dispatcher takes from the queue to their ends: `python -m benchmarks.fleet_dispatch [--postgresql]`.

A burst of jobs waits when a dispatcher begins. Machines exist in this process only (`tests.fake_hosts`) and answer at once, so
that what is measured is all that the control plane does about a job: its claim, its launch, its log, its end and the release of its GPU,
each written down durably. Commands take a twentieth of a second. Logs, checkpoints and artefacts go the real way, onto a real disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupwise.core.waiting import cancel_and_wait
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.dispatcher import DispatcherDependencies, GlobalJobDispatcher
from groupwise.jobs.fleet.files.artefacts import Collector
from groupwise.jobs.fleet.files.logs import LogMirror
from groupwise.jobs.fleet.files.mirror import CheckpointMirror
from groupwise.jobs.fleet.notify.local import LocalNotifier
from groupwise.jobs.fleet.queue import admission, capacity
from groupwise.jobs.fleet.queue.request import from_document
from groupwise.jobs.fleet.states import FINAL, Contact
from groupwise.jobs.fleet.store.database import Database, connect, database_time, migrate
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Job
from groupwise.jobs.fleet.up import freeze_imported_objects
from groupwise.jobs.hosts.files import BlobStore
from tests.fake_hosts import FakeHosts, Script

MACHINES = 50
GPUS = 8
SUBMITTED_AT_ONCE = 500
TICK = 0.05
"""Seconds that a command takes, about."""
LOOK = 0.25
"""Seconds between two counts of what has begun and ended."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What was measured."""

    jobs: int
    seconds: float
    """Until the last one had ended."""
    per_second: float
    """Begun, from the start of the dispatcher until the last one ran."""
    ended_per_second: float
    cpu_per_job: float
    """CPU seconds of this process; the server of a PostgreSQL is not counted."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--postgresql", action="store_true", help="instead of SQLite")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, some_database(given.postgresql, folder) as url:
        found = asyncio.run(measure(url, given.jobs, Path(folder)))
    for name, value in asdict(found).items():
        print(f"{name:<18} {round(value, 4)}")


@contextlib.contextmanager
def some_database(postgresql: bool, folder: str) -> Iterator[str]:
    """The URL of an empty one."""
    if not postgresql:
        yield f"sqlite:///{folder}/fleet.db"
        return
    from tests.postgres import server

    with server() as running:
        yield running.new_database()


async def measure(url: str, jobs: int, folder: Path) -> Dispatched:
    """Submit the burst, then let one dispatcher work it off."""
    with contextlib.closing(connect(url)) as database:
        migrate(database)
        rack = FakeHosts(
            {f"vm-{n:03}": [f"GPU-{n}-{i}" for i in range(GPUS)] for n in range(MACHINES)}
        )
        database.run(lambda session: _add_machines(session, rack))
        submit(database, jobs)
        freeze_imported_objects()
        wall, cpu = time.monotonic(), time.process_time()
        async with _dispatching(database, rack, folder):
            begun = await _until(database, jobs, begun_at=wall)
            wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    return Dispatched(jobs, wall, jobs / begun, jobs / wall, cpu / jobs)


def looked_at_rarely(session: Session) -> dict[str, Any]:
    """Of a machine that was seen just now: nobody polls here, and it is not to become stale meanwhile."""
    return {"observed_round": database_time(session), "facts": {capacity.LOOK_SECONDS: 3600}}


def _add_machines(session: Session, rack: FakeHosts) -> None:
    for host in rack:
        session.add(VM(vm_id=host.name, contact=Contact.OK, **looked_at_rarely(session)))
        session.flush()
        for index, uuid in enumerate(host.gpus):
            session.add(GPU(vm_id=host.name, index=index, uuid=uuid, memory_mb=81_920))


def submit(database: Database, jobs: int) -> None:
    """Commands for one GPU each."""
    request = from_document({"arguments": ["train"], "resources": {"gpus": 1}})

    def some(first: int) -> None:
        def write(session: Session) -> None:
            for number in range(first, min(first + SUBMITTED_AT_ONCE, jobs)):
                admission.submit(
                    session, request, actor="user:bench", project="bench", job_id=f"j{number:06}"
                )

        database.run(write)

    for first in range(0, jobs, SUBMITTED_AT_ONCE):
        some(first)


@contextlib.asynccontextmanager
async def _dispatching(database: Database, rack: FakeHosts, folder: Path) -> AsyncIterator[None]:
    gateway, store = Gateway(database), BlobStore(folder / "blobs")
    notifier = LocalNotifier(folder)
    parts = DispatcherDependencies(
        database=database,
        host=lambda machine: rack[machine.vm_id],
        listener=notifier,
        logs=LogMirror(folder / "logs", gateway),
        checkpoints=CheckpointMirror(store, gateway),
        collector=Collector(folder / "artefacts", store, gateway),
        store=store,
    )
    dispatcher = GlobalJobDispatcher(parts, gateway=gateway)
    running = asyncio.create_task(dispatcher.run())
    working = asyncio.create_task(_work(rack))
    try:
        yield
    finally:
        dispatcher.stop()
        await running
        await cancel_and_wait(working)
        await notifier.close()


async def _work(rack: FakeHosts) -> None:
    while True:
        rack.scripts.setdefault("", [Script()])
        rack.tick()
        await asyncio.sleep(TICK)


async def _until(database: Database, jobs: int, *, begun_at: float) -> float:
    """Until all have ended; how long it took until all had begun."""
    begun: float | None = None
    while True:
        running, over = await database.read_in_thread(_counts)
        if begun is None and running == jobs:
            begun = time.monotonic() - begun_at
        if over == jobs:
            assert begun is not None
            return begun
        await asyncio.sleep(LOOK)


def _counts(session: Session) -> tuple[int, int]:
    begun = select(func.count()).select_from(Attempt).where(Attempt.running_at.is_not(None))
    over = select(func.count()).select_from(Job).where(Job.status.in_(FINAL))
    return session.scalar(begun) or 0, session.scalar(over) or 0


if __name__ == "__main__":
    main()
