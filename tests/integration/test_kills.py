"""kill -9 of a real run at random instants, again and again until it is done: always the same run.

Each run of the tests kills 3 times, with sampling a step ahead, processes that are forked from this one, which has imported everything:
what an interpreter imports is not what dies here. `make soak SUITE=kills` kills whole interpreters, KILLS times (default 200), half of
them without a lag. The instants are drawn from a printed seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from groupwise.cli.main import main
from groupwise.core.errors import RunNotFoundError
from groupwise.runs.find import newest_unfinished
from tests.integration.toy_run import TOY, config, what_must_be_equal

MAX_KILLS = 5
"""Of one run; after that it may finish."""

LAGS = (0, 1)


Begin = Callable[[list[str], Path], int]
"""Begins a process that runs a command: its id, given the words and the file that it talks to."""


def spawned(words: list[str], talk: Path) -> int:
    """An interpreter of its own."""
    talks = (os.POSIX_SPAWN_OPEN, 1, str(talk), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    command = [sys.executable, "-m", "groupwise", *words]
    actions = [talks, (os.POSIX_SPAWN_DUP2, 1, 2)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)


def forked(words: list[str], talk: Path) -> int:
    """A child of this process, which goes on with what is imported here."""
    # A time limit that ran out between the two halves of a fork would leave the lock of `logging` held.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    child = os.fork()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    if child:
        return child
    code = 1
    try:
        file = os.open(talk, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(file, number)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        code = main(words)
    except BaseException:  # noqa: BLE001 — a child must never return into the tests
        traceback.print_exc()
    os._exit(code)


def command(runs: Path, lag: int, resume: bool) -> list[str]:
    settings = runs / "config.yaml"
    runs.mkdir(parents=True, exist_ok=True)
    written = config(runs, max_steps=8, max_off_policy_steps=lag)
    if lag == 0:  # another way to score them
        written["rewards"] = {"workers": 1}
    settings.write_text(json.dumps(written))
    words = ["rl", "-c", str(settings), "-t", TOY]
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


def run_and_kill(begin: Begin, runs: Path, lag: int, after: float | None) -> bool:
    """Run until it ends, or kill it `after` seconds from its first durable write. True if it was killed before it ended."""
    words = command(runs, lag, begun(runs))
    process = begin(words, runs / "talk")
    left = None
    if after is not None:
        left = waited(process, 60, until=(runs / "toy").exists)
        left = waited(process, after) if left is None else left
        if left is None:
            os.kill(process, signal.SIGKILL)
    left = waited(process, 120) if left is None else left
    assert left in (0, -signal.SIGKILL), (runs / "talk").read_text()
    return left != 0


def waited(process: int, seconds: float, until: Callable[[], bool] = lambda: False) -> int | None:
    """Its exit code, once it has ended; None where the time has passed, or it is so, before that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody killed."""

    left: dict
    resumed: float
    """Seconds from its beginning to its end: a run that goes on is killed at an instant of such a time."""
    begun: float
    """Seconds from its first durable write: a run that begins, likewise."""


def killed_until_done(
    begin: Begin, runs: Path, lag: int, rng: random.Random, most: int, whole: Undisturbed
) -> int:
    """Kills one run at most so many times, until it is done; how often it was killed."""
    kills = 0
    while not finished(runs):
        longest = whole.resumed if begun(runs) else whole.begun
        after = rng.uniform(0.0, longest) if kills < most else None
        kills += run_and_kill(begin, runs, lag, after)
    return kills


def kill(
    begin: Begin, count: int, lag: int, runs: Path, rng: random.Random, whole: Undisturbed
) -> None:
    """Run after run, until `count` processes were killed; each run ends equal to the undisturbed one."""
    kills = number = 0
    while kills < count:
        folder, most = runs / str(number), min(MAX_KILLS, count - kills)
        kills += killed_until_done(begin, folder, lag, rng, most, whole)
        assert what_must_be_equal(folder / "toy") == whole.left, f"run {number} with lag {lag}"
        number += 1
    print(f"lag {lag}: {number} runs, {kills} processes killed, all runs equal")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run, begun that way and with that lag."""

    @cache
    def with_lag(begin: Begin, lag: int) -> Undisturbed:
        runs = tmp_path_factory.mktemp("uninterrupted")
        times = [time.monotonic()]
        process = begin(command(runs, lag, resume=False), runs / "talk")
        assert waited(process, 60, until=(runs / "toy").exists) is None
        times.append(time.monotonic())
        assert waited(process, 120) == 0, (runs / "talk").read_text()
        times.append(time.monotonic())
        left = what_must_be_equal(runs / "toy")
        return Undisturbed(left, resumed=times[2] - times[0], begun=times[2] - times[1])

    return with_lag


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_some_kills_leave_every_run_as_it_would_have_been(whole, tmp_path):
    kill(forked, 3, 1, tmp_path, random.Random(1), whole(forked, 1))


@pytest.mark.soak(suite="kills")
@pytest.mark.timeout(0)
def test_many_kills_leave_every_run_as_it_would_have_been(whole, tmp_path):
    seed = int(os.environ.get("SEED", str(random.SystemRandom().randrange(10**6))))
    count = int(os.environ.get("KILLS", "200"))
    print(f"seed {seed}")
    rng = random.Random(seed)
    for lag in LAGS:
        kill(spawned, count // len(LAGS), lag, tmp_path / str(lag), rng, whole(spawned, lag))
