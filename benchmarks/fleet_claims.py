"""How long a dispatcher needs to claim jobs while very many wait: `python -m benchmarks.fleet_claims [POSTGRESQL_URL]`.

Without a URL it starts a PostgreSQL of its own. 100,000 jobs of several shapes and projects are queued on a fleet that is nearly full. Then
one GPU after another comes free: the release with its waking, and the claim that follows, are timed one by one. Once with the jobs still
queued, and once with all of them pending, as they are after dispatchers have looked at them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from groupwise.fleet.queue import admission, capacity, claim
from groupwise.fleet.store.database import Database, connect, migrate, seconds
from groupwise.fleet.store.tables import GPU, VM, Attempt, Job, Reservation
from tests.postgres import server

JOBS = int(os.environ.get("JOBS", "100000"))
MACHINES = 50
GPUS = 8
ROUNDS = 200


def main(url: str | None) -> None:
    """Prints a line for each measurement."""
    if url is not None:
        measure(connect(url))
        return
    with server() as running:
        measure(connect(running.new_database()))


def measure(database: Database) -> None:
    """All of it, on an empty database."""
    migrate(database)
    database.run(add_machines)
    timed("rows inserted", lambda: database.run(insert_jobs), JOBS)
    timed("admitted", lambda: admit_all(database), JOBS)
    timed("fleet filled", lambda: fill(database), MACHINES * GPUS)
    database.run(lambda session: session.execute(text("ANALYZE")))
    print(f"waiting: {waiting(database)}")
    rounds("claim, all queued", database)
    timed("all marked as pending", lambda: mark_all(database), JOBS)
    database.run(lambda session: session.execute(text("ANALYZE")))
    print(f"waiting: {waiting(database)}")
    rounds("claim, all pending", database)
    database.close()


def add_machines(session: Session) -> None:
    """All observed just now."""
    for n in range(MACHINES):
        session.add(VM(vm_id=f"vm-{n:03}", contact="ok", observed_round=seconds(session) + 3600))
        session.flush()
        for index in range(GPUS):
            uuid = f"GPU-{n}-{index}"
            session.add(
                GPU(vm_id=f"vm-{n:03}", index=index, uuid=uuid, memory_mb=80_000, model="A100")
            )


def insert_jobs(session: Session) -> None:
    """By hand, of 10 projects and 4 shapes each."""
    session.execute(
        text(
            "INSERT INTO jobs (job_id, job_type, project, request) "
            "SELECT 'j' || lpad(n::text, 6, '0'), 'COMMAND', 'p' || (n % 10), "
            "jsonb_build_object('arguments', jsonb_build_array('true'), "
            "'resources', jsonb_build_object('gpus', 1 + (n / 10) % 4)) "
            "FROM generate_series(1, :jobs) AS n"
        ),
        {"jobs": JOBS},
    )


def admit_all(database: Database) -> None:
    """As a dispatcher does."""
    while database.run(lambda session: admission.admit_new(session, 500)):
        pass


def fill(database: Database) -> None:
    """Until no GPU is free."""
    while claim_once(database, limit=32):
        pass


def claim_once(database: Database, limit: int) -> list[claim.Claimed]:
    """One transaction."""
    return database.run(
        lambda session: claim.claim(session, owner="bench", lease_seconds=3600.0, limit=limit)
    )


def mark_all(database: Database) -> None:
    """Claims that find no room, until nothing is queued."""
    queued = select(func.count()).select_from(Job).where(Job.status == "queued")
    while database.run(lambda session: session.scalar(queued)):
        claim_once(database, limit=32)


def rounds(name: str, database: Database) -> None:
    """Release one attempt, then claim what was woken, again and again."""
    releases: list[float] = []
    claims: list[float] = []
    placed = 0
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        database.run(release_oldest)
        released = time.perf_counter()
        placed += len(claim_once(database, limit=4))
        claims.append(time.perf_counter() - released)
        releases.append(released - begun)
    print(f"{name}: {quantiles(claims)}; {placed} placed in {ROUNDS} rounds")
    print(f"{name}, release before it: {quantiles(releases)}")


def release_oldest(session: Session) -> None:
    """The oldest attempt ends."""
    epoch = session.scalars(
        select(Attempt.epoch).where(Attempt.state != "ended").order_by(Attempt.epoch).limit(1)
    ).one()
    ended = update(Attempt).where(Attempt.epoch == epoch).returning(Attempt.job_id)
    job_id = session.scalars(ended.values(state="ended", outcome="void", ended_at=1.0)).one()
    session.execute(update(Job).where(Job.job_id == job_id).values(status="completed"))
    vm_ids = session.scalars(
        update(Reservation)
        .where(Reservation.epoch == epoch)
        .values(released_at=1.0)
        .returning(Reservation.vm_id)
    ).all()
    capacity.wake(session, vm_ids=set(vm_ids))


def waiting(database: Database) -> str:
    """How many jobs stand in which status."""
    query = select(Job.status, func.count()).group_by(Job.status).order_by(Job.status)
    rows = database.run(lambda session: session.execute(query).all())
    return ", ".join(f"{status} {count}" for status, count in rows)


def timed(name: str, work: Callable[[], object], units: int) -> None:
    """How long something takes once."""
    begun = time.perf_counter()
    work()
    took = time.perf_counter() - begun
    print(f"{name}: {took:.1f} s, {units / took:.0f} a second", flush=True)


def quantiles(times: list[float]) -> str:
    """In milliseconds."""
    cuts = statistics.quantiles(times, n=100)
    return (
        f"p50 {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms, worst {max(times) * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
