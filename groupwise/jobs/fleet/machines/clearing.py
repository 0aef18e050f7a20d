"""Clearing away what jobs have left on machines: working folders of attempts, and files that no job there needs.

A dispatcher does it, a machine after the other, beside everything else and far more slowly. Nothing is remembered: the machine says which
folders it has, the database which of these attempts are over, and so several dispatchers, or one that dies half-way, do no harm.

    folder of an attempt      goes a while after it has ended, its machine was seen to hold nothing of it, and nobody fetches anything more.
                              People look into the folders of failures, so those stay longer. While a job goes on, its last folder on a
                              machine stays. Where there are very many, the oldest go before their time
    of a job that was pruned  goes at once: the events know that the attempt was ours, and over
    files by hash             go when nobody has sent or asked for them for a day, and no live attempt there needs them
    of a doctor that died     goes after an hour
    anything else             is somebody else's, or was ours before the database was set back: it is never touched

`forget` leaves a mark on the machine, so that a launch which is still under way to it finds itself refused. What an attempt needs that is
claimed meanwhile may be swept: its launch is refused for the want of it, before anything is claimed there, and it is sent again.
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
from groupwise.jobs.fleet.store.database import seconds
from groupwise.jobs.fleet.store.tables import Attempt, Event, Job, Member
from groupwise.jobs.hosts.answers import MemberState, Observation, RunnerState
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.port import HostError, RunnerRefused

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Machines: whatever else a dispatcher does is more urgent."""
MOST_FOLDERS = 500
"""Most folders of ended attempts on one machine: each is looked at whenever the machine is."""
LEAST = 3600.0
"""Seconds that a folder stays in any case after its attempt has ended."""
BLOBS = 86_400.0
"""Seconds since a file was sent or asked for last."""
SWEPT_EVERY = 3600.0
"""Seconds between two sweeps of one machine, by one dispatcher."""
LONGEST = 60.0
"""Seconds that are spent on the folders of one machine in one round; the next goes on."""
DOCTORS = re.compile(r"doctor-[0-9a-f]{10}")
"""Names of the tiny jobs with which `groupwise fleet doctor` tries machines; they stand in no table."""
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
"""Job and epoch."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Seconds that folders of attempts stay on their machines after the end."""

    succeeded: float = 86_400.0
    others: float = 3 * 86_400.0


def is_doctors(job: str, epoch: int) -> bool:
    """Whether an attempt that stands in no table is the doctor's. Only of use for such: anybody may name a job so."""
    return epoch == 1 and DOCTORS.fullmatch(job) is not None


class MachineClearing:
    """Clears machines away, for one dispatcher."""

    def __init__(
        self,
        gateway: Gateway,
        keeping: Keeping,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._keeping = keeping
        self._clock = clock
        self._swept: dict[str, float] = {}

    async def clear_all(self, runner: Callable[[Machine], Runner]) -> None:
        """All machines of the fleet."""
        machines = await self._gateway.look(records.machines)
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(machine: Machine) -> None:
            async with limit:
                await self.clear(machine, runner)

        await asyncio.gather(*(one(machine) for machine in machines))

    async def clear(self, machine: Machine, runner_of: Callable[[Machine], Runner]) -> None:
        """One machine. What goes wrong is for the next round."""
        if machine.lost:
            return  # it is emptied first of what was given up
        try:
            runner = runner_of(machine)
            seen = await runner.observe(probe=records.NO_PROBE)
            await self._forget(machine, runner, seen)
            await self._sweep(machine, runner)
        except HostError as error:
            log.debug("%s is not cleared: %s", machine.vm_id, error)
        except RunError as error:
            log.warning("%s is not cleared: %s", machine.vm_id, error)
        except Exception:  # a row written by hand must not keep the others from being looked at
            log.exception("%s is not cleared", machine.vm_id)

    async def _forget(self, machine: Machine, runner: Runner, seen: Observation) -> None:
        over = {(s.job, s.epoch): s for s in seen.attempts if s.state in OVER}
        if not over:
            return
        due = await self._gateway.look(
            lambda s: forgettable(s, machine.vm_id, list(over), self._keeping)
        )
        due += [name for name, state in over.items() if _left_by_a_doctor(state, seen.time)]
        until = self._clock() + LONGEST
        for job, epoch in due:
            if self._clock() > until:
                return
            try:
                await runner.forget(job, epoch)
            except RunnerRefused as error:
                log.info("%s keeps %s.%d: %s", machine.vm_id, job, epoch, error)

    async def _sweep(self, machine: Machine, runner: Runner) -> None:
        now = self._clock()
        if now < self._swept.get(machine.vm_id, -SWEPT_EVERY) + SWEPT_EVERY:
            return
        needed = await self._gateway.look(lambda s: needed_blobs(s, machine.vm_id))
        await runner.sweep(needed, older_than=BLOBS)
        self._swept[machine.vm_id] = now


def _left_by_a_doctor(state: MemberState, now: float | None) -> bool:
    """`now`: by the machine's clock, as the moment at which it ended."""
    ended = None if state.exit is None else state.exit.finished_at
    if ended is None or now is None or not is_doctors(state.job, state.epoch):
        return False
    return now > ended + LEAST


# --- what may go ----------------------------------------------------------------------------------


def forgettable(
    session: Session, vm_id: str, names: Sequence[Name], keeping: Keeping
) -> list[Name]:
    """Of the attempts that a machine says are over there: those whose folders nobody needs any more, the oldest first."""
    now = seconds(session)
    known = _known(session, vm_id, names)
    last = _last_of_jobs_that_go_on(session, vm_id, {job for job, _ in known})
    free = [name for name, row in known.items() if _is_free(row) and last.get(name[0]) != name[1]]
    free.sort(key=lambda name: -known[name].ended_at)
    due = [
        name
        for place, name in enumerate(free)
        if now - known[name].ended_at
        >= (LEAST if place >= MOST_FOLDERS else _kept_for(known[name].outcome, keeping))
    ]
    return [*_pruned(session, [n for n in names if n not in known]), *reversed(due)]


def _known(session: Session, vm_id: str, names: Iterable[Name]) -> dict[Name, Any]:
    wanted = set(names)
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
        .where(Member.vm_id == vm_id, Attempt.epoch.in_({epoch for _, epoch in wanted}))
    )
    return {name: row for row in rows if (name := (row.job_id, row.epoch)) in wanted}


def _is_free(row: Any) -> bool:
    """True if it is over and its machine holds nothing of it, so that it is neither driven nor fetched from."""
    over = row.state == AttemptState.ENDED and row.cleanup == Cleanup.CLEAN
    return over and row.released and row.ended_at is not None


def _kept_for(outcome: str | None, keeping: Keeping) -> float:
    return keeping.succeeded if outcome in SUCCEEDED else keeping.others


def _last_of_jobs_that_go_on(session: Session, vm_id: str, jobs: Iterable[str]) -> dict[str, int]:
    rows = session.execute(
        select(Attempt.job_id, func.max(Attempt.epoch))
        .join(Member, Member.epoch == Attempt.epoch)
        .join(Job, Job.job_id == Attempt.job_id)
        .where(Member.vm_id == vm_id, Attempt.job_id.in_(set(jobs)), Job.status.not_in(FINAL))
        .group_by(Attempt.job_id)
    )
    return dict(rows.all())


def _pruned(session: Session, names: Sequence[Name]) -> list[Name]:
    """Attempts that have no row any more, because somebody has cleared their jobs away, and not because the database was set back."""
    was_clean = (
        select(Event.job_id, Event.epoch)
        .where(
            Event.job_id.in_({job for job, _ in names}),
            Event.kind == events.ATTEMPT_CLEAN,
            ~exists().where(Attempt.epoch == Event.epoch),
        )
        .distinct()
    )
    over = {(job, epoch) for job, epoch in session.execute(was_clean)}
    return [name for name in names if name in over]


def needed_blobs(session: Session, vm_id: str) -> list[str]:
    """Files that live attempts there begin with."""
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
    for own, files, resume in rows:
        manifests += [own or files or {}, resume["manifest"] if resume else {}]
    return sorted({str(entry[0]) for manifest in manifests for entry in manifest.values()})
