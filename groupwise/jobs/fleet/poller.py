"""The poller: observes every machine of the fleet again and again, and records the observations.

A scheduler keeps a due time for each machine and starts a poll then; no machine has two polls at once, so one that hangs delays only
itself. The list of machines comes from the database every few seconds, so inserting a row is enough to add one. Polls are spread over the
interval, with jitter. A machine that has missed several polls is asked more and more rarely, up to a bound, until its first answer.
Connections are kept.

Of a machine whose key is not trusted, nothing but the key is read. `observation.py` interprets answers and missing answers. Several pollers
of one fleet observe the same and write it one after the other, newest last.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from groupwise.core.errors import RunError
from groupwise.core.retry import doubled
from groupwise.core.waiting import cancel_and_wait, wait_at_most
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.machines import observation
from groupwise.jobs.fleet.machines.connections import (
    LOCAL,
    host_of,
    runner_of,
    same_route,
    scheduler_of,
    shown_key,
)
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.hosts.host import Host, HostError, HostKeyError
from groupwise.jobs.hosts.keys import HostKey, parse_host_key
from groupwise.jobs.hosts.ssh import SshTimeouts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and time limits in seconds, and numbers of concurrent polls."""

    interval: float = 15.0
    """Seconds between two polls of a machine, plus or minus a tenth."""
    longest: float = 60.0
    """Seconds between two polls of a machine that does not answer."""
    listed: float = 2.0
    """Seconds between two reads of the list of machines."""
    probe: float = 10.0
    """Time limit of nvidia-smi on a machine."""
    answer: float = 20.0
    """Time limit of a whole poll, connection included."""
    spread: float = 0.02
    """Time per machine over which the first polls after a start are spread."""
    connect: float = 5.0
    """Time limit of a new connection."""
    at_once: int = 256
    """Concurrent polls of machines that answered last time."""
    unsure_at_once: int = 64
    """Concurrent polls of other machines: new connections, and probably futile attempts."""
    least: float = 1.0
    """Minimum pause between the end of a poll and the next."""

    def after(self, misses: int) -> float:
        """Seconds from the start of one poll to the next, after that many polls in a row without an answer."""
        further = misses - observation.MISSES + 2
        return doubled(self.interval, further, max(self.longest, self.interval))


@dataclass(slots=True, eq=False)
class _PolledMachine:
    """A machine, and the schedule of its polls."""

    machine: Machine
    due: float
    host: Host | None = None
    poll: asyncio.Task[None] | None = None
    misses: int = 0
    answered: bool = False
    """True if it answered the last time that it was asked."""
    barred: bool = False
    """True if it showed another key than the pinned one."""


class Poller:
    """Polls all machines until it is cancelled."""

    def __init__(
        self,
        database: Database,
        *,
        pace: Pace | None = None,
        trust_on_first_use: bool = False,
        reach: Callable[[Machine], Host] | None = None,
        read_key: Callable[[Machine], Awaitable[HostKey]] = shown_key,
        rng: random.Random | None = None,
    ) -> None:
        self._database = database
        self._pace = pace or Pace()
        self._trust = trust_on_first_use
        timeouts = SshTimeouts(connect=self._pace.connect)
        self._reach = reach or partial(host_of, timeouts=timeouts)
        self._read_key = read_key
        self._rng = rng or random.Random()
        self._slots = {
            True: asyncio.Semaphore(self._pace.at_once),
            False: asyncio.Semaphore(self._pace.unsure_at_once),
        }
        """Keyed by whether the machine answered last time: silent machines do not hold up the others."""
        self._watched: dict[str, _PolledMachine] = {}
        self._queue: list[tuple[float, str]] = []
        self._changed = asyncio.Event()
        self._never = asyncio.Event()
        self._clock_offset = 0.0
        """The database's clock minus ours, in seconds."""
        self._has_warned = False
        self.lags: deque[float] = deque(maxlen=10_000)
        """Seconds from when polls were due until they started, at machines that answer; only the last ones."""

    async def run(self) -> None:
        """Poll machines when they are due, until cancelled."""
        listing_task = asyncio.create_task(self._keep_listing())
        try:
            while True:
                now = time.monotonic()
                while self._queue and self._queue[0][0] <= now:
                    due_at, vm_id = heapq.heappop(self._queue)
                    watched = self._watched.get(vm_id)
                    if watched is not None and watched.due == due_at:
                        assert watched.poll is None, (
                            "the next poll is due only after the last has ended"
                        )
                        watched.poll = asyncio.create_task(self._poll_machine(watched))
                self._changed.clear()
                pause = self._queue[0][0] - time.monotonic() if self._queue else self._pace.listed
                if pause > 0:
                    await wait_at_most(pause, self._changed)
                else:
                    await asyncio.sleep(0)
        finally:
            await cancel_and_wait(listing_task)
            await asyncio.gather(
                *(self._stop_polling(watched) for watched in self._watched.values())
            )

    # --- which machines ---------------------------------------------------------------------------

    async def _keep_listing(self) -> None:
        is_first = True
        while True:
            try:
                read_started = time.monotonic()
                now, machines, barred_ids = await self._database.read_in_thread(
                    lambda s: (
                        database_time(s),
                        records.machines(s),
                        observation.barred_machines(s),
                    )
                )
                self._clock_offset = now - (read_started + time.monotonic()) / 2
                await self._take_list(machines, is_first)
                for vm_id, watched in self._watched.items():
                    watched.barred = vm_id in barred_ids
                is_first, self._has_warned = False, False
            except RunError as error:
                self._warn_once(error)
            except Exception:  # one failed read of the list must not be the last
                logger.exception("the list of machines cannot be read")
            await wait_at_most(self._pace.listed, self._never)

    async def _take_list(self, machines: list[Machine], is_first: bool) -> None:
        """Take over a new list of machines. New ones are polled at once; at start-up they are spread out, lest all connect together."""
        machines_by_id = {machine.vm_id: machine for machine in machines}
        spread = (
            min(self._pace.interval, self._pace.spread * len(machines_by_id)) if is_first else 0.0
        )
        for vm_id in self._watched.keys() - machines_by_id.keys():
            await self._stop_polling(self._watched.pop(vm_id))
        for vm_id, machine in machines_by_id.items():
            watched = self._watched.get(vm_id)
            if watched is None:
                self._watched[vm_id] = watched = _PolledMachine(machine, 0.0)
                self._due_in(watched, self._rng.uniform(0.0, spread))
            elif watched.machine != machine:
                is_same_route = same_route(watched.machine, machine)
                watched.machine = machine
                if not is_same_route:
                    await self._stop_polling(watched)
                    watched.misses, watched.answered = 0, False
                    self._due_in(watched, 0.0)

    async def _stop_polling(self, watched: _PolledMachine) -> None:
        """Cancel the poll in progress and close the connection: the machine has changed or is gone."""
        await cancel_and_wait(watched.poll)
        watched.poll = None
        await self._close_connection(watched)

    async def _close_connection(self, watched: _PolledMachine) -> None:
        host, watched.host = watched.host, None
        if host is not None:
            # A machine that does not answer the close any more is not waited for.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.connect):
                    await host.close()

    # --- when -------------------------------------------------------------------------------------

    def _due_in(self, watched: _PolledMachine, delay: float) -> None:
        watched.due = time.monotonic() + delay
        heapq.heappush(self._queue, (watched.due, watched.machine.vm_id))
        self._changed.set()

    async def _poll_machine(self, watched: _PolledMachine) -> None:
        async with self._slots[watched.answered]:
            started_at = time.monotonic()
            if watched.answered:
                self.lags.append(started_at - watched.due)
            try:
                watched.answered = await self._poll_now(watched)
                self._has_warned = False
            except RunError as error:
                self._warn_once(error)
            except Exception as error:  # a row written by hand must not end its polls
                logger.exception("polling machine %s failed", watched.machine.vm_id)
                # Record the error as a missed poll: the author of the row then sees it there.
                watched.misses += 1
                watched.answered = False
                vm_id, text = watched.machine.vm_id, f"{type(error).__name__}: {error}"
                asked_at = time.monotonic() + self._clock_offset
                try:
                    await self._database.in_thread(
                        lambda s: observation.record_miss(s, vm_id, asked_at, text)
                    )
                except RunError as away:
                    self._warn_once(away)
        watched.poll = None
        if self._watched.get(watched.machine.vm_id) is watched:
            pause = self._pace.after(watched.misses) * self._rng.uniform(0.9, 1.1)
            self._due_in(watched, max(started_at + pause - time.monotonic(), self._pace.least))

    def _warn_once(self, error: RunError) -> None:
        if not self._has_warned:
            logger.warning("observations of machines cannot be stored: %s", error)
        self._has_warned = True

    # --- a poll -----------------------------------------------------------------------------------

    async def _poll_now(self, watched: _PolledMachine) -> bool:
        """Poll the machine; returns True if it answered, even with an untrusted key."""
        machine, asked_at = watched.machine, time.monotonic() + self._clock_offset
        try:
            if machine.transport != LOCAL and (machine.host_key is None or watched.barred):
                await self._read_shown_key(watched)
            else:
                await self._observe(watched, asked_at)
        except HostError as error:
            watched.misses += 1
            text = str(error) or type(error).__name__
            await self._database.in_thread(
                lambda s: observation.record_miss(s, machine.vm_id, asked_at, text)
            )
            return False
        watched.misses = 0
        return True

    async def _observe(self, watched: _PolledMachine, asked_at: float) -> None:
        machine, pace = watched.machine, self._pace
        if watched.host is None:
            watched.host = self._reach(machine)
        runner, scheduler = runner_of(machine, watched.host), scheduler_of(machine, watched.host)
        try:
            observed = await runner.observe(
                probe=machine.probe, probe_timeout=pace.probe, timeout=pace.answer
            )
            if scheduler is not None:
                await scheduler.ping()
        except HostKeyError as error:
            await self._close_connection(watched)
            # The key of the machine, or that of a jump host? With a jump host, only reading the key again shows which.
            if error.seen is None:
                await self._record_untrusted(watched, error)
            elif watched.machine.jump:
                await self._read_shown_key(watched)
            else:
                await self._record_shown_key(watched, parse_host_key(error.seen))
        else:
            await self._database.in_thread(
                lambda s: observation.apply(
                    s, machine.vm_id, asked_at, observed, look_seconds=pace.interval
                )
            )

    async def _read_shown_key(self, watched: _PolledMachine) -> None:
        """Read the host key, and nothing else."""
        try:
            host_key = await self._read_key(watched.machine)
        except HostKeyError as error:
            await self._record_untrusted(watched, error)
        else:
            await self._record_shown_key(watched, host_key)

    async def _record_shown_key(self, watched: _PolledMachine, key: HostKey) -> None:
        vm_id = watched.machine.vm_id
        await self._database.in_thread(
            lambda s: observation.record_shown_key(s, vm_id, key, pin=self._trust)
        )

    async def _record_untrusted(self, watched: _PolledMachine, error: HostKeyError) -> None:
        vm_id, text = watched.machine.vm_id, str(error)
        await self._database.in_thread(lambda s: observation.record_untrusted(s, vm_id, text))
