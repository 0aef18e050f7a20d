"""Checkpoints that another process evaluates, in whole runs:

1. what a finished run waits for is left to a resume by Ctrl-C and by a death, which then finds each checkpoint's result once;
2. sinks have each result once, under the steps of its checkpoint, however often the run was taken up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.runs.find import run_info
from groupwise.runs.store import Store
from tests.integration.toy_run import TOY, config, go_on, in_child, what_must_be_equal

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

SAVED = [2, 4, 5]
WRITES = """
import json, os, sys, time
output, step, gate = sys.argv[1:]
while not os.path.exists(gate):
    time.sleep(0.02)
json.dump({"score": int(step) / 10}, open(output, "w"))
"""
"""Waits until it may."""


def settings(runs: Path, gate: Path) -> dict[str, Any]:
    words = [sys.executable, "-c", WRITES, "{output}", "{step}", str(gate)]
    given = {**config(runs), "eval": {"before_and_after": False}}
    given["callbacks"] = [{"name": "benchmark_on_checkpoint", "label": "mine", "command": words}]
    given["run"]["report_to"] = ["tensorboard", "jsonl"]
    return given


def once_it_waits(log: Path, number: int) -> None:
    """Send this process a signal when its run says that it waits."""

    def watch() -> None:
        while not log.exists() or "waiting for mine" not in log.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    torch.set_num_threads(1)
    runs = tmp_path_factory.mktemp("alone")
    given = {**config(runs), "eval": {"before_and_after": False}}
    groupwise.rl(given, TOY)
    return what_must_be_equal(runs / "toy")["files"]


@pytest.mark.parametrize(
    ("number", "state", "status"),
    [
        (signal.SIGINT, "interrupted", 130),
        *(
            pytest.param(*given, marks=pytest.mark.soak(suite="kills"))
            for given in (
                (signal.SIGTERM, "interrupted", 143),
                (signal.SIGKILL, "crashed", -signal.SIGKILL),
            )
        ),
    ],
)
def test_a_resume_runs_the_missing_benchmarks_of_a_finished_run(
    tmp_path, alone, number, state, status
):
    runs, gate = tmp_path / "runs", tmp_path / "gate"
    folder = runs / "toy"
    given = settings(runs, gate)

    def run() -> None:
        once_it_waits(folder / "log.txt", number)
        os._exit(groupwise.rl(given, TOY).exit_code)

    assert in_child(run) == status
    assert run_info(folder).state == state
    said = "mine of step-2, step-4, step-5 is done when the run goes on"
    assert (said in (folder / "log.txt").read_text()) == (state == "interrupted")
    gate.touch()
    go_on(given)
    assert run_info(folder).state == "finished"
    with Store.open(folder / "run.db", readonly=True) as store:
        found = [(e.step, dict(e.metrics)) for e in store.evaluations() if e.name == "mine"]
    assert found == [(step, {"score": step / 10}) for step in SAVED]
    assert not list((folder / "benchmarks/mine").iterdir())
    assert what_must_be_equal(folder)["files"] == alone
    assert_shown_once(folder)


def assert_shown_once(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = (folder / "evaluations.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert Counter(row["step"] for row in rows) == Counter(SAVED)
    assert {row["step"]: row["eval/mine/score"] for row in rows} == {s: s / 10 for s in SAVED}
    assert all(row["known_after"] >= row["step"] for row in rows)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    shown = sorted((event.step, event.value) for event in events.Scalars("eval/mine/score"))
    assert shown == [(step, pytest.approx(step / 10)) for step in SAVED]
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4, 5]
