"""The calls of the sink `mlflow` to its client, with a stand-in for it; tests/integration/test_mlflow.py has the client itself.

1. no crash makes a second run or sends a metric of a line twice;
2. a run that the environment names is used;
3. what cannot be written to is refused before a run, without passwords.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core.settings.view import View
from groupwise.training.callbacks.mlflow_sink import MlflowError, MlflowSink
from groupwise.training.callbacks.sinks import Finding, MetricsRow, ReportedRun

CONFIG = {
    "run": {"mlflow_experiment": None}, "training": {"learning_rate": 1e-5, "max_steps": 3}, "task": None,
    "rewards": {"reward_funcs": ["a", "b"]}, "data": {"columns": {}},
}  # fmt: skip
RUN = ReportedRun("toy", "1a2b3c4d", Path("runs/toy"), View(CONFIG), 0, 100.5)


class FakeTracking:
    """The part of the package that the sink uses, and a server that forgets nothing."""

    def __init__(self) -> None:
        self.uri = "http://user:secret@tracking:5000"
        self.experiments: dict[str, Any] = {}
        self.runs: dict[str, Any] = {}
        self.files: dict[str, str] = {}
        self.fails: dict[str, Exception] = {}
        """By method."""
        self.entities = SimpleNamespace(Metric=Metric, Param=Param)
        self.environment_variables = SimpleNamespace(
            MLFLOW_ALLOW_FILE_STORE=SimpleNamespace(
                get=lambda: bool(os.environ.get("MLFLOW_ALLOW_FILE_STORE"))
            )
        )

    def get_tracking_uri(self) -> str:
        return self.uri

    def MlflowClient(self) -> Any:
        return Client(self)

    def run(self, run_id: str, experiment: str, name: str, **tags: str) -> Any:
        data = SimpleNamespace(tags=tags, params={}, points=[], to_proto=lambda: latest(data))
        self.runs[run_id] = SimpleNamespace(
            info=SimpleNamespace(run_id=run_id, run_name=name, status="RUNNING", at=experiment),
            data=data,
        )
        return self.runs[run_id]

    def points(self, run_id: str, name: str) -> list[int]:
        return [point.step for point in self.runs[run_id].data.points if point.key == name]


class Metric(SimpleNamespace):
    def __init__(self, key: str, value: float, timestamp: int, step: int) -> None:
        super().__init__(key=key, value=value, timestamp=timestamp, step=step)


class Param(SimpleNamespace):
    def __init__(self, key: str, value: str) -> None:
        super().__init__(key=key, value=value)


def latest(data: Any) -> Any:
    newest: dict[str, Any] = {}
    for point in sorted(data.points, key=lambda point: point.step):
        newest[point.key] = point
    return SimpleNamespace(metrics=list(newest.values()))


class Client:
    def __init__(self, tracking: FakeTracking) -> None:
        self._tracking = tracking

    def __getattribute__(self, name: str) -> Any:
        tracking = object.__getattribute__(self, "_tracking")
        if name != "_tracking" and name in tracking.fails:
            raise tracking.fails[name]
        return object.__getattribute__(self, name)

    def get_experiment_by_name(self, name: str) -> Any:
        return self._tracking.experiments.get(name)

    def get_experiment(self, experiment_id: str) -> Any:
        return next(
            e for e in self._tracking.experiments.values() if e.experiment_id == experiment_id
        )

    def create_experiment(self, name: str) -> str:
        assert name not in self._tracking.experiments
        made = str(len(self._tracking.experiments) + 1)
        self._tracking.experiments[name] = SimpleNamespace(
            name=name, experiment_id=made, lifecycle_stage="active"
        )
        return made

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> Any:
        tag = re.fullmatch(r"tags\.`(.+)` LIKE '%'", filter_string)[1]
        found = [
            r
            for r in self._tracking.runs.values()
            if r.info.at in experiments and tag in r.data.tags
        ]
        return found[:max_results]

    def create_run(self, experiment: str, start_time: int, tags: Any, run_name: str) -> Any:
        made = self._tracking.run(
            f"run{len(self._tracking.runs) + 1}", experiment, run_name, **tags
        )
        made.info.start_time = start_time
        return made

    def get_run(self, run_id: str) -> Any:
        return self._tracking.runs[run_id]

    def update_run(self, run_id: str, status: str) -> None:
        self._tracking.runs[run_id].info.status = status

    set_terminated = update_run

    def get_metric_history(self, run_id: str, name: str) -> Any:
        return [point for point in self._tracking.runs[run_id].data.points if point.key == name]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        data = self._tracking.runs[run_id].data
        for param in params:
            assert param.key not in data.params, "a param cannot be changed"
            data.params[param.key] = param.value
        data.points += metrics

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self._tracking.runs[run_id].data.tags[key] = value

    def log_text(self, run_id: str, text: str, file: str) -> None:
        self._tracking.files[file] = text


@pytest.fixture
def tracking(monkeypatch) -> FakeTracking:
    fake = FakeTracking()
    for name in [name for name in os.environ if name.startswith("MLFLOW")]:
        monkeypatch.delenv(name)
    for name, module in (
        ("mlflow", fake),
        ("mlflow.entities", fake.entities),
        ("mlflow.environment_variables", fake.environment_variables),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def begun(run: ReportedRun = RUN) -> tuple[MlflowSink, int]:
    sink = MlflowSink()
    return sink, sink.begin(run)


def line(steps: int, **values: float) -> MetricsRow:
    return MetricsRow(steps, values or {"reward": 0.5, "loss": 1.0}, 200.25 + steps)


# --- once


@pytest.mark.parametrize("there", [("reward", "loss"), ("reward",), ()])
def test_only_the_missing_part_of_an_interrupted_line_is_sent(tracking, there):
    """Killed before the tag, with all of the line, a part, or nothing."""
    sink, _ = begun()
    sink.write_row(line(1))
    tracking.runs["run1"].data.points += [Metric(name, 9.0, 1, 2) for name in there]
    sink, held = begun()
    assert held == 1
    sink.write_row(line(2))
    sink.write_row(line(3))
    assert tracking.points("run1", "reward") == tracking.points("run1", "loss") == [1, 2, 3]


@pytest.mark.parametrize("there", [(), (4,), (4, 2)])
def test_findings_stand_at_their_own_steps_each_once(tracking, there):
    """Also those of a line that was cut short, whatever of it had arrived, and one that comes after one of later steps."""
    sink, _ = begun()
    sink.write_row(line(1))
    tracking.runs["run1"].data.points += [Metric("eval/b/x", 0.5, 1, steps) for steps in there]
    sink, _ = begun()
    found = [Finding("eval/b", steps, {"x": 0.5}) for steps in (2, 4)]
    sink.write_row(replace(line(5), findings=found))
    sink.write_row(replace(line(6), findings=[Finding("eval/b", 3, {"x": 0.5})]))
    assert sorted(tracking.points("run1", "eval/b/x")) == [2, 3, 4]
    assert tracking.points("run1", "eval/b/step") == []


def test_the_tag_comes_after_its_line(tracking):
    sink, _ = begun()
    tracking.fails["log_batch"] = OSError("gone")
    with pytest.raises(MlflowError):
        sink.write_row(line(1))
    tracking.fails.clear()
    assert begun()[1] == -1
    assert list(tracking.runs) == ["run1"]


# --- the environment


def test_a_run_that_the_environment_names_is_used_and_left_to_those_who_made_it(
    tracking, monkeypatch
):
    """Two of ours may share it: each has a tag of its own."""
    theirs = tracking.run("theirs", "7", "pipeline")
    theirs.data.points.append(Metric("reward", 0.0, 1, 1))
    monkeypatch.setenv("MLFLOW_RUN_ID", "theirs")
    for run in (RUN, replace(RUN, id="99999999")):
        sink, held = begun(run)
        assert held == -1
        sink.write_row(line(1))
        sink.end("finished")
    assert tracking.points("theirs", "reward") == [1, 1, 1]
    assert theirs.info.status == "RUNNING"
    assert list(tracking.runs) == ["theirs"]


# --- before a run


def refusal(config: Any = CONFIG) -> str:
    with pytest.raises(ValueError, match="mlflow") as caught:
        MlflowSink().check(View(config))
    return str(caught.value)


def test_a_server_that_does_not_answer_is_refused_without_its_password(tracking):
    tracking.fails["get_experiment_by_name"] = OSError(
        "request to http://user:sec@ret@tracking:5000/api failed: refused.\nmore"
    )
    tracking.uri = "http://user:sec@ret@tracking:5000"
    said = refusal()
    assert said.count("http://tracking:5000") == 2
    assert "MLFLOW_TRACKING_URI" in said
    assert "sec" not in said
