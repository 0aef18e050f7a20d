"""Environments in real processes that really hang, die and fork.

1. A rollout is the same wherever its environment lives, and however many workers there are.
2. One that hangs is timed out, one that dies fails; the others that lived in the same process go on in a new one.
3. What is made anew must answer as before, or its rollout fails.
4. In the run's own process nothing can be killed: a hang ends the run, with a message that says what to do.
"""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import EnvironmentWorkerError
from groupwise.tasks.environment import Step
from groupwise.tasks.rollouts.environment import EnvironmentRollouts, Limits
from groupwise.tasks.rollouts.hosts import LocalHost, WorkerHost
from groupwise.tasks.rollouts.sessions import Sessions
from tests.scripted import Pieces, ScriptedSampler, ask_for

MODULE = Path(__file__).with_name("misbehaving_environments.py")
PIECES = Pieces()


@pytest.fixture
async def hosted():
    """`hosted(name)`: rollouts in an environment of `misbehaving_environments.py`, in workers."""
    made: list[EnvironmentRollouts] = []

    def make(name: str, *, workers: int = 1, start: str = "make", **limits: float):
        host = WorkerHost(f"{MODULE}:{start}", {"name": name}, workers=workers)
        made.append(rollouts_in(host, **limits))
        return made[-1]

    yield make
    for kind in made:
        await kind.close()


def rollouts_in(
    host: Any, time_limit: float = 20.0, max_seconds: float = 60.0
) -> EnvironmentRollouts:
    return EnvironmentRollouts(host, PIECES, Limits(5, 200, time_limit, max_seconds))


async def drawn(kind: EnvironmentRollouts, folder: Path, draws: range = range(1), members: int = 3):
    sampler = ScriptedSampler(PIECES, lambda seed, seen: f"{3 + seen.count(';')}")
    asks = [
        ask_for(
            PIECES,
            "p:",
            PIECES("p:")["input_ids"],
            members=members,
            draw=draw,
            max_tokens=1,
            folder=str(folder),
        )
        for draw in draws
    ]
    return await asyncio.gather(*(kind.sample(sampler, ask) for ask in asks))


def processes(folder: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in folder.glob("made-*")}


def gone(process: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


async def test_rollouts_are_the_same_wherever_their_environments_live(hosted, tmp_path):
    from tests.unit.tasks.rollouts import misbehaving_environments as module

    local = rollouts_in(LocalHost(Sessions(module.Counts)))
    here = await drawn(local, tmp_path, range(3))
    await local.close()
    assert processes(tmp_path) == {os.getpid()}
    one = await drawn(hosted("Counts"), tmp_path, range(3))
    two = await drawn(hosted("Counts", workers=2), tmp_path, range(3))
    assert here == one == two
    assert here[0].rollouts[0].completion == "3=3;4=7;5=12;"
    assert len(processes(tmp_path)) == 4


@pytest.mark.parametrize(
    ("name", "outcome", "said"),
    [
        ("Hangs", "timed_out", "`Hangs.step, turn 2`"),
        ("Dies", "failed", "SIGKILL"),
    ],
)
async def test_lost_process_costs_the_one_rollout_and_the_others_continue(
    hosted, tmp_path, name, outcome, said
):
    kind = hosted(name, time_limit=0.5)
    await kind.start()
    (group,) = await drawn(kind, tmp_path)
    assert [each.outcome for each in group.rollouts] == ["pending", outcome, "pending"]
    assert said in group.rollouts[1].reason
    assert group.rollouts[1].reward is None
    assert [group.rollouts[i].completion for i in (0, 2)] == ["3=3;4=7;5=12;"] * 2
    assert [group.rollouts[i].parts[-1].value for i in (0, 2)] == [12.0, 12.0]
    assert len(processes(tmp_path)) == 2
    (again,) = await drawn(kind, tmp_path, range(7, 8), members=1)  # and the next group is served
    assert [each.outcome for each in again.rollouts] == ["pending"]


async def test_environment_that_is_not_repeatable_fails_when_its_process_is_lost(hosted, tmp_path):
    (group,) = await drawn(hosted("Forgets"), tmp_path)
    assert [each.outcome for each in group.rollouts] == ["failed"] * 3
    reasons = [str(each.reason) for each in group.rollouts]
    assert sum("answered differently in turn 1" in reason for reason in reasons) == 2


async def test_forked_children_end_with_their_worker_without_disturbing_others(hosted, tmp_path):
    kind = hosted("Forks", time_limit=10.0)
    (group,) = await drawn(kind, tmp_path)
    assert [each.outcome for each in group.rollouts] == ["pending"] * 3
    assert [each.completion for each in group.rollouts] == ["3=3;4=7;5=12;"] * 3
    children = [int(path.name.partition("-")[2]) for path in tmp_path.glob("child-*")]
    await kind.close()
    assert children
    assert all(gone(child) for child in children if child)


async def test_cancelled_group_leaves_nothing_behind(hosted, tmp_path):
    kind = hosted("Hangs", time_limit=600)
    work = asyncio.ensure_future(drawn(kind, tmp_path))
    while not processes(tmp_path):  # noqa: ASYNC110 — the event is in another process
        await asyncio.sleep(0.005)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await kind.close()
    assert all(gone(process) for process in processes(tmp_path))


async def test_hang_in_the_runs_own_process_ends_the_run():
    freed = threading.Event()

    class Waits:
        def step(self, completion):
            freed.wait(60)
            return Step(done=True)

    kind = rollouts_in(LocalHost(Sessions(Waits)), time_limit=0.2)
    with pytest.raises(EnvironmentWorkerError, match=r"`Waits\.step, turn 1` .* 0\.2 s"):
        await drawn(kind, Path(), members=1)
    freed.set()
    await kind.close()


@pytest.mark.parametrize(("name", "outcome"), [("Ends", "failed"), ("Spams", "pending")])
async def test_exits_and_floods_keep_the_worker(hosted, tmp_path, name, outcome):
    groups = await drawn(hosted(name), tmp_path, range(2))
    assert {each.outcome for group in groups for each in group.rollouts} == {outcome}
