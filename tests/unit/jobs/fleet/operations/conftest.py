"""A small fleet in the database: machines, GPUs, jobs and attempts as the control plane would have written them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Event, Job, Member, Reservation
from tests.unit.jobs.fleet.queue_helpers import insert_admitted

T = TypeVar("T")
ADA = Actor("user:ada")


@dataclass
class SmallFleet:
    """Rows, and operations on them as `ada`."""

    database: Database
    actor: Actor = ADA
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def do(self, operation: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self.database.run(lambda session: operation(session, self.actor, *args, **kwargs))

    def as_(self, *projects: str) -> "SmallFleet":
        return SmallFleet(self.database, Actor("key:k1", frozenset(projects)), self._numbers)

    def machine(self, vm_id: str = "vm-1", gpus: int = 0, **columns: Any) -> str:
        def write(session: Session) -> None:
            now = database_time(session)
            row: dict[str, Any] = {"user": "u", "contact": "ok", "observed_round": now, **columns}
            session.add(VM(vm_id=vm_id, **row))
            session.flush()
            for index in range(gpus):
                session.add(GPU(vm_id=vm_id, index=index, uuid=f"GPU-{vm_id}-{index}"))

        self.database.run(write)
        return vm_id

    def job(self, status: str = "queued", **columns: Any) -> str:
        job_id = columns.pop("job_id", f"job-{next(self._numbers)}")

        def write(session: Session) -> None:
            row: dict[str, Any] = {
                "job_type": "COMMAND", "rank": float(next(self._numbers)),
                "admitted_at": database_time(session), "request": {"arguments": ["true"]},
                "spec": {"arguments": ["true"]}, "resources": {"gpus": 0}, "shape": "s", **columns,
            }  # fmt: skip
            insert_admitted(session, job_id=job_id, **row)
            self._lead(session, job_id, status)

        self.database.run(write)
        return job_id

    def _lead(self, session: Session, job_id: str, status: str) -> None:
        """Along a way that the database allows."""
        ways = {
            "queued": [], "pending": ["pending"], "held": ["held"], "running": ["running"],
            "cancelled": ["cancelled"], "completed": ["running", "completed"],
            "failed": ["running", "failed"],
        }  # fmt: skip
        job = session.get_one(Job, job_id)
        for step in ways[status]:
            job.status = step
            session.flush()

    def attempt(
        self,
        job_id: str,
        vm_id: str,
        *,
        state: str = "running",
        cleanup: str = "pending",
        gpu: int | None = None,
    ) -> int:
        order = ["reserved", "launching", "running", "collecting", "ended"]

        def write(session: Session) -> int:
            now = database_time(session)
            attempt = Attempt(job_id=job_id, generation=0, number=0, created_at=now)
            session.add(attempt)
            session.flush()
            session.add(Member(epoch=attempt.epoch, rank=0, vm_id=vm_id))
            on = None
            if gpu is not None:
                query = select(GPU.gpu_id).where(GPU.vm_id == vm_id, GPU.index == gpu)
                on = session.scalars(query).one()
            held = Reservation(
                vm_id=vm_id,
                gpu_id=on,
                slot=0 if on is None else None,
                epoch=attempt.epoch,
                rank=0,
                reserved_at=now,
                released_at=now if cleanup == "clean" else None,
            )
            session.add(held)
            session.flush()
            for step in order[1 : order.index(state) + 1]:
                attempt.outcome = "succeeded" if step == "ended" else None
                attempt.state = step
                session.flush()
            attempt.cleanup = cleanup
            return attempt.epoch

        return self.database.run(write)

    def row(self, job_id: str) -> Job:
        return self._loaded(Job, job_id)

    def vm(self, vm_id: str) -> VM:
        return self._loaded(VM, vm_id)

    def _loaded(self, table: type[T], key: str) -> T:
        def read(session: Session) -> T:
            found = session.get_one(table, key)
            session.expunge(found)
            return found

        return self.database.read(read)

    def events(self) -> list[tuple[str, str]]:
        """Who did what."""

        def read(session: Session) -> list[tuple[str, str]]:
            query = select(Event.actor, Event.kind).order_by(Event.event_id)
            return list(session.execute(query))

        return self.database.read(read)


@pytest.fixture
def small(database: Database) -> SmallFleet:
    return SmallFleet(database)
