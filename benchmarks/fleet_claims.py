"""How long a dispatcher needs to claim jobs while very many wait: `python -m benchmarks.fleet_claims [POSTGRESQL_URL | --sqlite]`.

Without a URL it starts a PostgreSQL of its own. 100,000 jobs wait on a fleet that is full: of ten projects, of which two have quotas, with
one to eight GPUs, some of them on two machines, some with a minimum of memory or a priority, some to come after others. Then one attempt
after another ends: the release with its waking, the claim that follows, and the marking of jobs that found no room, for which nothing that
begins waits, are timed one by one. Once with the jobs still queued, and once with most of them pending, as they are after dispatchers have
looked at them. At last eight dispatchers, each a process, claim at once.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, insert, select, text, update
from sqlalchemy.orm import Session

from benchmarks.fleet_dispatch import looked_at_rarely
from groupwise.jobs.fleet.queue import admission, claim, requeue_pending
from groupwise.jobs.fleet.store.database import Database, connect, migrate
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Job, Project, Reservation
from groupwise.jobs.fleet.up import freeze_imported_objects
from tests.postgres import server

JOBS = int(os.environ.get("JOBS", "100000"))
MACHINES = 50
GPUS = 8
ROUNDS = 200
RACERS = 8
QUOTA = 40
INSERTED_AT_ONCE = 5000
MARKED = 200
"""Claims that find no room, each of which marks a hundred jobs; what is left stays queued behind them."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Milliseconds."""

    p50: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True)
class Found:
    """Of the claims while jobs are queued, while they are pending, and of the releases before and the marking after the latter."""

    jobs: int
    admitted_per_second: float
    queued: Quantiles
    pending: Quantiles
    release: Quantiles
    mark: Quantiles
    racing: Quantiles | None
    """Eight at once; None: SQLite has one dispatcher."""


def main(word: str | None) -> None:
    """Prints a line for each measurement."""
    if word == "--sqlite":
        with tempfile.TemporaryDirectory() as folder:
            print(measure(f"sqlite:///{folder}/fleet.db"))
    elif word is not None:
        print(measure(word))
    else:
        with server() as running:
            print(measure(running.new_database()))


def measure(url: str, jobs: int = JOBS) -> Found:
    """All of it, on an empty database."""
    with closing(connect(url)) as database:
        migrate(database)
        database.run(add_machines)
        insert_jobs(database, jobs)
        begun = time.perf_counter()
        admit_all(database)
        admitted = time.perf_counter() - begun
        fill(database)
        analyse(database)
        freeze_imported_objects()
        show("waiting", waiting(database))
        _, queued, _ = rounds(database)
        show("claim, all queued", queued)
        mark(database)
        analyse(database)
        show("waiting", waiting(database))
        release, pending, marking = rounds(database)
        show("claim, many pending", pending)
        racing = None if database.dialect == "sqlite" else race(url)
        return Found(jobs, jobs / admitted, queued, pending, release, marking, racing)


def add_machines(session: Session) -> None:
    """All observed just now; a third of the GPUs have less memory. And two projects with quotas."""
    for n in range(MACHINES):
        session.add(VM(vm_id=f"vm-{n:03}", contact="ok", **looked_at_rarely(session)))
        session.flush()
        for index in range(GPUS):
            uuid, memory_mb = f"GPU-{n}-{index}", 40_000 if n % 3 == 0 else 80_000
            session.add(
                GPU(vm_id=f"vm-{n:03}", index=index, uuid=uuid, memory_mb=memory_mb, model="A100")
            )
    for name in ("p0", "p1"):
        session.add(Project(name=name, max_gpus=QUOTA))


def insert_jobs(database: Database, jobs: int) -> None:
    """By hand, a few thousand at a time."""
    for first in range(0, jobs, INSERTED_AT_ONCE):
        rows = [row(n) for n in range(first, min(first + INSERTED_AT_ONCE, jobs))]
        database.run(lambda session, rows=rows: session.execute(insert(Job), rows))


def row(n: int) -> dict[str, Any]:
    """What the n-th job wants."""
    gpus = (1, 1, 1, 1, 2, 2, 4, 8)[n // 10 % 8]
    resources: dict[str, Any] = {"gpus": gpus}
    if n % 53 == 0:
        resources["machines"] = 2
    if n % 7 == 0:
        resources["gpu_memory_mb"] = 60_000
    request: dict[str, Any] = {"arguments": ["true"], "resources": resources}
    if n % 97 == 0 and n >= 1000:
        request["after"] = [f"j{n - 990:06}"]
    return {
        "job_id": f"j{n:06}",
        "job_type": "COMMAND",
        "project": f"p{n % 10}",
        "priority": 1 if n % 31 == 0 else 0,
        "request": request,
    }


def admit_all(database: Database) -> None:
    """As a dispatcher does."""
    while database.run(lambda session: admission.admit_new(session, 500)):
        pass


def fill(database: Database) -> None:
    """Until nothing finds room."""
    while claim_once(database, limit=32).claimed:
        pass


def claim_once(database: Database, limit: int, owner: str = "bench") -> claim.Round:
    """One transaction."""
    return database.run(
        lambda session: claim.claim(session, owner=owner, lease_seconds=3600.0, limit=limit)
    )


def mark_once(database: Database, found: claim.Round, owner: str = "bench") -> None:
    """Another one, as a dispatcher makes it after each claim that met jobs without room."""
    if (unplaced := found.unplaced) is not None:
        database.run(lambda session: claim.mark(session, unplaced, owner))


def mark(database: Database) -> None:
    """Claims that find no room."""
    for _ in range(MARKED):
        mark_once(database, claim_once(database, limit=32))


def analyse(database: Database) -> None:
    """As an autovacuum or a day's work would have it."""
    database.run(lambda session: session.execute(text("ANALYZE")))


def rounds(database: Database, count: int = ROUNDS) -> tuple[Quantiles, Quantiles, Quantiles]:
    """Release one attempt, claim what was woken and mark what found no room, again and again."""
    releases: list[float] = []
    claims: list[float] = []
    marks: list[float] = []
    for _ in range(count):
        begun = time.perf_counter()
        database.run(release_oldest)
        released = time.perf_counter()
        found = claim_once(database, limit=4)
        claimed = time.perf_counter()
        mark_once(database, found)
        marks.append(time.perf_counter() - claimed)
        claims.append(claimed - released)
        releases.append(released - begun)
    return quantiles(releases), quantiles(claims), quantiles(marks)


def release_oldest(session: Session) -> None:
    """The oldest attempt ends that nobody else ends just now."""
    query = select(Attempt.epoch).where(Attempt.state != "ended").order_by(Attempt.epoch).limit(1)
    epoch = session.scalars(query.with_for_update(skip_locked=True)).one()
    ended = update(Attempt).where(Attempt.epoch == epoch).returning(Attempt.job_id)
    job_id = session.scalars(ended.values(state="ended", outcome="void", ended_at=1.0)).one()
    session.execute(update(Job).where(Job.job_id == job_id).values(status="completed"))
    vm_ids = session.scalars(
        update(Reservation)
        .where(Reservation.epoch == epoch)
        .values(released_at=1.0)
        .returning(Reservation.vm_id)
    ).all()
    requeue_pending.wake(session, vm_ids=set(vm_ids))


def race(url: str) -> Quantiles:
    """Eight processes release and claim at once."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(RACERS, mp_context=spawn) as pool:
        found = list(pool.map(racer, [url] * RACERS, range(RACERS)))
    return quantiles([each for times in found for each in times])


def racer(url: str, number: int) -> list[float]:
    """The seconds of each claim of one of them; it waits a little in between, as a dispatcher does."""
    claims: list[float] = []
    freeze_imported_objects()
    with closing(connect(url)) as database:
        for _ in range(ROUNDS // RACERS):
            database.run(release_oldest)
            begun = time.perf_counter()
            found = claim_once(database, limit=4, owner=f"bench-{number}")
            claims.append(time.perf_counter() - begun)
            mark_once(database, found)
            time.sleep(0.2)
    return claims


def waiting(database: Database) -> str:
    """How many jobs stand in which status."""
    query = select(Job.status, func.count()).group_by(Job.status).order_by(Job.status)
    rows = database.run(lambda session: session.execute(query).all())
    return ", ".join(f"{status} {count}" for status, count in rows)


def quantiles(times: list[float]) -> Quantiles:
    """Of seconds."""
    cuts = statistics.quantiles(times, n=100)
    return Quantiles(cuts[49] * 1e3, cuts[98] * 1e3, max(times) * 1e3)


def show(name: str, what: object) -> None:
    """At once."""
    print(f"  {name}: {what}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
