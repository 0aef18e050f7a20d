"""The dispatcher: claims jobs from the queue, and drives their attempts until nothing is left to do.

`GlobalJobDispatcher` is one of any number that share a database. Each runs these loops concurrently:

    renewing     every 8 s, one statement renews the lease of every attempt that it owns and returns the list of them. Any attempt of
                 that list that is not being driven is driven from then on
    claiming     at every notification of new jobs, and at least every 2 s: admit new rows, claim the jobs for which there is room
    adopting     every 2 s: take over attempts whose owner has not renewed its lease; at the start this finds those of ended dispatchers
    requests     every 2 s: cancellations and lost machines wake the drives that they concern. If the poller saw a machine reboot, or
                 answer again, the machine is asked at once, over a new connection, since the kept one may be dead without a sign. If its
                 row has changed, it is asked at its new address
    clearing     every ten minutes: remove files that are no longer needed, from machines and from the local blob store
    reconciling  every minute: look for attempts that machines run and no dispatcher drives. A lower epoch is killed; an unknown job is
                 recorded and left alone; a machine that was declared lost and answers again is emptied, and then used again

A dispatcher that cannot renew stops all its drives before its lease runs out. It measures the lease by its own clock, from before the
request was sent: after that time another dispatcher may own the attempts. Stopping or killing a dispatcher ends no job: machines continue
without it.

An error in one loop is logged, and the loop restarts after a pause; the other loops continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets as randomness
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from groupwise.core.errors import RunError
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.attempts.controller import (
    AttemptController,
    CheckpointMirror,
    Collector,
    ControllerDependencies,
    LogMirror,
)
from groupwise.jobs.fleet.attempts.decide import ObservedState, OrphanAction, orphan_action
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.attempts.records import LEASE, Machine
from groupwise.jobs.fleet.attempts.watching import MachineWatch, MachineWatches, PollTiming
from groupwise.jobs.fleet.attempts.write_batching import BatchedReads
from groupwise.jobs.fleet.files.clearing import EVERY, clear_away
from groupwise.jobs.fleet.machines.clearing import MachineClearing, Retention, is_doctor_attempt
from groupwise.jobs.fleet.machines.connections import runner_of
from groupwise.jobs.fleet.queue import admission, claim
from groupwise.jobs.fleet.secrets import DEFAULT_SECRETS, AllowedSecrets
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.hosts.answers import MemberState, RunnerState
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.host import Host, HostError

log = logging.getLogger(__name__)

CLAIMED_AT_ONCE = 50
ADMITTED_AT_ONCE = 200
MAY_HAVE_LEFT_PROCESSES = frozenset(
    {RunnerState.CLAIMED, RunnerState.RUNNING, RunnerState.LOST, RunnerState.VOIDED}
)
"""Voided too: the folder of a running attempt may have been removed by hand; the attempt then looks as if it never started."""


class Listener(Protocol):
    """The part of a notifier that the dispatcher needs: waiting for a notification."""

    async def wait(self, timeout: float) -> frozenset[str]:
        """Ids of jobs that were announced; empty on a timeout."""
        ...


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals in seconds. Tests use shorter ones."""

    lease: float = LEASE
    renew: float = 8.0
    adopt: float = 2.0
    sweep: float = 2.0
    reconcile: float = 60.0
    clear: float = 600.0
    after_crash: float = 5.0
    """Delay in seconds before a crashed task is restarted."""


@dataclass(frozen=True, slots=True)
class DispatcherDependencies:
    """What a dispatcher works with."""

    database: Database
    host: Callable[[Machine], Host]
    """Returns the connection to a machine. It may return the same one for the same row, and it keeps and closes them."""
    listener: Listener
    logs: LogMirror
    checkpoints: CheckpointMirror
    collector: Collector
    store: BlobStore
    secrets: AllowedSecrets = DEFAULT_SECRETS
    note_restart: Callable[[str], None] = lambda vm_id: None
    """Marks the kept connections to this machine as possibly dead: calls that wait on them are given up."""
    keep_only: Callable[[Collection[str]], Awaitable[None]] | None = None
    """Closes connections to all machines but these, which are the fleet's. None: no connections are kept."""
    folders: Sequence[Path] = ()
    """Folders of logs and artefacts."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Intervals, limits and clocks of a dispatcher."""

    intervals: Intervals = field(default_factory=Intervals)
    poll_timing: PollTiming = field(default_factory=PollTiming)
    rng: random.Random = field(default_factory=random.Random)
    concurrency: int = 64
    """Machines that are reconciled at once."""
    retention: Retention = field(default_factory=Retention)
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock of this process, in seconds."""
    began: float | None = None
    """Database time at which a poller started in this process; machines may run processes from before that the database does not list.
    None: observations from shortly before are trusted."""


def new_owner() -> str:
    """A name that no dispatcher has had so far."""
    return f"{socket.gethostname()}-{os.getpid()}-{randomness.token_hex(4)}"


class GlobalJobDispatcher:
    """One dispatcher. `run` continues until `stop`."""

    def __init__(
        self,
        dependencies: DispatcherDependencies,
        tuning: Tuning | None = None,
        *,
        owner: str | None = None,
        gateway: Gateway | None = None,
    ) -> None:
        self.owner = owner or new_owner()
        self._dependencies = dependencies
        self._tuning = tuning or Tuning()
        self._gateway = gateway or Gateway(dependencies.database)
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._drives: dict[int, tuple[AttemptController, asyncio.Task[None]]] = {}
        self._failed_epochs: set[int] = set()
        """Epochs of attempts that could not be driven and whose failure was already reported."""
        self._watching: set[asyncio.Task[None]] = set()
        self._requests: dict[int, Any] = {}
        self._boot_observations: dict[str, tuple[Machine, str | None, bool]] = {}
        self._leased_until = 0.0
        self._started_at = self._tuning.began
        self.unobserved_machines: list[str] | None = None
        """Machines that must be asked what they run before any job starts; None: not known yet."""
        self._clearing = MachineClearing(self._gateway, self._tuning.retention)
        self._watches = MachineWatches(
            self._start_watch, self._runner_for, self._tuning.poll_timing
        )
        self._deps = ControllerDependencies(
            owner=self.owner,
            gateway=self._gateway,
            snapshots=BatchedReads(
                dependencies.database, lambda s, epochs: records.snapshots(s, epochs, self.owner)
            ),
            runner=self._runner_for,
            watches=self._watches,
            logs=dependencies.logs,
            checkpoints=dependencies.checkpoints,
            collector=dependencies.collector,
            store=dependencies.store,
            secrets=dependencies.secrets.read,
            spawn=self._spawn,
            rng=self._tuning.rng,
            poll_timing=self._tuning.poll_timing,
            clock=self._tuning.clock,
        )

    @property
    def driven_epochs(self) -> frozenset[int]:
        """Epochs of the attempts that it drives now."""
        return frozenset(self._drives)

    def stop(self) -> None:
        """Stop, and give up all leases; jobs continue on their machines."""
        self._stopping.set()

    async def run(self) -> None:
        """Run until `stop`. Then other dispatchers may adopt its attempts at once."""
        intervals = self._tuning.intervals
        async with asyncio.TaskGroup() as group:
            self._group = group
            loops = [
                group.create_task(self._repeat(*arguments), name=arguments[0])
                for arguments in (
                    ("renewing", self.renew, intervals.renew),
                    ("adopting", self.adopt, intervals.adopt),
                    ("requests", self.read_requests, intervals.sweep),
                    ("reconciling", self.reconcile, intervals.reconcile),
                    ("clearing", self._clear_periodically, 0.0),
                    ("claiming", self._claim_when_notified, 0.0),
                    ("guarding the lease", self._guard_lease, 0.0),
                )
            ]
            await self._stopping.wait()
            for task in loops:
                task.cancel()
            await self._drop_everything()
        try:
            await self._gateway.commit("lease.end", lambda s: records.end_leases(s, self.owner))
        except RunError as error:
            log.warning(
                "other dispatchers get its attempts only when their leases run out: %s", error
            )

    # The loops

    async def _repeat(
        self, name: str, work: Callable[[], Awaitable[object]], interval: float
    ) -> None:
        """Repeat the work, pausing `interval` seconds; no failure of one turn ends the loop."""
        while True:
            try:
                await work()
                await asyncio.sleep(interval)
            except RunError as error:
                log.warning("%s: %s", name, error)
                await asyncio.sleep(max(interval, 0.1))
            except Exception:  # a bug in one part must not leave every running job without a driver
                log.exception("%s crashed and is restarted", name)
                await asyncio.sleep(self._tuning.intervals.after_crash)

    async def renew(self) -> None:
        """Renew all leases, and drive every attempt that it owns."""
        intervals = self._tuning.intervals
        asked_at = time.monotonic()
        owned = await self._gateway.commit(
            "lease.renew", lambda s: records.renew(s, self.owner, intervals.lease)
        )
        self._leased_until = asked_at + intervals.lease
        for epoch in owned:
            self.drive(epoch)

    async def _guard_lease(self) -> None:
        """Drop all drives once the lease has run out: a dispatcher that may have been replaced must not contact machines."""
        remaining = self._leased_until - time.monotonic()
        if remaining <= 0 and self._drives:
            log.warning("the lease of %d attempts could not be renewed", len(self._drives))
            await self._drop_everything()
        await asyncio.sleep(min(max(remaining, 0.05), 1.0))

    async def adopt(self) -> Sequence[int]:
        """Take over attempts whose leases were not renewed."""
        asked_at = time.monotonic()
        lease = self._tuning.intervals.lease
        adopted = await self._gateway.commit(
            "lease.adopt", lambda s: records.adopt(s, self.owner, lease)
        )
        if adopted:
            log.info("adopted %s", adopted)
        self._drive_owned(adopted, asked_at + lease)
        return adopted

    async def _claim_when_notified(self) -> None:
        """Claim jobs at the start, at every notification, and whenever the sweep is due."""
        await self._dependencies.listener.wait(self._tuning.intervals.sweep)
        if await self.knows_what_runs():
            await self.claim()
        else:
            await self._admit()

    async def knows_what_runs(self) -> bool:
        """A restored database does not know the jobs that machines have started since its backup. So after a start, or a standstill of the
        fleet, all machines that answer are observed before any job starts."""
        if self.unobserved_machines != []:
            if self._started_at is None:
                self._started_at = await self._gateway.read(database_time)
            started_at, lately = self._started_at, self._tuning.began is None
            self.unobserved_machines = await self._gateway.read(
                lambda s: records.unobserved_machines(s, started_at, lately=lately)
            )
        return not self.unobserved_machines

    async def claim(self) -> int:
        """Admit new rows, then claim until no more jobs fit; returns the number of attempts made."""
        await self._admit()
        total, lease = 0, self._tuning.intervals.lease
        while True:
            requested_at = time.monotonic()
            result = await self._gateway.commit(
                "job.claim",
                lambda s: claim.claim(
                    s, owner=self.owner, lease_seconds=lease, limit=CLAIMED_AT_ONCE
                ),
            )
            self._drive_owned([attempt.epoch for attempt in result.claimed], requested_at + lease)
            total += len(result.claimed)
            has_woken, unplaced = False, result.unplaced
            if unplaced is not None:  # marked after claiming: starting jobs must not wait for it
                explained = await self._gateway.read(partial(claim.explain, unplaced=unplaced))
                marking = partial(
                    claim.mark, unplaced=unplaced, explained=explained, owner=self.owner
                )
                has_woken = await self._gateway.commit("job.mark", marking)
            if not (result.has_more or (result.claimed and has_woken)):
                return total

    async def _admit(self) -> None:
        """Admit rows that users inserted by hand, one batch at a time."""
        admitted = ADMITTED_AT_ONCE
        while admitted >= ADMITTED_AT_ONCE:
            admitted = await self._gateway.commit(
                "job.admit",
                lambda s: admission.admit_new(s, ADMITTED_AT_ONCE, self._dependencies.secrets),
            )

    async def read_requests(self) -> None:
        """Wake the drives of attempts that were asked to end, and the watches of machines that rebooted, answer again or have moved."""
        requests, observations = await self._gateway.read(
            lambda s: (
                records.pending_requests(s, self.owner),
                records.boot_observations(s, self.owner),
            )
        )
        for epoch, request in requests.items():
            if epoch in self._drives and self._requests.get(epoch) != request:
                self._drives[epoch][0].wake()
        self._requests = requests
        for vm_id, (machine, boot, is_answering) in observations.items():
            self._watches.update_machine(machine)
            _, boot_before, answered_before = self._boot_observations.get(
                vm_id, (machine, boot, is_answering)
            )
            if boot_before not in (None, boot) or (is_answering and not answered_before):
                self._dependencies.note_restart(vm_id)
                self._watches.note_answer(vm_id)
        self._boot_observations = observations

    # Driving

    def _drive_owned(self, epochs: Sequence[int], until: float) -> None:
        """Drive attempts that were just claimed or adopted; their lease may end before those of the others."""
        if not epochs:
            return
        self._leased_until = min(self._leased_until, until) if self._drives else until
        for epoch in epochs:
            self.drive(epoch)

    def drive(self, epoch: int) -> None:
        """Start to drive an attempt, unless it is being driven."""
        if epoch in self._drives or self._group is None or self._stopping.is_set():
            return
        drive = AttemptController(epoch, self._deps)
        task = self._group.create_task(self._run_drive(drive), name=f"drive {epoch}")
        self._drives[epoch] = drive, task

    async def _run_drive(self, drive: AttemptController) -> None:
        """Drive one attempt. A failure must not stop the others; the attempt is tried again at the next renewal."""
        try:
            await drive.run()
            self._failed_epochs.discard(drive.epoch)
        except Exception as error:  # noqa: BLE001 - a bug, or a row written by hand
            await self._report_failure(drive.epoch, error)
        finally:
            if self._drives.get(drive.epoch, (None,))[0] is drive:
                del self._drives[drive.epoch]

    async def _report_failure(self, epoch: int, error: Exception) -> None:
        """Log the traceback once and record an event; the same failure may recur every few seconds."""
        if epoch in self._failed_epochs:
            log.error("driving epoch %d failed again: %r", epoch, error)
            return
        log.error("driving epoch %d failed", epoch, exc_info=error)
        reason = f"its dispatcher failed to drive it, and tries again: {error!r}"
        try:
            await self._gateway.commit(
                "attempt.stuck", lambda s: records.record_stuck(s, epoch, self.owner, 0, reason)
            )
            self._failed_epochs.add(epoch)
        except Exception:  # the database itself may be the cause
            log.exception("the notification failed")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a drive's side work as a separate task. The drive retries work that failed."""
        assert self._group is not None

        async def logged() -> None:
            try:
                await work
            except Exception:  # a bug there must end neither the drive nor the dispatcher
                log.exception("fetching failed")

        task = self._group.create_task(logged())
        # A task that is cancelled before it starts never awaits its coroutine, which would then warn.
        task.add_done_callback(lambda _: work.close())
        return task

    def _start_watch(self, vm_id: str, watch: MachineWatch) -> None:
        if self._group is None:
            return

        async def watched() -> None:
            try:
                await watch.run()
            except Exception:  # as for a drive
                log.exception("watching %s failed", vm_id)
                await asyncio.sleep(self._tuning.intervals.after_crash)
            self._watches.note_end(vm_id, watch)

        task = self._group.create_task(watched(), name=f"watch {vm_id}")
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _drop_everything(self) -> None:
        """Cancel all present drives. Drives that start meanwhile, under a lease that could be renewed after all, stay."""
        tasks = [task for _, task in self._drives.values()] + list(self._watching)
        for task in tasks:
            task.cancel()
        self._watches.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        for epoch, (_, task) in list(self._drives.items()):
            if task.done():  # cancelled before it started, so its own `finally` has not run
                del self._drives[epoch]

    def _runner_for(self, machine: Machine) -> Runner:
        host = self._gateway.host(self._dependencies.host(machine))
        return runner_of(machine, host)

    # Reconciling

    async def reconcile(self) -> None:
        """Check all machines for attempts that no dispatcher drives."""
        machines, names = await self._gateway.read(
            lambda s: (records.machines(s), records.names(s))
        )
        if self._dependencies.keep_only is not None:
            await self._dependencies.keep_only(names)
        limit = asyncio.Semaphore(self._tuning.concurrency)

        async def one(machine: Machine) -> None:
            async with limit:
                try:
                    runner = self._runner_for(machine)
                    attempts = (await runner.observe(probe=records.NO_PROBE)).attempts
                    await self._deal_with_strays(machine, runner, attempts)
                    if machine.lost:
                        await self._return_to_use(machine, runner)
                except HostError as error:
                    log.debug("%s is not reconciled: %s", machine.vm_id, error)
                except RunError as error:
                    log.warning("%s is not reconciled: %s", machine.vm_id, error)
                except Exception:  # a row written by hand must not keep others from it
                    log.exception("%s is not reconciled", machine.vm_id)

        await asyncio.gather(*(one(machine) for machine in machines))

    async def _deal_with_strays(
        self, machine: Machine, runner: Runner, attempts: Sequence[MemberState]
    ) -> None:
        alive = [state for state in attempts if state.is_alive or state.may_start]
        if not alive:
            return
        jobs = {state.job for state in alive}
        known = await self._gateway.read(lambda s: records.known_jobs(s, jobs))
        for state in alive:
            reading, survivors = ObservedState(state.state), state.survivors or 0
            match orphan_action(state.epoch, reading, known.get(state.job), survivors):
                case OrphanAction.KILL:
                    log.warning("%s runs %s.%d, which is over: it is ended", machine.vm_id, state.job, state.epoch)  # fmt: skip
                    await _stop_attempt(runner, state)
                case OrphanAction.REPORT if not is_doctor_attempt(state.job, state.epoch):
                    vm_id, job, epoch = machine.vm_id, state.job, state.epoch
                    write = partial(
                        records.record_untracked,
                        owner=self.owner,
                        vm_id=vm_id,
                        job_id=job,
                        epoch=epoch,
                    )
                    if await self._gateway.commit("attempt.untracked", write):
                        log.error(
                            "%s runs attempt %s.%d, which is in no table: it is left to run",
                            *(vm_id, job, epoch),
                        )
                case _:
                    pass

    async def _clear_periodically(self) -> None:
        """Clear after a random delay: dispatchers that started together then do not clear together."""
        await asyncio.sleep(self._tuning.rng.uniform(0.5, 1.0) * self._tuning.intervals.clear)
        await self.clear()

    async def clear(self) -> None:
        """Remove files that are no longer needed, from machines and from this machine."""
        await self._clearing.clear_all(self._runner_for)
        dependencies = self._dependencies
        await self._gateway.write(
            "store.clear",
            lambda: clear_away(
                dependencies.database, dependencies.store, dependencies.folders, after=EVERY
            ),
        )

    async def _return_to_use(self, machine: Machine, runner: Runner) -> None:
        """A machine that was declared lost answers. It is used again only once none of its given-up attempts runs or can start there."""
        vm_id = machine.vm_id
        members = await self._gateway.read(lambda s: records.unreleased_members(s, vm_id))
        for member in members:
            job, epoch, rank = member.job_id, member.epoch, member.rank
            state = await runner.void(job, epoch)
            if state.state in MAY_HAVE_LEFT_PROCESSES:
                await runner.kill(job, epoch, grace=0.0)
            release = await runner.release(
                job, epoch, gpus=member.gpus, share_mb=member.share_mb,
                idle_memory_mb=machine.idle_memory_mb, probe=machine.probe,
            )  # fmt: skip
            if release.clean:
                await self._gateway.commit(
                    "member.released", partial(records.record_released, epoch=epoch, rank=rank)
                )
        if await self._gateway.commit(
            "vm.returned", lambda s: records.return_to_use(s, self.owner, vm_id)
        ):
            log.info("%s was declared lost and is back; nothing is left there", vm_id)


async def _stop_attempt(runner: Runner, state: MemberState) -> None:
    """Kill it if it lives; void it first if it may still start."""
    if state.may_start:
        state = await runner.void(state.job, state.epoch)
    if state.is_alive:
        await runner.kill(state.job, state.epoch, grace=0.0)
