"""One long poll for each machine, shared by all attempts that are driven there.

A controller asks the machine itself when it needs to know something; a `MachineWatch` notifies it of changes. The watch keeps one `wait`
request open per machine, which names every attempt that may change, and passes each state to its listener. A `wait` also resets the
runner's deadman.
So an attempt is named only while the database says that its machine answers (`machine_answers`): the deadman of an
attempt on a machine recorded as silent keeps running, no matter how many of our requests still reach it.

A machine that does not answer is asked again with growing pauses, by `status`, which resets no deadman. As soon as it answers, all
listeners are notified. Each contact goes to where the machine's row says now: a machine may move, or get another key, while jobs run there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from groupwise.core.retry import Backoff
from groupwise.core.waiting import wait_at_most
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.hosts.answers import CHANGEABLE, MemberState
from groupwise.jobs.hosts.driver import KnownState, Runner
from groupwise.jobs.hosts.host import HostError

log = logging.getLogger(__name__)


class Listener(Protocol):
    """One member of an attempt that is driven here."""

    @property
    def name(self) -> tuple[str, int]:
        """Job id and epoch."""
        ...

    @property
    def last(self) -> MemberState | None:
        """The last state that is known of it; None: none, or it is out of date."""
        ...

    @property
    def machine_answers(self) -> bool:
        """True if the database records that its machine answers."""
        ...

    def on_state(self, state: MemberState) -> None:
        """Its state may have changed to this one."""
        ...

    def on_contact_lost(self, reason: str) -> None:
        """Its machine does not answer."""
        ...

    def on_contact(self) -> None:
        """Its machine answers again."""
        ...


@dataclass(frozen=True, slots=True)
class PollTiming:
    """How long the watch of a machine and the controller of an attempt wait, in seconds. Tests use shorter times."""

    first: float = 0.5
    longest: float = 15.0
    """First and longest pause between two attempts to reach a machine, and between two rounds of a controller without progress."""
    idle: float = 30.0
    """Time between two rounds while there is nothing to do but wait."""
    poll: float = 25.0
    """Time for which a machine may keep a `wait` open; shorter than the idle timeout of firewalls and NAT routers."""


@dataclass(slots=True)
class MachineWatch:
    """The long poll of one machine; `run` continues as long as there are listeners."""

    machine: Machine
    """Its row, as last read; `MachineWatches.update_machine` replaces it."""
    runner: Callable[[Machine], Runner]
    """Returns the runner of a machine, over a connection that fits its row."""
    poll_timing: PollTiming = field(default_factory=PollTiming)
    listeners: dict[tuple[str, int], Listener] = field(
        default_factory=dict[tuple[str, int], Listener]
    )
    is_silent: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    contacted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a listener has just reached the machine by another request."""

    def add(self, listener: Listener) -> None:
        """Notify the listener of news from now on."""
        self.listeners[listener.name] = listener
        self.changed.set()

    def remove(self, listener: Listener) -> None:
        """Stop notifying the listener."""
        if self.listeners.get(listener.name) is listener:
            del self.listeners[listener.name]
            self.changed.set()

    def look_again(self) -> None:
        """A listener's knowledge has changed, but not by this watch: choose again which attempts to name."""
        self.changed.set()

    async def run(self) -> None:
        """Poll until there are no listeners left."""
        backoff = Backoff(self.poll_timing.first, self.poll_timing.longest)
        while self.listeners:
            self.changed.clear()
            try:
                if self.is_silent:
                    await self.runner(self.machine).status(*next(iter(self.listeners)))
                    log.info("%s answers again", self.machine.vm_id)
                    self.is_silent = False
                    for listener in list(self.listeners.values()):
                        listener.on_contact()
                else:
                    await self._poll()
                backoff.reset()
            except HostError as error:
                reason = str(error)
                if not self.is_silent:
                    log.warning("%s does not answer: %s", self.machine.vm_id, reason)
                self.is_silent = True
                for listener in list(self.listeners.values()):
                    listener.on_contact_lost(reason)
                await self._pause(backoff.next())

    async def _pause(self, pause: float) -> None:
        """Pause before the next poll; shorter if a listener has reached the machine meanwhile."""
        self.contacted.clear()
        await wait_at_most(pause, self.contacted)

    async def _poll(self) -> None:
        """Send one `wait` request, and cancel it as soon as other attempts should be named."""
        known = {
            name: KnownState(
                last_state.state,
                last_state.log_size,
                last_state.checkpoints,
                last_state.step,
                last_state.clock,
            )
            for name, listener in self.listeners.items()
            if listener.machine_answers
            and (last_state := listener.last)
            and last_state.state in CHANGEABLE
        }
        if not known:
            await self.changed.wait()
            return
        asked_at, has_news = time.monotonic(), False
        states: tuple[MemberState, ...] | None = None
        wait_task = asyncio.ensure_future(
            self.runner(self.machine).wait(known, seconds=self.poll_timing.poll)
        )
        changed_task = asyncio.ensure_future(self.changed.wait())
        try:
            await asyncio.wait({wait_task, changed_task}, return_when=asyncio.FIRST_COMPLETED)
            if wait_task.done():
                states = wait_task.result()
        finally:
            for task in (wait_task, changed_task):
                task.cancel()
            await asyncio.gather(wait_task, changed_task, return_exceptions=True)
        for state in states or ():
            name = (state.job, state.epoch)
            before = known.get(name)
            has_news |= before is not None and (
                (state.state, state.log_size, state.checkpoints, state.step)
                != (before.state, before.log_size, before.checkpoints, before.step)
            )
            if listener := self.listeners.get(name):
                listener.on_state(state)
        if states is not None:
            # a machine that answers every `wait` at once is not asked again at once
            pause = self.poll_timing.first / (10 if has_news else 1)
            await self._pause(max(0.0, asked_at + pause - time.monotonic()))


class MachineWatches:
    """The watches of all machines on which this dispatcher drives attempts."""

    def __init__(
        self,
        spawn: Callable[[str, MachineWatch], None],
        runner: Callable[[Machine], Runner],
        poll_timing: PollTiming | None = None,
    ) -> None:
        """`spawn` runs the watch in the background, and calls `note_end` after it."""
        self._spawn = spawn
        self._runner = runner
        self._poll_timing = poll_timing or PollTiming()
        self._by_machine: dict[str, MachineWatch] = {}

    def listen(self, machine: Machine, listener: Listener) -> MachineWatch:
        """Notify the listener of news of its attempt on this machine, until it is removed from the watch."""
        watch = self._by_machine.get(machine.vm_id)
        if watch is None:
            watch = self._by_machine[machine.vm_id] = MachineWatch(
                machine, self._runner, self._poll_timing
            )
            watch.add(listener)
            self._spawn(machine.vm_id, watch)
        else:
            watch.add(listener)
        return watch

    def update_machine(self, machine: Machine) -> None:
        """Use this row of the machine from now on. If it has changed, the machine is contacted again at once."""
        watch = self._by_machine.get(machine.vm_id)
        if watch is not None and watch.machine != machine:
            watch.machine = machine
            watch.changed.set()
            watch.contacted.set()

    def note_answer(self, vm_id: str) -> None:
        """The machine answers other requests: end the pause before the next poll."""
        if watch := self._by_machine.get(vm_id):
            watch.contacted.set()

    def note_end(self, vm_id: str, watch: MachineWatch) -> None:
        """The watch has ended; if it crashed and still has listeners, a new one starts."""
        if self._by_machine.get(vm_id) is not watch:
            return
        del self._by_machine[vm_id]
        for listener in list(watch.listeners.values()):
            self.listen(watch.machine, listener)

    def clear(self) -> None:
        """Forget all watches; their tasks are being cancelled."""
        self._by_machine.clear()
