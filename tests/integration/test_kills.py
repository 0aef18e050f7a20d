"""kill -9 of a real run at random instants, again and again until it is done: always the same run.

The instants are drawn from a printed seed. CI kills twice; `make soak SUITE=kills` takes KILLS (default 100) runs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groupwise.errors import RunNotFoundError
from groupwise.runs.find import newest_unfinished
from tests.integration.running import TOY, config, what_must_be_equal

MOST_KILLS = 3
"""Of one run; after that it may finish."""


def command(runs: Path, resume: bool) -> list[str]:
    settings = runs / "config.yaml"
    runs.mkdir(parents=True, exist_ok=True)
    written = {**config(runs, max_steps=12), "rewards": {"workers": 1}}
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


def run_and_kill(runs: Path, after: float | None) -> None:
    """Run until it ends, or kill it `after` seconds from its first durable write."""
    process = subprocess.Popen(
        command(runs, begun(runs)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
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


def killed_until_done(runs: Path, chance: random.Random) -> int:
    kills = 0
    while not finished(runs):
        run_and_kill(runs, chance.uniform(0.0, 3.0) if kills < MOST_KILLS else None)
        kills += 1
        assert kills <= MOST_KILLS + 1
    return kills


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    runs = tmp_path_factory.mktemp("uninterrupted")
    run_and_kill(runs, None)
    return what_must_be_equal(runs / "toy")


@pytest.mark.slow
def test_a_killed_run_ends_equal(whole, tmp_path):
    assert killed_until_done(tmp_path, random.Random(1)) >= 1
    assert what_must_be_equal(tmp_path / "toy") == whole


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_killed_runs_end_equal(whole, tmp_path):
    seed = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
    count = int(os.environ.get("KILLS", "100"))
    print(f"seed {seed}")
    chance = random.Random(seed)
    kills = 0
    for number in range(count):
        kills += killed_until_done(tmp_path / str(number), chance)
        assert what_must_be_equal(tmp_path / str(number) / "toy") == whole, f"run {number}"
    print(f"{count} runs, {kills} processes, all equal")
