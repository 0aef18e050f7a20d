"""A dispatcher dies before and after every effect that it has on the world; whoever goes on keeps every promise.

Each scenario is played once without a death, and the effects of its attempts are counted by name. Then it is played again for each of them,
twice: dying just before it and just after it, as by kill -9. When the lease of the dead has run out another dispatcher takes over, and the
history is judged by somebody who knows nothing of dispatchers.

The scenarios stand in three files of about the same length, since each of them is one worker's: a job on one machine, gangs, and jobs
that do not end by themselves.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from groupwise.fleet.attempts.effects import Death, Side
from groupwise.fleet.store.database import connect, migrate
from groupwise.testing.fake_hosts import Script
from tests.fleet_rig import Rig

Scenario = Callable[[Rig], Awaitable[None]]
Effect = tuple[str, int]
"""Name, and which of that name."""
BESIDE = ("lease.", "job.admit", "host.wait", "host.observe", "stray.", "vm.")
"""What a dispatcher does all the time, whatever becomes of an attempt."""
LOOKS = frozenset({"host.status", "host.log", "host.manifest", "host.release", "host.missing"})
AGAIN: Effect = ("attempt.launching", 2)
VARYING = frozenset(
    "job.claim job.mark host.status host.log host.release host.kill attempt.record attempt.leaking "
    "attempt.release".split()
)
"""How often a machine is asked and the queue is looked at depends on how tasks interleave; after the last one nobody may be left to die."""
LONG = Script(ticks=10**6)


async def die_beside_every_effect(scenario: Scenario, side: Side, folder: Path) -> None:
    """One death in each play; AssertionError where a promise was broken, or an effect was never reached."""
    stage = Stage(folder)
    try:
        golden = Counting()
        await stage.play(scenario, golden)
        where = points(golden.seen, side)
        assert len(where) >= 4
        missed: list[Effect] = []
        for effect in where:
            hook = Counting((effect, side))
            try:
                await stage.play(scenario, hook)
            except AssertionError as error:
                raise AssertionError(f"dying {side} {effect}: {error}") from error
            if not hook.died:
                missed.append(effect)
        assert [effect for effect in missed if effect[0] not in VARYING] == []
    finally:
        stage.close()


class Counting:
    """A hook that counts effects, and dies at one of them."""

    def __init__(self, death: tuple[Effect, Side] | None = None) -> None:
        self.seen: list[Effect] = []
        self.died = False
        self._death = death
        self._counts: Counter[tuple[str, Side]] = Counter()

    def __call__(self, name: str, side: Side) -> None:
        if name.startswith(BESIDE):
            return
        self._counts[name, side] += 1
        effect = (name, self._counts[name, side])
        if side is Side.BEFORE:
            self.seen.append(effect)
        if self._death == (effect, side):
            self.died = True
            raise Death


def points(seen: Sequence[Effect], side: Side) -> list[Effect]:
    """Where to die: everywhere until a second attempt begins, which is like the first. Beside a look at something one side is enough."""
    until = seen.index(AGAIN) + 1 if AGAIN in seen else len(seen)
    return [effect for effect in seen[:until] if side is Side.BEFORE or effect[0] not in LOOKS]


class Stage:
    """Where scenarios are played: a database that is each time as it was when it had been made.

    Its file is exchanged beneath it between two plays: a database for each of them would learn all statements anew, a third of a play.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file, self._new = folder / "fleet.db", folder / "new.db"
        self._database = connect(f"sqlite:///{self._file}")
        migrate(self._database)
        self._database.engine.dispose()  # whoever closes it last writes everything into the one file
        shutil.copy(self._file, self._new)

    async def play(self, scenario: Scenario, hook: Counting) -> None:
        """From the beginning, with a dispatcher that may die and the one that comes after it."""
        self._database.engine.dispose()
        for each in self._folder.glob("fleet.db*"):
            each.unlink()
        shutil.copy(self._new, self._file)
        machines = {"a": ["GPU-a0"], "b": ["GPU-b0"]}
        try:
            await _play(Rig(self._database, self._folder, machines), scenario, hook)
        finally:
            shutil.rmtree(self._folder / "blobs", ignore_errors=True)

    def close(self) -> None:
        """No more plays."""
        self._database.close()


async def _play(rig: Rig, scenario: Scenario, hook: Counting) -> None:
    survivor = rig.dispatcher("survivor")
    first = rig.dispatcher("first", hook)

    async def live() -> None:
        try:
            await first.run()
        except BaseException as error:  # a Death, or a group of them, for its tasks died together
            if not _is_death(error):
                raise
            rig.rack.record("death")
            rig.expire_leases()
            await survivor.run()

    living = asyncio.create_task(live())
    try:
        await scenario(rig)
        await rig.until(rig.is_clean)
    finally:
        first.stop()
        survivor.stop()
        await living
    rig.judge()
    assert rig.open_reservations() == []


def _is_death(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(Death)[1] is None
    return isinstance(error, Death)
