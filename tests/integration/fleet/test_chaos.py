"""Fate against a fleet of real parts, and a judge that knows nothing of how it works.

Two dispatchers, poller, requeue manager and tracker as processes of their own, real PostgreSQL, real NATS, three machines with sshd and two
GPUs each. For CHAOS_SECONDS they are killed, frozen, cut off and deprived of power, while clients submit jobs that fail, hang on, leave
processes behind and print megabytes. Then all is healed, everything has to come to rest, and `tests/fleet_history.py` judges.

In a run of the tests there is a minute of that with a seed of its own, which is printed (SEED repeats it); with `make soak SUITE=fleet`
it is half an hour.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import ssh_hosts
from tests.chaos.fleet import ROOT, real_fleet
from tests.chaos.nemesis import Nemesis, as_json, report

pytestmark = pytest.mark.fleet

SECONDS = 60.0
"""Of trouble; beginning, healing and judging take as long again."""
SOAK = 1800.0


def chosen_seed() -> int:
    return int(os.environ.get("SEED") or random.SystemRandom().randrange(2**31))


def trouble(seconds: float) -> None:
    seed = chosen_seed()
    print(f"SEED={seed} CHAOS_SECONDS={seconds:g}")
    with real_fleet(machines=3, gpus=2) as fleet:
        nemesis = Nemesis(fleet, seed)
        broken = nemesis.run(seconds)
        print(nemesis.summary())
        if place := os.environ.get("CHAOS_RESULT"):
            Path(place).write_text(as_json(report(seed, seconds, nemesis, broken)))
        history = (fleet.folder / "history.jsonl").read_text().splitlines()
        told = [line for line in history if any(concerns(line, words) for words in broken)]
    assert not broken, "\n".join([f"SEED={seed}", *broken, "", *told])


def concerns(line: str, broken: str) -> bool:
    """Whether a line of a history is about the job that a broken promise begins with, or about no job at all."""
    job = json.loads(line).get("job")
    return job is None or job == re.split(r"[ .]", broken, maxsplit=1)[0]


@pytest.mark.timeout(600)
def test_whatever_happens_every_promise_is_kept() -> None:
    trouble(float(os.environ.get("CHAOS_SECONDS") or SECONDS))


@pytest.mark.soak(suite="fleet")
@pytest.mark.timeout(7200)
def test_soak_of_a_fleet() -> None:
    """`make soak SUITE=fleet`, CHAOS_SECONDS long; CHAOS_RESULT names a file for what was done and found."""
    trouble(float(os.environ.get("CHAOS_SECONDS") or SOAK))


KILLED = """
from tests.chaos.fleet import real_fleet

with real_fleet(machines=1, gpus=1) as fleet:
    fleet.start()
    fleet.until_polled()
    job = fleet.submit([{"steps": 100000, "child": "stays"}])
    fleet.until(lambda: fleet.happened(job, "child"), 60, "the job")
    print("ready", flush=True)
    input()
"""


def test_nothing_is_left_of_a_test_that_is_killed() -> None:
    ssh_hosts.needed("setpriv", "unshare", "sshd")
    root = Path(tempfile.mkdtemp(prefix="groupwise-killed-"))
    root.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DEBUG_TEMPROOT": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for part in ("postgres", "nats", "fleet", "history", "h1"):
            assert named(root, part), part
        process.send_signal(signal.SIGKILL)
    end = time.monotonic() + 30
    while there := named(root):
        assert time.monotonic() < end, there
        time.sleep(0.1)
    shutil.rmtree(root)


def named(root: Path, part: str = "") -> list[str]:
    """Processes, zombies aside, whose arguments or environment know a folder below, the name of which has that part."""
    wanted = re.compile(rf"{re.escape(str(root))}[^\0]*{part}".encode())
    found: list[str] = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                words = (each / "cmdline").read_bytes() + (each / "environ").read_bytes()
                if wanted.search(words) and each.name != str(os.getpid()):
                    found.append(words[:200].decode(errors="replace"))
    return found
