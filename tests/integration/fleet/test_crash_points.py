"""A dispatcher dies before and after every effect that it has on the world; whoever goes on keeps every promise.

Each scenario is played once without a death, and the effects of its attempts are counted by name. Then it is played again for each of them,
twice: dying just before it and just after it, as by kill -9. When the lease of the dead has run out another dispatcher takes over, and the
history is judged by somebody who knows nothing of dispatchers.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from groupwise.fleet.attempts.effects import Death, Side
from groupwise.fleet.store.database import connect, migrate
from groupwise.testing.fake_hosts import Fault, Script
from tests.fleet_rig import Rig

Effect = tuple[str, int]
"""Name, and which of that name."""
BESIDE = ("lease.", "job.admit", "host.wait", "host.observe", "stray.", "vm.")
"""What a dispatcher does all the time, whatever becomes of an attempt."""
LOOKS = frozenset({"host.status", "host.log", "host.manifest", "host.release", "host.missing"})
AGAIN: Effect = ("attempt.launching", 2)
VARYING = frozenset(
    "job.claim host.status host.log host.release host.kill attempt.record attempt.leaking "
    "attempt.release".split()
)
"""How often a machine is asked and the queue is looked at depends on how tasks interleave; after the last one nobody may be left to die."""
LONG = Script(ticks=10**6)


async def plain(rig: Rig) -> None:
    rig.submit("job")
    await rig.until(rig.has("job", "completed"))


async def fails_first(rig: Rig) -> None:
    rig.rack.scripts["job"] = [Script(code=1), Script()]
    rig.submit("job")
    await rig.until(rig.has("job", "completed"))
    assert [a.outcome for a in rig.attempts("job")] == ["failed", "succeeded"]


async def answer_lost(rig: Rig) -> None:
    rig.rack["a"].fail("launch", Fault.ANSWER_LOST)
    await plain(rig)


async def refused(rig: Rig) -> None:
    rig.rack.scripts["job"] = [Script(refusal="gpu_busy"), Script()]
    rig.submit("job")
    await rig.until(rig.has("job", "completed"))


async def turned_down(rig: Rig) -> None:
    """The runner has no room on its disk; nothing was claimed."""
    rig.rack["a"].fail("launch", Fault.REFUSED)
    await plain(rig)


async def cancelled(rig: Rig) -> None:
    rig.rack.scripts["job"] = [LONG]
    rig.submit("job")
    await rig.until(lambda: rig.rack.running() != [])
    rig.cancel("job")
    await rig.until(rig.has("job", "cancelled"))
    assert rig.rack.running() == []


async def files(rig: Rig) -> None:
    sha256 = rig.store.put(b"print(1)")
    rig.submit("job", files={"train.py": (sha256, 0o644, 8)})
    await rig.until(rig.has("job", "completed"))


async def gang(rig: Rig) -> None:
    rig.submit("job", resources={"gpus": 1, "machines": 2})
    await rig.until(rig.has("job", "completed"))


async def gang_refused(rig: Rig) -> None:
    """One of two machines has a stranger on its GPU; it is gone when the gang has been taken back."""
    rig.rack["b"].foreign.add("GPU-b0")
    rig.rack.scripts["job"] = [LONG, Script()]
    rig.submit("job", resources={"gpus": 1, "machines": 2})
    await rig.until(lambda: any(r["what"] == "refused" for r in rig.rack.history))
    rig.rack["b"].foreign.clear()
    rig.rack.scripts["job"] = [Script()]
    await rig.until(rig.has("job", "completed"))


async def supervisor_lost(rig: Rig) -> None:
    rig.rack.scripts["job"] = [LONG, Script()]
    rig.submit("job")
    await rig.until(lambda: rig.rack.running() != [])
    ((job, epoch),) = rig.rack.running()
    rig.rack["a"].kill_supervisor(job, epoch)
    await rig.until(rig.has("job", "completed"))


async def lost(rig: Rig) -> None:
    rig.rack.scripts["job"] = [LONG, Script()]
    rig.submit("job")
    await rig.until(lambda: rig.rack.running() != [])
    rig.rack["a"].power_off()
    rig.lose("a")
    await rig.until(rig.has("job", "completed"))


SCENARIOS: dict[str, Callable[[Rig], Awaitable[None]]] = {
    scenario.__name__: scenario
    for scenario in (
        plain, fails_first, answer_lost, refused, turned_down, cancelled, files, gang,
        gang_refused, supervisor_lost, lost,
    )
}  # fmt: skip


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


async def play(rig: Rig, scenario: Callable[[Rig], Awaitable[None]], hook: Counting) -> None:
    """The scenario, with a dispatcher that may die and the one that comes after it."""
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


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, to be copied."""
    path = tmp_path_factory.mktemp("template") / "fleet.db"
    database = connect(f"sqlite:///{path}")
    migrate(database)
    database.close()
    return path


@pytest.fixture
def play_anew(template: Path, tmp_path: Path) -> Callable[[str, Counting], Awaitable[None]]:
    """A scenario in a fleet of its own."""
    number = iter(range(10_000))

    async def anew(name: str, hook: Counting) -> None:
        folder = tmp_path / str(next(number))
        folder.mkdir()
        shutil.copy(template, folder / "fleet.db")
        database = connect(f"sqlite:///{folder / 'fleet.db'}")
        try:
            rig = Rig(database, folder, {"a": ["GPU-a0"], "b": ["GPU-b0"]})
            await play(rig, SCENARIOS[name], hook)
        finally:
            database.close()
            shutil.rmtree(folder)

    return anew


@pytest.mark.fleet
@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_dispatcher_may_die_beside_every_effect(
    name: str, side: Side, play_anew: Callable[[str, Counting], Awaitable[None]]
) -> None:
    golden = Counting()
    await play_anew(name, golden)
    where = points(golden.seen, side)
    assert len(where) >= 4
    missed: list[Effect] = []
    for effect in where:
        hook = Counting((effect, side))
        try:
            await play_anew(name, hook)
        except AssertionError as error:
            raise AssertionError(f"dying {side} {effect}: {error}") from error
        if not hook.died:
            missed.append(effect)
    assert [effect for effect in missed if effect[0] not in VARYING] == []
