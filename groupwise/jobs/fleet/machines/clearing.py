"""Removes the files of jobs from machines: working folders of attempts, and files that no job there needs.

A dispatcher clears one machine after the other, concurrently with its other work and far more slowly. It keeps no state: the machine lists
the folders that it has, the database knows which of these attempts are over, so several dispatchers, or one that dies half-way, do no harm.

    folder of an attempt      goes some time after the attempt has ended, once its machine was seen to hold nothing of it and no more is
                              fetched from it. Users inspect the folders of failures, so those stay longer. Until a job has ended, its last
                              folder on a machine stays. If there are very many folders, the oldest go before their time
    of a job that was pruned  goes at once: the events prove that the attempt was ours, and over
    files by hash             go once they were neither sent nor asked for in a day, and no live attempt there needs them
    of a doctor that died     goes after an hour
    anything else             is not ours, or was ours before the database was restored from a backup: it is never touched

`forget` leaves a mark on the machine: a launch that is still on its way there is then refused. A file that a newly claimed attempt needs
may be swept: its launch is then refused before anything starts, and the file is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from groupwise.core.errors import RunError
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.states import FINAL, AttemptState, Cleanup, Outcome
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import Attempt, Event, Job, Member
from groupwise.jobs.hosts.answers import Observation, RunnerState
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.host import HostError, RunnerRefused

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Machines that are cleared at the same time; all other work of a dispatcher is more urgent."""
MAX_FOLDERS = 500
"""Maximum folders of ended attempts on one machine: each costs time whenever the machine is observed."""
MIN_FOLDER_SECONDS = 3600.0
"""Minimum time in seconds that a folder stays after its attempt has ended."""
BLOB_SECONDS = 86_400.0
"""Seconds since a file was last sent or asked for, after which it may go."""
SWEPT_EVERY = 3600.0
"""Seconds between two sweeps of one machine, by one dispatcher."""
MAX_ROUND_SECONDS = 60.0
"""Maximum seconds spent on the folders of one machine in one round; the next round continues."""
DOCTORS = re.compile(r"doctor-[0-9a-f]{10}")
"""Names of the tiny jobs with which `groupwise fleet doctor` tries machines; they are in no table."""
OVER = frozenset(
    {
        RunnerState.EXITED,
        RunnerState.LOST,
        RunnerState.REBOOTED,
        RunnerState.VOIDED,
        RunnerState.REFUSED,
    }
)
SUCCEEDED = frozenset({Outcome.SUCCEEDED, Outcome.VOID})
"""Outcomes that need no investigation, so their folders go sooner."""

Name = tuple[str, int]
"""Job id and epoch of an attempt."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Seconds that folders of attempts stay on their machines after the end."""

    succeeded: float = 86_400.0
    others: float = 3 * 86_400.0


def is_doctor_attempt(job: str, epoch: int) -> bool:
    """True if an attempt that is in no table is the doctor's. Ask only about those: any job may have such a name."""
    return epoch == 1 and DOCTORS.fullmatch(job) is not None


class MachineClearing:
    """Clears the machines of the fleet, for one dispatcher."""

    def __init__(
        self,
        gateway: Gateway,
        retention: Retention,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._retention = retention
        self._clock = clock
        self._swept: dict[str, float] = {}

    async def clear_all(self, runner: Callable[[Machine], Runner]) -> None:
        """Clear all machines of the fleet."""
        machines = await self._gateway.read(records.machines)
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(machine: Machine) -> None:
            async with limit:
                await self.clear(machine, runner)

        await asyncio.gather(*(one(machine) for machine in machines))

    async def clear(self, machine: Machine, runner_of: Callable[[Machine], Runner]) -> None:
        """Clear one machine. Errors are logged, and the next round tries again."""
        if machine.lost:
            return  # the attempts given up on it are cleaned up first
        try:
            runner = runner_of(machine)
            observation = await runner.observe(probe=records.NO_PROBE)
            await self._forget_attempts(machine, runner, observation)
            await self._sweep_blobs(machine, runner)
        except HostError as error:
            log.debug("%s is not cleared: %s", machine.vm_id, error)
        except RunError as error:
            log.warning("%s is not cleared: %s", machine.vm_id, error)
        except Exception:  # a row written by hand must not keep other machines from being cleared
            log.exception("%s is not cleared", machine.vm_id)

    async def _forget_attempts(
        self, machine: Machine, runner: Runner, observation: Observation
    ) -> None:
        ended_attempts = {(s.job, s.epoch): s for s in observation.attempts if s.state in OVER}
        if not ended_attempts:
            return
        forgettable_names = await self._gateway.read(
            lambda s: forgettable(s, machine.vm_id, list(ended_attempts), self._retention)
        )
        for name, state in ended_attempts.items():
            ended_at = None if state.exit is None else state.exit.finished_at
            if ended_at is not None and observation.time is not None and is_doctor_attempt(*name):
                # Both times are by the machine's clock.
                forgettable_names += (
                    [name] if observation.time > ended_at + MIN_FOLDER_SECONDS else []
                )
        deadline = self._clock() + MAX_ROUND_SECONDS
        for job, epoch in forgettable_names:
            if self._clock() > deadline:
                return
            try:
                await runner.forget(job, epoch)
            except RunnerRefused as error:
                log.info("%s keeps %s.%d: %s", machine.vm_id, job, epoch, error)

    async def _sweep_blobs(self, machine: Machine, runner: Runner) -> None:
        now = self._clock()
        if now < self._swept.get(machine.vm_id, -SWEPT_EVERY) + SWEPT_EVERY:
            return
        needed = await self._gateway.read(lambda s: needed_blobs(s, machine.vm_id))
        await runner.sweep(needed, older_than=BLOB_SECONDS)
        self._swept[machine.vm_id] = now


# --- removable files ------------------------------------------------------------------------------


def forgettable(
    session: Session, vm_id: str, names: Sequence[Name], retention: Retention
) -> list[Name]:
    """The attempts that a machine reports as over and whose folders may be deleted there, the oldest first."""
    now = database_time(session)
    rows = _attempt_rows(session, vm_id, names)
    unfinished = session.execute(
        select(Attempt.job_id, func.max(Attempt.epoch))
        .join(Member, Member.epoch == Attempt.epoch)
        .join(Job, Job.job_id == Attempt.job_id)
        .where(
            Member.vm_id == vm_id,
            Attempt.job_id.in_({job for job, _ in rows}),
            Job.status.not_in(FINAL),
        )
        .group_by(Attempt.job_id)
    )
    newest_epochs = dict(unfinished.all())  # the newest folder of each job that has not ended
    free_names = [
        name
        for name, row in rows.items()
        if _is_free(row) and newest_epochs.get(name[0]) != name[1]
    ]
    free_names.sort(key=lambda name: -rows[name].ended_at)
    due_names: list[Name] = []
    for index, name in enumerate(free_names):
        row = rows[name]
        seconds = retention.succeeded if row.outcome in SUCCEEDED else retention.others
        if now - row.ended_at >= (MIN_FOLDER_SECONDS if index >= MAX_FOLDERS else seconds):
            due_names.append(name)
    return [
        *_attempts_of_pruned_jobs(session, [n for n in names if n not in rows]),
        *reversed(due_names),
    ]


def _attempt_rows(session: Session, vm_id: str, names: Iterable[Name]) -> dict[Name, Any]:
    wanted_names = set(names)
    rows = session.execute(
        select(
            Attempt.job_id,
            Attempt.epoch,
            Attempt.state,
            Attempt.cleanup,
            Attempt.outcome,
            Attempt.ended_at,
            Member.released,
        )
        .join(Member, Member.epoch == Attempt.epoch)
        .where(Member.vm_id == vm_id, Attempt.epoch.in_({epoch for _, epoch in wanted_names}))
    )
    return {name: row for row in rows if (name := (row.job_id, row.epoch)) in wanted_names}


def _is_free(row: Any) -> bool:
    """True if the attempt is over and its machine holds nothing of it: it is neither driven nor fetched from."""
    has_ended = row.state == AttemptState.ENDED and row.cleanup == Cleanup.CLEAN
    return has_ended and row.released and row.ended_at is not None


def _attempts_of_pruned_jobs(session: Session, names: Sequence[Name]) -> list[Name]:
    """Attempts without a row because their jobs were pruned, not because the database was restored from a backup."""
    was_clean = (
        select(Event.job_id, Event.epoch)
        .where(
            Event.job_id.in_({job for job, _ in names}),
            Event.kind == events.ATTEMPT_CLEAN,
            ~exists().where(Attempt.epoch == Event.epoch),
        )
        .distinct()
    )
    cleaned = {(job, epoch) for job, epoch in session.execute(was_clean)}
    return [name for name in names if name in cleaned]


def needed_blobs(session: Session, vm_id: str) -> list[str]:
    """Hashes of the files that live attempts on the machine start with."""
    rows = session.execute(
        select(
            Attempt.spec["files"].label("own"),
            Job.spec["files"].label("files"),
            Attempt.resume_from,
        )
        .join(Job, Job.job_id == Attempt.job_id)
        .join(Member, Member.epoch == Attempt.epoch)
        .where(Member.vm_id == vm_id, Attempt.state != AttemptState.ENDED)
    )
    manifests: list[Mapping[str, Sequence[Any]]] = []
    for own_files, files, resume in rows:
        manifests += [own_files or files or {}, resume["manifest"] if resume else {}]
    return sorted({str(entry[0]) for manifest in manifests for entry in manifest.values()})
