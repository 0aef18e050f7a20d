"""A fleet in one process: a real database, fake machines, and real dispatchers with short intervals.

Nothing here waits for time to pass: `until` lets the machines work until a condition holds, and leases run out when a test says so. The
machines and the database's job states are recorded in one history, which `check_history` checks.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Select, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.controller import Collected, MemberOutput
from groupwise.jobs.fleet.attempts.effects import Gateway, Hook, Side
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.attempts.watching import PollTiming
from groupwise.jobs.fleet.dispatcher import (
    DispatcherDependencies,
    GlobalJobDispatcher,
    Intervals,
    Tuning,
)
from groupwise.jobs.fleet.operations import jobs, machines
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.queue import admission
from groupwise.jobs.fleet.queue.request import JobRequest
from groupwise.jobs.fleet.states import Cleanup, Contact
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Job, Reservation
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.host import Host
from tests.fake_hosts import FakeHosts
from tests.history_checker import assert_no_violations
from tests.processes import TIMEOUT_S

Row = TypeVar("Row")

SOMEBODY = Actor("user:test")


class NoJitter(random.Random):
    """Always returns the minimum: no pause before a retry."""

    def uniform(self, a: float, b: float) -> float:
        return a

    def random(self) -> float:
        return 0.0


class SilentNotifier:
    """A notifier that never receives anything."""

    async def wait(self, timeout: float) -> frozenset[str]:
        await asyncio.sleep(timeout)
        return frozenset()


class Fetched:
    """Fetched logs, checkpoints and artefacts, kept in memory."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, int], bytes] = {}
        self.mirrored: list[tuple[str, int]] = []
        self.problem: str | None = None
        self.fault: Exception | None = None
        """The error to raise when artefacts are collected."""
        self.collections = 0

    async def catch_up(self, output: MemberOutput, size: int) -> None:
        found = await output.runner.log(output.job_id, output.epoch, 0)
        self.logs[output.job_id, output.epoch] = found.data[:size]

    async def mirror(self, output: MemberOutput) -> None:
        self.mirrored.append((output.job_id, output.epoch))

    async def collect(self, output: MemberOutput) -> Collected:
        self.collections += 1
        if self.fault is not None:
            raise self.fault
        await output.runner.manifest(output.job_id, output.epoch)
        return Collected(self.problem)


def quick() -> Tuning:
    return Tuning(
        intervals=Intervals(renew=0.2, adopt=0.1, sweep=0.02, reconcile=0.2, after_crash=0.01),
        poll_timing=PollTiming(first=0.004, longest=0.02, idle=0.05, poll=0.5),
        rng=NoJitter(),
    )


def nothing(name: str, side: Side) -> None:
    """A hook that does nothing: the dispatcher never dies."""


class InProcessFleet:
    """A database, machines and dispatchers."""

    def __init__(self, database: Database, folder: Path, vms: Mapping[str, Sequence[str]]) -> None:
        self.database = database
        self.rack = FakeHosts(vms)
        self.fetched = Fetched()
        self.store = BlobStore(folder / "blobs")
        self.passed = 0.0
        """Seconds to add to the real clock, for dispatchers."""
        self.silence_noticed = False
        self._told: dict[str, tuple[str, int]] = {}
        database.run(lambda s: _add_machines(s, vms))

    # what people do

    def submit(self, job_id: str, **request: Any) -> None:
        wanted = JobRequest.model_validate(
            {"arguments": ["train", "--quickly"], "resources": {"gpus": 1}} | request
        )
        self.database.run(
            lambda s: admission.submit(
                s, wanted, actor="user:test", project="default", job_id=job_id
            )
        )
        self.rack.record("accepted", job=job_id)

    def cancel(self, job_id: str) -> None:
        self.rack.record("cancel_requested", job=job_id)
        self.database.run(lambda s: jobs.cancel(s, SOMEBODY, job_id))

    def lose(self, vm_id: str) -> None:
        self.rack.record("lost", vm=vm_id)
        self.database.run(lambda s: machines.lost(s, SOMEBODY, vm_id))

    # dispatchers

    def dispatcher(self, owner: str = "one", hook: Hook = nothing) -> GlobalJobDispatcher:
        parts = DispatcherDependencies(
            database=self.database,
            host=self.host,
            listener=SilentNotifier(),
            logs=self.fetched,
            checkpoints=self.fetched,
            collector=self.fetched,
            store=self.store,
        )
        return GlobalJobDispatcher(
            parts,
            replace(quick(), clock=self._clock),
            owner=owner,
            gateway=Gateway(self.database, hook),
        )

    def _clock(self) -> float:
        """The dispatchers' clock, which they read if a machine is silent."""
        self.silence_noticed = True
        return time.monotonic() + self.passed

    def host(self, machine: Machine) -> Host:
        return self.rack[machine.vm_id]

    def expire_leases(self) -> None:
        """Let half a minute pass in which no dispatcher renews its leases."""
        self.database.run(lambda s: s.execute(update(Attempt).values(lease_until=0.0)))

    # looking

    def job(self, job_id: str) -> Job:
        return self._rows(select(Job).where(Job.job_id == job_id))[0]

    def attempts(self, job_id: str) -> list[Attempt]:
        return self._rows(select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.epoch))

    def open_reservations(self) -> list[Reservation]:
        return self._rows(select(Reservation).where(Reservation.released_at.is_(None)))

    def _rows(self, query: Select[Row]) -> list[Row]:
        def look(session: Session) -> list[Row]:
            found = list(session.scalars(query))
            session.expunge_all()
            return found

        return self.database.read(look)

    def is_clean(self) -> bool:
        """True if nothing is left to do about any attempt."""
        query = select(Attempt.epoch).where(Attempt.cleanup != Cleanup.CLEAN).limit(1)
        return self.database.read(lambda s: s.scalar(query)) is None

    def has(self, job_id: str, *statuses: str) -> Callable[[], bool]:
        return lambda: self.job(job_id).status in statuses

    def note(self) -> None:
        """Record each job's status in the database in the history."""
        rows = self.database.read(
            lambda s: s.execute(select(Job.job_id, Job.status, Job.generation, Job.exit_code)).all()
        )
        for job_id, status, generation, exit_code in rows:
            if self._told.get(job_id) != (status, generation):
                self._told[job_id] = (status, generation)
                self.rack.record(
                    "status", job=job_id, status=status, generation=generation, exit_code=exit_code
                )

    async def until(self, condition: Callable[[], bool], *, ticks: bool = True) -> None:
        """Let machines work and dispatchers run until the condition holds."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    self.note()
                    if condition():
                        return
                    if ticks:
                        self.rack.tick()
                    await asyncio.sleep(0.004)
        except TimeoutError:
            states = {a.epoch: (a.state, a.cleanup, a.evidence) for a in self._all_attempts()}
            raise AssertionError(
                f"condition not reached; attempts: {states}\n{self.rack.history}"
            ) from None

    def _all_attempts(self) -> list[Attempt]:
        return self._rows(select(Attempt))

    def check_history(self, *, settled: bool = True) -> None:
        self.note()
        history = list(self.rack.history)
        for held in self.open_reservations():
            record = {"what": "reserved", "vm": held.vm_id, "gpu": held.gpu_id, "epoch": held.epoch}
            job = next(a.job_id for a in self._all_attempts() if a.epoch == held.epoch)
            history.append({"at": len(history), "job": job, **record})
        assert_no_violations(history, settled=settled)


def _add_machines(session: Session, vms: Mapping[str, Sequence[str]]) -> None:
    for vm_id, gpus in vms.items():
        session.add(VM(vm_id=vm_id, contact=Contact.OK, observed_round=database_time(session)))
        session.flush()
        for index, uuid in enumerate(gpus):
            session.add(
                GPU(vm_id=vm_id, index=index, uuid=uuid, model="Fake 80GB", memory_mb=81_920)
            )
