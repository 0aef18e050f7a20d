"""A dispatcher crashes before and after each of its side effects; the one that takes over must keep every guarantee.

Each scenario is played once without a death, and the effects of its attempts are counted by name. Then it is played again for each of them,
twice: dying just before it and just after it, as by kill -9. When the lease of the dead has run out another dispatcher takes over, and the
history is checked without the dispatcher's code.

A run of the tests takes each seventh of these deaths, another one in each scenario, so that all kinds of effects have their turn; all of
them with `make soak SUITE=fleet`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.effects import Death, Side
from groupwise.jobs.fleet.operations import jobs
from groupwise.jobs.fleet.store.database import connect
from groupwise.jobs.fleet.store.tables import Base, Checkpoint
from tests.fake_hosts import Fault, Script
from tests.fleet_databases import copied
from tests.in_process_fleet import SOMEBODY, InProcessFleet
from tests.rotation import turn

Scenario = Callable[[InProcessFleet], Awaitable[None]]
Effect = tuple[str, int]
"""Name, and which of that name."""
BESIDE = ("lease.", "job.admit", "host.wait", "host.observe", "stray.", "vm.")
"""What a dispatcher does all the time, whatever becomes of an attempt."""
READING_REQUESTS = frozenset(
    {"host.status", "host.log", "host.manifest", "host.release", "host.missing"}
)
AGAIN: Effect = ("attempt.launching", 2)
VARYING = frozenset(
    "job.claim job.mark host.status host.log host.release host.kill attempt.record attempt.leaking "
    "attempt.release".split()
)
"""How often a machine is asked and the queue is looked at depends on how tasks interleave; after the last one nobody may be left to die."""
LONG = Script(ticks=10**6)
LONGEST_PAUSE = 700.0
"""Seconds before a job is tried again."""


# --- scenarios: one machine -----------------------------------------------------------------------


async def plain(fleet: InProcessFleet) -> None:
    fleet.submit("job")
    await fleet.until(fleet.has("job", "completed"))


async def fails_first(fleet: InProcessFleet) -> None:
    fleet.rack.scripts["job"] = [Script(code=1), Script()]
    await plain(fleet)
    assert [a.outcome for a in fleet.attempts("job")] == ["failed", "succeeded"]


async def answer_lost(fleet: InProcessFleet) -> None:
    fleet.rack["a"].fail("launch", Fault.ANSWER_LOST)
    await plain(fleet)


async def refused(fleet: InProcessFleet) -> None:
    fleet.rack.scripts["job"] = [Script(refusal="gpu_busy"), Script()]
    await plain(fleet)


async def turned_down(fleet: InProcessFleet) -> None:
    """The runner has no room on its disk; nothing was claimed."""
    fleet.rack["a"].fail("launch", Fault.REFUSED)
    await plain(fleet)


async def waits_for_room(fleet: InProcessFleet) -> None:
    """Both want all that the fleet has; who dies may have placed one, and not have marked the other one yet."""
    fleet.rack.scripts["job"] = [Script(ticks=3)]
    fleet.submit("job", resources={"gpus": 1, "vm": "a"})
    fleet.submit("later", resources={"gpus": 1, "vm": "a"}, priority=-1)
    await fleet.until(fleet.has("later", "completed"))


async def files(fleet: InProcessFleet) -> None:
    sha256 = fleet.store.put(b"print(1)")
    fleet.submit("job", files={"train.py": (sha256, 0o644, 8)})
    await fleet.until(fleet.has("job", "completed"))


async def checkpoint_damaged(fleet: InProcessFleet) -> None:
    """The newest one has rotted on the disk; the one before is whole."""
    fleet.submit("job", hold=True)
    for step in (10, 20):
        sha256 = fleet.store.put(str(step).encode())
        row = Checkpoint(
            job_id="job", generation=0, epoch=0, path=f"outputs/{step}", step=step,
            manifest={f"outputs/{step}/w.bin": [sha256, 0o644, 2]}, mirrored_at=1.0,
        )  # fmt: skip
        fleet.database.run(lambda s, row=row: s.add(row))
    rotten = fleet.store.path(sha256)
    rotten.chmod(0o644)
    rotten.write_bytes(b"??")
    fleet.database.run(lambda s: jobs.release(s, SOMEBODY, "job"))
    await fleet.until(fleet.has("job", "completed"))
    ended = [(a.failure_class, (a.resume_from or {})["step"]) for a in fleet.attempts("job")]
    # Whoever goes on may find it void and not know why: then it is tried once more.
    assert [each for each in ended if each != (None, 20)] == [("not_provided", 20), (None, 10)]


# --- several machines -----------------------------------------------------------------------------


async def gang(fleet: InProcessFleet) -> None:
    fleet.submit("job", resources={"gpus": 1, "machines": 2})
    await fleet.until(fleet.has("job", "completed"))


async def gang_refused(fleet: InProcessFleet) -> None:
    """One of two machines has no room left on its disk; it has again when the gang has been taken back."""
    fleet.rack["b"].refuses = "disk_full"
    fleet.rack.scripts["job"] = [LONG, Script()]
    fleet.submit("job", resources={"gpus": 1, "machines": 2})
    await fleet.until(lambda: any(r["what"] == "refused" for r in fleet.rack.history))
    fleet.rack["b"].refuses = None
    fleet.rack.scripts["job"] = [Script()]
    await fleet.until(fleet.has("job", "completed"))


# --- ends that do not come by themselves ----------------------------------------------------------


async def begun(fleet: InProcessFleet) -> tuple[str, int]:
    """Submits a job that runs until something ends it."""
    fleet.rack.scripts["job"] = [LONG, Script()]
    fleet.submit("job")
    await fleet.until(lambda: fleet.rack.running() != [])
    ((job, epoch),) = fleet.rack.running()
    return job, epoch


async def cancelled(fleet: InProcessFleet) -> None:
    await begun(fleet)
    fleet.cancel("job")
    await fleet.until(fleet.has("job", "cancelled"))
    assert fleet.rack.running() == []


async def supervisor_lost(fleet: InProcessFleet) -> None:
    fleet.rack["a"].kill_supervisor(*await begun(fleet))
    await fleet.until(fleet.has("job", "completed"))


async def lost(fleet: InProcessFleet) -> None:
    await begun(fleet)
    fleet.rack["a"].power_off()
    fleet.lose("a")
    await fleet.until(fleet.has("job", "completed"))


SCENARIOS: tuple[Scenario, ...] = (
    *(plain, fails_first, answer_lost, refused, turned_down, waits_for_room, files),
    *(checkpoint_damaged, gang, gang_refused, cancelled, supervisor_lost, lost),
)


# --- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "every", [7, pytest.param(1, marks=pytest.mark.soak(suite="fleet"))], ids=["some", "all"]
)
@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[s.__name__ for s in SCENARIOS])
async def test_a_dispatcher_may_die_beside_every_effect(
    number: int, side: Side, every: int, migrated_file: Path, tmp_path: Path
) -> None:
    missed: list[Effect] = []
    with closing(Stage(migrated_file, tmp_path)) as stage:
        golden = Counting()
        await stage.play(SCENARIOS[number], golden)
        where = points(golden.seen, side)
        assert len(where) >= 4
        first = (turn() + number + 3 * (side is Side.AFTER)) % every
        for effect in where[first::every]:
            hook = Counting((effect, side))
            try:
                await stage.play(SCENARIOS[number], hook)
            except AssertionError as error:
                raise AssertionError(f"dying {side} {effect}: {error}") from error
            if not hook.died:
                missed.append(effect)
    assert [effect for effect in missed if effect[0] not in VARYING] == []


@pytest.mark.parametrize("days", [2, -2])
async def test_clocks_of_the_control_plane_decide_nothing(
    days: int, migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far one is off: no other time than that of the database is written into it."""
    true = time.time
    began = true() - 60.0
    monkeypatch.setattr(time, "time", lambda: true() + days * 86_400)
    with closing(Stage(migrated_file, tmp_path)) as stage:
        for scenario in (plain, fails_first, gang):
            await stage.play(scenario, Counting())
            assert stage.other_times(began, true() + LONGEST_PAUSE) == []


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
    return [
        effect
        for effect in seen[:until]
        if side is Side.BEFORE or effect[0] not in READING_REQUESTS
    ]


class Stage:
    """Where scenarios are played: a database that is each time as it was when it had been made.

    Its file is exchanged beneath it between two plays: a database for each of them would learn all statements anew, a third of a play.
    """

    def __init__(self, new: Path, folder: Path) -> None:
        self._new, self._folder = new, folder
        self._database = connect(copied(new, folder))

    async def play(self, scenario: Scenario, hook: Counting) -> None:
        """From the beginning, with a dispatcher that may die and the one that comes after it."""
        self._database.engine.dispose()
        for each in self._folder.glob("fleet.db*"):
            each.unlink()
        copied(self._new, self._folder)
        fleet = InProcessFleet(self._database, self._folder, {"a": ["GPU-a0"], "b": ["GPU-b0"]})
        try:
            await _play(fleet, scenario, hook)
        finally:
            shutil.rmtree(self._folder / "blobs", ignore_errors=True)

    def other_times(self, first: float, last: float) -> list[str]:
        """Whatever in the database is a moment, and not between these."""

        def look(session: Session) -> Iterator[str]:
            for table in Base.metadata.sorted_tables:
                for row in session.execute(select(table)).mappings():
                    for name, value in row.items():
                        if isinstance(value, float) and value > 1e9 and not first <= value <= last:
                            yield f"{table.name}.{name} is {value - first:.0f} s off"

        return self._database.read(lambda s: list(look(s)))

    def close(self) -> None:
        """No more plays."""
        self._database.close()


async def _play(fleet: InProcessFleet, scenario: Scenario, hook: Counting) -> None:
    survivor = fleet.dispatcher("survivor")
    first = fleet.dispatcher("first", hook)

    async def live() -> None:
        try:
            await first.run()
        except BaseException as error:  # a Death, or a group of them, for its tasks died together
            if not _is_death(error):
                raise
            fleet.rack.record("death")
            fleet.expire_leases()
            await survivor.run()

    living = asyncio.create_task(live())
    try:
        await scenario(fleet)
        await fleet.until(fleet.is_clean)
    finally:
        first.stop()
        survivor.stop()
        await living
    fleet.check_history()
    assert fleet.open_reservations() == []


def _is_death(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(Death)[1] is None
    return isinstance(error, Death)
