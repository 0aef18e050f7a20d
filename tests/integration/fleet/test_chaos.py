"""Fate against a fleet of real parts, and a judge that knows nothing of how it works.

Two dispatchers, poller, requeue manager and tracker as processes of their own, real PostgreSQL, real NATS, three machines with sshd and two
GPUs each. For CHAOS_SECONDS they are killed, frozen, cut off and deprived of power, while clients submit jobs that fail, hang on, leave
processes behind and print megabytes. Then all is healed, everything has to come to rest, and `tests/fleet_history.py` judges.

A run of the tests is about two minutes with a seed of its own, which is printed (SEED repeats it); `make soak SUITE=fleet` is half an hour.
"""

import os
import random
import signal
import subprocess
import sys
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
        history = (fleet.folder / "history.jsonl").read_text()
    assert not broken, "\n".join([f"SEED={seed}", *broken, "", history])


@pytest.mark.timeout(600)
def test_whatever_happens_every_promise_is_kept() -> None:
    trouble(float(os.environ.get("CHAOS_SECONDS") or SECONDS))


@pytest.mark.soak
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
    print(fleet.folder, flush=True)
    input()
"""


def test_nothing_is_left_of_a_test_that_is_killed() -> None:
    ssh_hosts.needed("setpriv", "unshare", "sshd")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    assert folder, "it did not begin"
    assert named(folder)
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 30
    while there := named(folder):
        assert time.monotonic() < end, there
        time.sleep(0.1)
    subprocess.run(["rm", "-rf", folder], check=True)


def named(folder: str) -> list[str]:
    """Processes, zombies aside, that know the folder by their arguments or environment."""
    found: list[str] = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and int(each.name) != os.getpid():
            try:
                words = (each / "cmdline").read_bytes() + (each / "environ").read_bytes()
            except OSError:
                continue
            if folder.encode() in words:
                found.append(words[:200].decode(errors="replace"))
    return found
