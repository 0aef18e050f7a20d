"""Dispatchers on a real database in a storm: machines, messages and they themselves fail in any order, and every promise is kept.

After each blow a running job has one live attempt, and whatever is alive on a machine holds its GPU. At the end, when machines are back and
nobody interferes any more, everything comes to rest, and `tests/fleet_history.py` judges all that happened. A seed deals the same blows
each time, not the same run.
"""

import asyncio
import random
from pathlib import Path

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupwise.fleet.attempts.effects import Death, Side
from groupwise.fleet.states import FINAL
from groupwise.fleet.store.database import Database, seconds
from groupwise.fleet.store.tables import GPU, VM, Attempt, Job
from groupwise.testing.fake_hosts import FakeHost, Fault, Script
from tests.fleet_rig import Rig

MACHINES = {"a": ["GPU-a0"], "b": ["GPU-b0"], "c": ["GPU-c0", "GPU-c1"]}
BLOWS = 60
HAPPENINGS = (
    *("submit", "submit", "cut", "cut", "power_off", "reboot", "heal", "heal", "heal", "cancel"),
    *("kill_supervisor", "lose_a_message", "lose_a_message", "deliver", "die", *("work",) * 8),
    "lose_a_machine",
)
"""As often as they stand here."""
LONG = Script(ticks=10**6)
ENDLESS = (LONG, Script(refusal="gpu_busy"))
"""That one is tried again for as long as its GPU is taken."""
SCRIPTS = (
    *(Script(), Script(code=1), Script(code=64), Script(ticks=3, ignores_term=True)),
    *(Script(ticks=1, leaks=True), *ENDLESS),
)
VERBS = ("launch", "launch", "void", "kill", "status", "wait", "release", "manifest")


class Storm:
    """What happens to a fleet, drawn from one seed."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.rack = rig, rig.rack
        self.chance = random.Random(seed)
        self.jobs: list[str] = []
        self.lost: str | None = None
        self._dying = self._over = False

    async def play(self) -> None:
        living = asyncio.create_task(self._dispatch())
        try:
            for _ in range(BLOWS):
                blow = getattr(self, self.chance.choice(HAPPENINGS))()
                if asyncio.iscoroutine(blow):
                    await blow
                await asyncio.sleep(self.chance.choice((0.0, 0.004, 0.012)))
                self.rig.note()
                self.look()
            for host in self.rack:
                host.faultless()
            for scripts in self.rack.scripts.values():
                scripts[:] = [each for each in scripts if each not in ENDLESS] or [Script()]
            await self.rig.until(self._has_come_to_rest)
        finally:
            self._over = True
            self.dispatcher.stop()
            await living
        self.rig.judge()

    async def _dispatch(self) -> None:
        """One dies, and the next takes over."""
        number = 0
        while not self._over:
            self.dispatcher = self.rig.dispatcher(f"dispatcher-{number}", self._hook)
            number += 1
            try:
                await self.dispatcher.run()
            except BaseException as error:  # a Death, or a group of them
                whole = error if isinstance(error, BaseExceptionGroup) else None
                if whole is not None and whole.split(Death)[1] is not None:
                    raise
                if whole is None and not isinstance(error, Death):
                    raise
                self.rig.expire_leases()

    def _hook(self, name: str, side: Side) -> None:
        if self._dying and self.chance.random() < 0.3:
            self._dying = False
            raise Death

    # what people do

    def submit(self) -> None:
        if len(self.jobs) < 5:
            self.jobs.append(job := f"job-{len(self.jobs)}")
            self.rack.scripts[job] = self.chance.choices(SCRIPTS, k=self.chance.randint(1, 3))
            self.rig.submit(job, resources={"gpus": 1, "machines": self.chance.randint(1, 2)})

    def cancel(self) -> None:
        going_on = [job for job in self.jobs if self.rig.job(job).status not in FINAL]
        if going_on:
            self.rig.cancel(self.chance.choice(going_on))

    # what happens to machines, messages and dispatchers

    def host(self) -> FakeHost:
        return self.rack[self.chance.choice(sorted(MACHINES))]

    def work(self) -> None:
        self.rack.tick()

    def cut(self) -> None:
        self.host().cut()

    def power_off(self) -> FakeHost:
        host = self.host()
        if host.powered:
            host.power_off()
        return host

    def reboot(self) -> None:
        if (host := self.power_off()).name != self.lost:
            host.boot()

    def lose_a_machine(self) -> None:
        """An operator says so, and is right."""
        if self.lost is None:
            self.lost = self.power_off().name
            self.rig.lose(self.lost)

    def kill_supervisor(self) -> None:
        for job, epoch in self.rack.running():
            for host in self.rack:
                folder = host.folders.get(f"{job}.{epoch}")
                if folder and folder.process and folder.supervisor and self.chance.random() < 0.5:
                    host.kill_supervisor(job, epoch, child_too=self.chance.random() < 0.5)

    def lose_a_message(self) -> None:
        fault = self.chance.choice((Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.LATE))
        self.host().fail(self.chance.choice(VERBS), fault)

    async def deliver(self) -> None:
        """What was sent long ago arrives."""
        for host in self.rack:
            if host.powered:
                await host.deliver()

    def die(self) -> None:
        self._dying = True

    def heal(self) -> None:
        for host in self.rack:
            if not host.powered and host.name != self.lost:
                host.boot()
            host.heal()
            host.clean_up()
        self.rig.database.run(_seen_to_be_well)

    def look(self) -> None:
        """What is alive holds its GPU, and a job that runs has one live attempt."""
        alive = {
            folder.epoch
            for host in self.rack
            for folder in host.folders.values()
            if folder.holds and host.name != self.lost
        }
        assert alive <= {held.epoch for held in self.rig.open_reservations()}
        live, running = self.rig.database.read(_live_and_running)
        assert live == running

    def _has_come_to_rest(self) -> bool:
        self.heal()
        for folder in (f for host in self.rack for f in host.folders.values()):
            if folder.process is not None:
                folder.process.left = min(folder.process.left, 3)
        over = all(self.rig.job(job).status in FINAL for job in self.jobs)
        return over and self.rig.is_clean()


def _seen_to_be_well(session: Session) -> None:
    """By a poller and by an operator; nothing waits any more."""
    session.execute(update(GPU).values(observed="ok"))
    session.execute(update(VM).values(cordoned=None, observed_round=seconds(session)))
    session.execute(update(Job).values(not_before=0.0))


def _live_and_running(session: Session) -> tuple[list[str], list[str]]:
    live = session.scalars(select(Attempt.job_id).where(Attempt.state != "ended"))
    running = session.scalars(select(Job.job_id).where(Job.status == "running"))
    return sorted(live), sorted(running)


@pytest.mark.parametrize(
    "seed",
    [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.soak(suite="fleet")) for n in range(5, 200))],
)
async def test_whatever_happens_every_promise_is_kept(
    seed: int, database: Database, tmp_path: Path
) -> None:
    await Storm(Rig(database, tmp_path, MACHINES), seed).play()
