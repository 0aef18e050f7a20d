"""Random faults against a real fleet, then an independent check of its history.

Two dispatchers, poller, requeue manager and tracker as processes of their own, real PostgreSQL, real NATS, three machines with sshd and two
GPUs each. For CHAOS_SECONDS they are killed, frozen, cut off and lose power, while clients submit jobs that fail, hang, leave processes
behind and print megabytes. Then everything is repaired and must become idle, and `tests/history_checker.py` checks the history.

In a run of the tests there are some seconds of that with a seed of its own, which is printed (SEED repeats it); with
`make soak SUITE=fleet` it is half an hour.
"""

import json
import os
import random
import re

import pytest

from tests.chaos.fleet import real_fleet
from tests.chaos.nemesis import Nemesis


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(12.0, marks=pytest.mark.timeout(540)),
        pytest.param(1800.0, marks=[pytest.mark.timeout(7200), pytest.mark.soak(suite="fleet")]),
    ],
)
def test_fleet_keeps_its_guarantees_under_random_faults(seconds: float) -> None:
    seconds = float(os.environ.get("CHAOS_SECONDS") or seconds)
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**31))
    print(f"SEED={seed} CHAOS_SECONDS={seconds:g}")
    with real_fleet(machines=3, gpus=2) as fleet:
        nemesis = Nemesis(fleet, seed)
        broken = nemesis.run(seconds)
        print(nemesis.summary())
        history = (fleet.folder / "history.jsonl").read_text().splitlines()
        told = [line for line in history if any(concerns(line, words) for words in broken)]
    assert not broken, "\n".join([f"SEED={seed}", *broken, "", *told])


def concerns(line: str, broken: str) -> bool:
    """Whether a line of a history is about the job that a broken promise begins with, or about no job at all."""
    job = json.loads(line).get("job")
    return job is None or job == re.split(r"[ .]", broken, maxsplit=1)[0]
