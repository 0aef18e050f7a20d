"""Attempts that an engine starts: laid out, waiting with a token that only one process gets, and run in the foreground by `begin.sh`.

The engine of these tests is whoever runs that script.
"""

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from groupwise.jobs.hosts.answers import ExitReason, MemberState, RunnerState
from groupwise.jobs.hosts.driver import Launch, Runner, Scheduler
from groupwise.jobs.hosts.host import RunnerRefused
from groupwise.jobs.hosts.local import LocalHost
from groupwise.jobs.hosts.spec import JobSpec, Limits
from tests.processes import TIMEOUT_S

SECRET = "canary-of-a-token-2209"


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[Runner]:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    host = LocalHost(environment={"HOME": str(tmp_path), "PATH": path})
    yield Runner(host, root=str(tmp_path / "root"))
    await host.close()


def job(script: str, epoch: int = 1, *arguments: str) -> Launch:
    spec = JobSpec(
        ("python3", "-c", script, *arguments),
        secrets=("TOKEN",),
        artefacts=("out",),
        limits=Limits(grace_seconds=5),
    )
    return Launch("j", epoch, spec, secrets={"TOKEN": SECRET}, engine=Scheduler("queue"))


def begins(state: MemberState, **environment: str) -> "subprocess.Popen[str]":
    """The engine has found a machine for it."""
    assert state.folder is not None
    given = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **environment}
    return subprocess.Popen(
        ["sh", f"{state.folder}/begin.sh"],
        env=given,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(state: MemberState, **environment: str) -> tuple[int, str]:
    engine = begins(state, **environment)
    said, _ = engine.communicate(timeout=TIMEOUT_S)
    return engine.returncode, said


async def log_text(runner: Runner, epoch: int = 1) -> str:
    return (await runner.log("j", epoch, 0)).data.decode()


async def until_said(runner: Runner, what: str) -> None:
    until = time.monotonic() + TIMEOUT_S
    while what not in await log_text(runner):
        assert time.monotonic() < until
        await asyncio.sleep(0.02)


def hide_supervisor(folder: Path) -> None:
    """As where it is on another machine, and locks do not reach there."""
    lock, state = folder / "supervisor.lock", folder / "state.json"
    lock.rename(lock.with_suffix(".away"))
    lock.touch()
    state.write_text(json.dumps({**json.loads(state.read_text()), "boot_id": "another"}))


def holding(folder: Path, canary: str) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path.name for path in files if canary.encode() in path.read_bytes()]


async def test_it_waits_until_its_engine_begins_it_and_ends_with_the_same_status(
    runner: Runner, tmp_path: Path
) -> None:
    shows = "import os; print(os.environ['TOKEN'][:6], os.environ['SLURM_JOB_ID'], os.environ['CUDA_VISIBLE_DEVICES']); raise SystemExit(7)"
    waits = await runner.launch(job(shows))
    assert (waits.state, waits.engine, waits.is_alive) == (RunnerState.QUEUED, "queue", False)
    assert (await runner.launch(job("another"))).state is RunnerState.QUEUED
    assert ended(waits, SLURM_JOB_ID="41", CUDA_VISIBLE_DEVICES="2,3") == (7, "")
    found = await runner.status("j", 1)
    assert found.state is RunnerState.EXITED
    assert found.exit is not None
    assert (found.exit.code, found.exit.reason, found.exit.gpus) == (7, ExitReason.EXITED, 2)
    assert await log_text(runner) == "canary 41 2,3\n"
    assert holding(tmp_path / "root", SECRET) == []


async def test_voided_it_never_begins_says_why_and_leaves_no_secret(
    runner: Runner, tmp_path: Path
) -> None:
    waits = await runner.launch(job("print('it ran')"))
    assert holding(tmp_path / "root", SECRET) == ["queued.json"]
    assert stat.S_IMODE(os.stat(f"{waits.folder}/queued.json").st_mode) == 0o600
    with pytest.raises(RunnerRefused, match="void it first"):
        await runner.forget("j", 1)
    voided = await runner.void("j", 1, because="the queue was emptied")
    assert voided.refused is not None
    found = (voided.state, voided.refused.message)
    assert found == (RunnerState.VOIDED, "the queue was emptied")
    assert holding(tmp_path / "root", SECRET) == []
    code, told = ended(waits)
    assert (code, "voided" in told) == (0, True)
    assert await log_text(runner) == ""
    assert (await runner.void("j", 1)).state is RunnerState.VOIDED
    await runner.forget("j", 1)
    assert ended(waits)[0] == 2  # as sh says of a script that is not there
    assert (await runner.launch(job("print('it ran')"))).state is RunnerState.REFUSED


async def test_only_one_of_many_engines_starts_the_attempt(runner: Runner) -> None:
    waits = await runner.launch(job("open('out', 'a').write('x'); print('it ran')"))
    engines = [begins(waits) for _ in range(8)]
    told = [engine.communicate(timeout=TIMEOUT_S)[0] for engine in engines]
    assert [engine.returncode for engine in engines] == [0] * 8
    assert sum("it does not begin again" in text for text in told) == 7
    assert "begun before" in ended(waits)[1]
    assert await log_text(runner) == "it ran\n"


async def test_void_and_begin_race_and_one_of_them_decides(runner: Runner) -> None:
    for epoch in range(1, 9):
        waits = await runner.launch(job("print('it ran')", epoch))
        engine = begins(waits)
        await asyncio.sleep(epoch * 0.02)
        voided = await runner.void("j", epoch)
        engine.communicate(timeout=TIMEOUT_S)
        ran = await log_text(runner, epoch) == "it ran\n"
        assert ran is (voided.state is not RunnerState.VOIDED)


SAVES = """
import signal, sys, time
def save(number, frame):
    print(time.time(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print('on', flush=True)
signal.pause()
"""


async def test_an_eviction_that_only_the_engine_knows_of_reaches_the_job_at_once(
    runner: Runner,
) -> None:
    """As Modal and AWS do, whose notice nothing else of the job hears: all of it is for saving."""
    waits = await runner.launch(job(SAVES))
    engine = begins(waits)
    await until_said(runner, "on")
    began = time.time()
    (Path(str(waits.folder)) / "evict").write_text("60")
    engine.communicate(timeout=TIMEOUT_S)
    found = await runner.status("j", 1)
    assert found.exit is not None
    assert found.exit.reason is ExitReason.EVICTED
    assert "queue ended it" in found.exit.message
    assert float((await log_text(runner)).split()[1]) - began < 15


async def test_cancelled_it_ends_although_its_lock_is_not_seen(runner: Runner) -> None:
    waits = await runner.launch(job("import time; print('on', flush=True); time.sleep(1000)"))
    engine = begins(waits)
    await until_said(runner, "on")
    hide_supervisor(Path(str(waits.folder)))
    found = await runner.kill("j", 1, grace=5)
    assert found.state is RunnerState.REBOOTED
    assert found.beat_age is not None
    assert found.beat_age < TIMEOUT_S
    engine.communicate(timeout=TIMEOUT_S)
    found = await runner.status("j", 1)
    assert found.exit is not None
    assert found.exit.reason is ExitReason.CANCELLED


async def test_an_attempt_whose_start_was_killed_is_lost_and_not_taken_over(runner: Runner) -> None:
    waits = await runner.launch(job("print('it ran')"))
    os.rename(f"{waits.folder}/queued.json", f"{waits.folder}/queued.json.killed")
    found = await runner.status("j", 1)
    assert (found.state, found.pid) == (RunnerState.LOST, None)
    assert (await runner.launch(job("print('it ran')"))).state is RunnerState.LOST
    assert (await runner.void("j", 1)).state is RunnerState.LOST
    assert ended(waits)[0] == 0
    assert await log_text(runner) == ""
    again = await runner.launch(job("print('it ran')", 2))
    assert ended(again) == (0, "")
    assert await log_text(runner, 2) == "it ran\n"
