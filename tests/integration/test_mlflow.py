"""MLflow's own client beside real runs, without a network: each line once, in one run of MLflow, however often ours was taken up."""

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
from tests.integration.toy_run import STEPS, TOY, config, die, go_on, in_child

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*noload.*:DeprecationWarning"
    ),  # mlflow's use of sqlalchemy
]
VARIABLES = "TRACKING_URI EXPERIMENT_NAME EXPERIMENT_ID RUN_ID ALLOW_FILE_STORE".split()


@pytest.fixture
def environment(monkeypatch, tmp_path) -> pytest.MonkeyPatch:
    """Nothing of MLflow in it, and a folder of its own to be in."""
    for name in VARIABLES:
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return monkeypatch


def settings(runs: Path, **run: Any) -> dict[str, Any]:
    given = config(runs)
    given["run"] |= {"report_to": "mlflow", "num_completions_to_print": 2, **run}
    return given


def recorded(run: Path, name: str) -> list[tuple[int, float]]:
    with Store.open(run / "run.db", readonly=True) as store:
        return store.metrics([name])[name]


def the_run(client: Any, experiment: str) -> Any:
    """There is only one."""
    found = client.get_experiment_by_name(experiment)
    (run,) = client.search_runs([found.experiment_id])
    return run


def shown(client: Any, run: Any, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


@pytest.mark.soak(suite="training")
def test_a_run_is_whole_in_the_database_file_where_nothing_else_is_said(
    environment, tmp_path, capsys
):
    given = settings(tmp_path / "runs", mlflow_experiment="letters")
    given["training"]["max_steps"] = 2
    assert groupwise.rl(given, TOY).exit_code == 0
    assert capsys.readouterr().out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "mlflow.db", "mlruns"}

    from mlflow import MlflowClient

    client = MlflowClient()
    run = the_run(client, "letters")
    assert (run.info.run_name, run.info.status) == ("toy", "FINISHED")
    for name in ("reward", "rewards/share/mean"):
        assert shown(client, run, name) == recorded(tmp_path / "runs/toy", name)
    assert shown(client, run, "eval/pass_at_1") == [(0, 0.0), (2, 0.0)]
    assert run.data.params["training.learning_rate"] == "0.01"
    (kept,) = tmp_path.glob("mlruns/*/*/artifacts")
    assert json.loads((kept / "config.json").read_bytes())["training"]["max_steps"] == 2


@pytest.mark.soak(suite="training")
def test_a_killed_run_is_whole_in_one_of_mlflow_once_it_went_on(environment, tmp_path):
    """It dies when the fourth step is committed, after the checkpoint that follows two: the third and fourth are drawn again."""
    from mlflow import MlflowClient

    given = settings(tmp_path / "runs")
    left = iter(range(3))

    def run() -> None:
        atomic_files.on_write = lambda at: (
            die() if at == "commit:step:after" and next(left, None) is None else None
        )
        groupwise.rl(given, TOY)

    assert in_child(run) == 17
    client = MlflowClient()
    killed = the_run(client, "groupwise")
    assert killed.info.status == "RUNNING"
    assert [step for step, _ in shown(client, killed, "reward")] == [1, 2, 3]
    go_on(given)
    whole = the_run(client, "groupwise")
    assert (whole.info.run_id, whole.info.status) == (killed.info.run_id, "FINISHED")
    for name in ("reward", "learning_rate"):
        assert shown(client, whole, name) == recorded(tmp_path / "runs/toy", name)
    assert [step for step, _ in shown(client, whole, "eval/reward")] == [0, 3, STEPS]
    tables = sorted(tmp_path.glob("mlruns/*/*/artifacts/completions/*.csv"))
    names = [f"step-{step:08d}.csv" for step in range(1, STEPS + 1)]
    assert [table.name for table in tables] == names
    with tables[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prompt"] for row in rows] == ["write d6:"] * 2
