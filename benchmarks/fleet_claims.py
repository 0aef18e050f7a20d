"""How long a dispatcher needs to claim jobs while very many wait: `python -m benchmarks.fleet_claims --store`.

On a PostgreSQL of its own, or on SQLite (`--sqlite`). 100,000 jobs wait for 50 machines (or `--machines 5000`): of ten projects, of which
two have quotas, with one to eight GPUs, some on two machines, some with a minimum of memory or a priority, some to come after others.
First the last 50 machines are filled, as fast as a dispatcher can; the others are full. Then one attempt after another ends: the release
with its waking, the claim that follows, and the marking of jobs that found no room, for which nothing that begins waits, are timed one by
one. Once with the jobs still queued, and once with most of them pending, as they are after dispatchers have looked at them. The requeue
manager sweeps once. At last all that is pending has waited for long, and eight dispatchers, each a process, claim at once.

`processor` is the processor time of this process, which a busy neighbour does not change; the other times are those of a clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import func, insert, literal, select, text, update
from sqlalchemy.orm import Session

from benchmarks.fleet_dispatch import looked_at_rarely, some_database
from benchmarks.step import RESULTS, machine, slug
from groupwise.jobs.fleet.dispatcher import CLAIMED_AT_ONCE
from groupwise.jobs.fleet.queue import admission, claim, requeue_pending
from groupwise.jobs.fleet.queue.placement import LONG_WAIT_SECONDS
from groupwise.jobs.fleet.requeue import RequeueManager
from groupwise.jobs.fleet.store.database import Database, connect, database_time, migrate
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Job, Member, Project, Reservation
from groupwise.jobs.fleet.up import freeze_imported_objects

JOBS = 100_000
MACHINES = 50
GPUS = 8
ROUNDS = 200
"""Releases with the claim that follows, and before the second time as many claims that find no room: each marks a hundred jobs."""
RACERS = 8
QUOTA = 40
INSERTED_AT_ONCE = 5000
OCCUPIED_AT_ONCE = 250


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Milliseconds."""

    p50: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True)
class Found:
    """Of the claims while jobs are queued, while they are pending, and of the releases before and the marking after the latter."""

    machines: int
    jobs: int
    admitted_per_second: float
    filled_per_second: float
    """Attempts made while the fleet is filled."""
    filled_processor: float
    """Milliseconds for one of those attempts."""
    queued: Quantiles
    pending: Quantiles
    release: Quantiles
    mark: Quantiles
    processor: float
    """Milliseconds for a release, the claim that follows and the marking together, while jobs are pending."""
    sweep: float
    """Milliseconds of a sweep of the requeue manager."""
    sweep_processor: float
    racing: Quantiles | None
    """Eight at once; None: SQLite has one dispatcher, or there were fewer rounds than eight."""
    database_mb: float
    memory_mb: float
    """Most memory of this process."""


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=MACHINES)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sqlite", action="store_true", help="instead of PostgreSQL")
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        some_database(not given.sqlite, folder) as url,
    ):
        found = measure(url, given.jobs, given.machines, given.rounds)
    print(found)
    if given.store:
        described = machine()
        kind = f"{given.machines}-machines-{url.partition(':')[0]}"
        result = {"machine": described, "load": os.getloadavg(), "found": asdict(found)}
        file = RESULTS / f"fleet-claims-{kind}-{slug(described)}.json"
        file.write_text(json.dumps(result, indent=2) + "\n")


def measure(url: str, jobs: int = JOBS, machines: int = MACHINES, count: int = ROUNDS) -> Found:
    """All of it, on an empty database."""
    with closing(connect(url)) as database:
        migrate(database)
        database.run(lambda session: add_machines(session, machines))
        occupied = [f"vm-{n:04}" for n in range(machines - MACHINES)]
        for first in range(0, len(occupied), OCCUPIED_AT_ONCE):
            names = occupied[first : first + OCCUPIED_AT_ONCE]
            analyse(database)
            database.run(lambda session, names=names: occupy(session, names))
        insert_jobs(database, jobs)
        admitted, _ = timed(lambda: admit_all(database))
        analyse(database)
        freeze_imported_objects()
        filled, filled_processor = timed(lambda: fill(database))
        attempts = database.read(lambda s: s.scalar(select(func.count()).select_from(Attempt)))
        attempts = (attempts or 0) - (machines - MACHINES)
        analyse(database)
        show("waiting", waiting(database))
        _, queued, _, _ = rounds(database, count)
        show("claim, all queued", queued)
        mark(database, count)
        analyse(database)
        show("waiting", waiting(database))
        release, pending, marking, processor = rounds(database, count)
        show("claim, many pending", pending)
        sweep, sweep_processor = timed(lambda: asyncio.run(RequeueManager(database).sweep()))
        show("sweep", sweep)
        found = Found(
            machines=machines,
            jobs=jobs,
            admitted_per_second=jobs / admitted,
            filled_per_second=attempts / filled,
            filled_processor=1e3 * filled_processor / attempts,
            queued=queued,
            pending=pending,
            release=release,
            mark=marking,
            processor=1e3 * processor,
            sweep=1e3 * sweep,
            sweep_processor=1e3 * sweep_processor,
            racing=None,
            database_mb=database.read(size_of) / 2**20,
            memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        )
        if database.dialect == "sqlite" or count < RACERS:
            return found
        show(
            "one dispatcher", found
        )  # eight may wait for each other longer than the database lets them
        database.run(make_patient)
        return replace(found, racing=race(url, count))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of this process's processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def size_of(session: Session) -> int:
    """Bytes of the database, indexes included."""
    postgresql = "SELECT pg_database_size(current_database())"
    sqlite = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    is_sqlite = session.get_bind().dialect.name == "sqlite"
    return session.execute(text(sqlite if is_sqlite else postgresql)).scalar_one()


def add_machines(session: Session, count: int) -> None:
    """All observed just now; a third of the GPUs have less memory. And two projects with quotas."""
    seen = looked_at_rarely(session)
    names = [f"vm-{n:04}" for n in range(count)]
    session.execute(insert(VM), [{"vm_id": name, "contact": "ok", **seen} for name in names])
    gpus = [
        {
            "vm_id": name, "index": index, "uuid": f"GPU-{n}-{index}", "model": "A100",
            "memory_mb": 40_000 if n % 3 == 0 else 80_000,
        }
        for n, name in enumerate(names) for index in range(GPUS)
    ]  # fmt: skip
    session.execute(insert(GPU), gpus)
    for name in ("p0", "p1"):
        session.add(Project(name=name, max_gpus=QUOTA))


def occupy(session: Session, names: Sequence[str]) -> None:
    """An attempt on each of these machines, which holds all its GPUs."""
    now = database_time(session)
    jobs = [{**row(0), "job_id": f"on-{name}", "project": "earlier"} for name in names]
    session.execute(insert(Job), jobs)
    attempts = [
        {
            "job_id": job["job_id"], "generation": 0, "number": 0, "created_at": now, "owner": "bench",
            "lease_until": now + 1e6,
        }
        for job in jobs
    ]  # fmt: skip
    numbered = insert(Attempt).returning(Attempt.epoch, sort_by_parameter_order=True)
    epochs = dict(zip(names, session.scalars(numbered, attempts).all(), strict=True))
    session.execute(
        insert(Member), [{"epoch": epochs[name], "rank": 0, "vm_id": name} for name in names]
    )
    held = insert(Reservation).from_select(
        ["vm_id", "gpu_id", "epoch", "rank", "reserved_at"],
        select(Member.vm_id, GPU.gpu_id, Member.epoch, Member.rank, literal(now))
        .join(GPU, GPU.vm_id == Member.vm_id)
        .where(Member.vm_id.in_(names)),
    )
    session.execute(held)
    session.execute(
        update(Job)
        .where(Job.job_id.in_([job["job_id"] for job in jobs]))
        .values(status="running", admitted_at=now, resources={"gpus": GPUS})
    )


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
    while claim_once(database, limit=CLAIMED_AT_ONCE).claimed:
        pass


def claim_once(database: Database, limit: int, owner: str = "bench") -> claim.ClaimResult:
    """One transaction."""
    return database.run(
        lambda session: claim.claim(session, owner=owner, lease_seconds=3600.0, limit=limit)
    )


def mark_once(database: Database, found: claim.ClaimResult, owner: str = "bench") -> None:
    """A read and another one, as a dispatcher makes them after each claim that met jobs without room."""
    if (unplaced := found.unplaced) is not None:
        reasons = database.read(lambda session: claim.explain(session, unplaced))
        database.run(lambda session: claim.mark(session, unplaced, reasons, owner))


def mark(database: Database, count: int) -> None:
    """Claims that find no room."""
    for _ in range(count):
        mark_once(database, claim_once(database, limit=32))


def analyse(database: Database) -> None:
    """As an autovacuum or a day's work would have it."""
    database.run(lambda session: session.execute(text("ANALYZE")))


def rounds(database: Database, count: int) -> tuple[Quantiles, Quantiles, Quantiles, float]:
    """Release one attempt, claim what was woken and mark what found no room, again and again; at last the mean processor time."""
    releases: list[float] = []
    claims: list[float] = []
    marks: list[float] = []
    processor = time.process_time()
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
    processor = (time.process_time() - processor) / count
    return quantiles(releases), quantiles(claims), quantiles(marks), processor


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


def make_patient(session: Session) -> None:
    """All pending jobs have waited so long that capacity is withheld for them, as for gangs of a busy fleet."""
    waited = Job.waiting_since - 2 * LONG_WAIT_SECONDS
    session.execute(update(Job).where(Job.status == "pending").values(waiting_since=waited))


def race(url: str, count: int) -> Quantiles:
    """Eight processes release and claim at once."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(RACERS, mp_context=spawn) as pool:
        found = list(pool.map(partial(racer, url, count // RACERS), range(RACERS)))
    return quantiles([each for times in found for each in times])


def racer(url: str, count: int, number: int) -> list[float]:
    """The seconds of each claim of one of them; it waits a little in between, as a dispatcher does."""
    claims: list[float] = []
    freeze_imported_objects()
    with closing(connect(url)) as database:
        for _ in range(count):
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
    main()
