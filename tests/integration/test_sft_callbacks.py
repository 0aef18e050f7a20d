"""Callbacks in supervised runs: told in order, heeded, and remembered over crashes; an observed run is the same run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.core import atomic_files
from groupwise.runs.store import Store
from tests.integration.test_sft import STEPS, TASK, config
from tests.integration.toy_callbacks import HISTORY
from tests.integration.toy_run import crash_at, what_must_be_equal

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FILE = f"{Path(__file__).with_name('toy_callbacks.py')}"


def settings(runs: Path, *callbacks: Any) -> dict[str, Any]:
    return config(runs, callbacks=list(callbacks))


def event_names(folder: Path) -> list[str]:
    """Each event in two words."""
    events = json.loads((folder / HISTORY).read_text())
    return [" ".join(event.split()[:2]) for event in events]


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    runs = tmp_path_factory.mktemp("observed")
    torch.set_num_threads(1)
    points: list[str] = []
    atomic_files.on_write = points.append
    try:
        groupwise.sft(settings(runs, f"{FILE}:History", "loss_logging"), TASK)
    finally:
        atomic_files.on_write = lambda name: None
    return runs / "sft", points


def test_every_event_comes_in_its_order_and_an_observed_run_is_the_same_run(observed, tmp_path):
    folder, _ = observed
    assert event_names(folder) == [
        "evaluated step-0",
        *("begin 0", "end 1", "begin 1", "end 2", "evaluated step-2", "saved step-2"),
        *("begin 2", "end 3", "saved step-3"),
        *("begin 3", "end 4", "evaluated step-4", "saved step-4"),
        *("begin 4", "end 5", "evaluated step-5", "saved step-5"),
    ]
    groupwise.sft(config(tmp_path), TASK)
    plain, seen = what_must_be_equal(tmp_path / "sft"), what_must_be_equal(folder)
    assert seen["record"] == plain["record"]
    assert seen["files"].keys() >= plain["files"].keys()


def test_state_and_table_continue_over_a_crash(observed, tmp_path):
    whole, points = observed
    steps = [at for at, point in enumerate(points) if point == "commit:step:after"]
    made = settings(tmp_path, f"{FILE}:History", "loss_logging")
    assert crash_at(steps[3], lambda: groupwise.sft(made, TASK)) == 17
    assert groupwise.sft(made, TASK, resume=True).exit_code == 0
    assert [event for event in event_names(tmp_path / "sft") if not event.startswith("saved")] == [
        event for event in event_names(whole) if not event.startswith("saved")
    ]
    tables = [(folder / "loss_history.csv").read_text() for folder in (whole, tmp_path / "sft")]
    rows = [list(csv.DictReader(table.splitlines())) for table in tables]
    assert [row["loss"] for row in rows[1]] == [row["loss"] for row in rows[0]]
    assert len(rows[0]) == STEPS


def test_a_callback_stops_saves_and_evaluates(tmp_path):
    asking = {"name": f"{FILE}:Asking", "save": 1, "evaluate": 1, "stop": 3}
    result = groupwise.sft(settings(tmp_path, asking), TASK)
    assert (result.summary["steps"], result.summary["state"]) == (3, "finished")
    assert result.summary["stopped"]["reason"] == "enough"
    with Store.open(tmp_path / "sft" / "run.db", readonly=True) as store:
        assert [record.step for record in store.evaluations()] == [0, 1, 2, 3]
