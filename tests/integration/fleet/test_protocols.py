"""Two releases on one machine: the newer one handles attempts that the older one started.

The text of the runner travels with whoever asks, so a control plane always asks one of its own release; older are the supervisors that
still run, with their folders.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from groupwise.jobs.hosts import driver
from groupwise.jobs.hosts.answers import MemberState, RunnerState
from groupwise.jobs.hosts.driver import KnownState, Launch, Runner
from groupwise.jobs.hosts.local import LocalHost
from groupwise.jobs.hosts.runner_text import RunnerText, runner_text
from groupwise.jobs.hosts.spec import JobSpec
from tests.processes import TIMEOUT_S, is_gone
from tests.runner_machine import Machine

WAITING_SCRIPT = (
    "echo begun >>../begun; echo one; until [ -e go ]; do sleep 0.02; done; echo two; exit 3"
)
FOR_EVER = "while :; do sleep 0.1; done"

Release = Callable[[int], Runner]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.end()


@pytest.fixture
def release(here: Machine, monkeypatch: pytest.MonkeyPatch) -> Release:
    """A control plane with a runner of its own from now on."""
    source = runner_text().source

    def begin(number: int) -> Runner:
        text = f"{source}\nRELEASE = {number}\n"
        own = RunnerText(text, hashlib.sha256(text.encode()).hexdigest())
        monkeypatch.setattr(driver, "runner_text", lambda: own)
        return Runner(LocalHost(environment=here.environment), root=str(here.root))

    return begin


async def comes_to(runner: Runner, seen: MemberState, wanted: RunnerState) -> MemberState:
    async with asyncio.timeout(TIMEOUT_S):
        while seen.state is not wanted:
            known = {(seen.job, seen.epoch): KnownState(seen.state, seen.log_size)}
            (seen,) = await runner.wait(known, seconds=TIMEOUT_S)
    return seen


def job(name: str, script: str) -> Launch:
    return Launch(name, 1, JobSpec(("sh", "-c", script)))


async def is_driven_by(here: Machine, first: Runner, then: Callable[[], Runner]) -> None:
    """One launches, the other does all the rest."""
    waits = job("waits", WAITING_SCRIPT)
    await comes_to(first, await first.launch(waits), RunnerState.RUNNING)
    endless = await comes_to(
        first, await first.launch(job("endless", FOR_EVER)), RunnerState.RUNNING
    )
    runner = then()
    seen = await runner.observe(probe=["true"])
    assert {each.job: each.state for each in seen.attempts} == {
        "waits": RunnerState.RUNNING,
        "endless": RunnerState.RUNNING,
    }
    assert [stray for stray in seen.quarantined if stray.what == "folder"] == []
    assert (await runner.launch(waits)).state is RunnerState.RUNNING
    told = await runner.status("waits", 1)
    if told.log_size == 0:
        known = {("waits", 1): KnownState(told.state)}
        (told,) = await runner.wait(known, seconds=TIMEOUT_S)
    assert (await runner.log("waits", 1, 0)).data == b"one\n"
    await runner.touch({("waits", 1): None})
    (here.work("waits") / "go").touch()
    ended = await comes_to(runner, await runner.status("waits", 1), RunnerState.EXITED)
    assert ended.exit is not None
    assert ended.exit.code == 3
    assert (await runner.log("waits", 1, 0)).data == b"one\ntwo\n"
    await runner.kill("endless", 1, grace=0.0)
    ended = await comes_to(runner, await runner.status("endless", 1), RunnerState.EXITED)
    assert ended.exit is not None
    assert ended.exit.reason == "cancelled"
    assert endless.pid is not None
    assert is_gone(endless.pid)
    for name in ("waits", "endless"):
        assert (await runner.release(name, 1, probe=["true"])).clean
    assert (here.folder("waits") / "begun").read_text() == "begun\n"
    await runner.forget("waits", 1)
    assert (await runner.status("waits", 1)).state is RunnerState.ABSENT


async def test_attempts_of_the_previous_release_are_continued(
    here: Machine, release: Release
) -> None:
    await is_driven_by(here, release(1), lambda: release(2))
    assert len(list((here.root / "runners").glob("*.py"))) == 2
