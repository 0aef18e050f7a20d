"""kill -9 of a real run at random instants, again and again until it is done: always the same run.

Each run of the tests kills 6 times, with sampling a step ahead; `make soak SUITE=kills` kills KILLS times (default 200), half of them
without. The instants are drawn from a printed seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from groupwise.errors import RunNotFoundError
from groupwise.runs.find import newest_unfinished
from tests.integration.running import TOY, config, what_must_be_equal

MOST_KILLS = 5
"""Of one run; after that it may finish."""

LAGS = (0, 1)


def command(runs: Path, lag: int, resume: bool) -> list[str]:
    settings = runs / "config.yaml"
    runs.mkdir(parents=True, exist_ok=True)
    written = {**config(runs, max_steps=12, lag=lag), "rewards": {"workers": 1}}
    settings.write_text(json.dumps(written))
    words = [sys.executable, "-m", "groupwise", "rl", "-c", str(settings), "-t", TOY]
    return [*words, "--resume"] if resume else words


def begun(runs: Path) -> bool:
    try:
        newest_unfinished("toy", runs)
    except RunNotFoundError:
        return False
    return True


def finished(runs: Path) -> bool:
    summary = runs / "toy" / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["state"] == "finished"


def run_and_kill(runs: Path, lag: int, after: float | None) -> bool:
    """Run until it ends, or kill it `after` seconds from its first durable write. True if it was killed before it ended."""
    process = subprocess.Popen(
        command(runs, lag, begun(runs)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if after is not None:
        deadline = time.monotonic() + 60
        while (
            not (runs / "toy").exists() and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        time.sleep(after)
        process.send_signal(signal.SIGKILL)
    _, talk = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), talk
    return process.returncode != 0


def killed_until_done(runs: Path, lag: int, chance: random.Random, most: int) -> int:
    """Kills one run at most so many times, until it is done; how often it was killed."""
    kills = 0
    while not finished(runs):
        kills += run_and_kill(runs, lag, chance.uniform(0.0, 3.0) if kills < most else None)
    return kills


def kill(count: int, lag: int, runs: Path, chance: random.Random, whole: dict) -> None:
    """Run after run, until `count` processes were killed; each run ends equal to the undisturbed one."""
    kills = number = 0
    while kills < count:
        folder = runs / str(number)
        kills += killed_until_done(folder, lag, chance, min(MOST_KILLS, count - kills))
        assert what_must_be_equal(folder / "toy") == whole, f"run {number} with lag {lag}"
        number += 1
    print(f"lag {lag}: {number} runs, {kills} processes killed, all runs equal")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run with a lag."""

    @cache
    def with_lag(lag: int) -> dict:
        runs = tmp_path_factory.mktemp("uninterrupted")
        run_and_kill(runs, lag, None)
        return what_must_be_equal(runs / "toy")

    return with_lag


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_some_kills_leave_every_run_as_it_would_have_been(whole, tmp_path):
    kill(6, 1, tmp_path, random.Random(1), whole(1))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_kills_leave_every_run_as_it_would_have_been(whole, tmp_path):
    seed = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
    count = int(os.environ.get("KILLS", "200"))
    print(f"seed {seed}")
    chance = random.Random(seed)
    for lag in LAGS:
        kill(count // len(LAGS), lag, tmp_path / str(lag), chance, whole(lag))
