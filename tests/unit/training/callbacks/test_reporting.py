"""How a run reaches its sinks:

1. each line whole and once, in order, with the evaluations after its steps;
2. a run that goes on sends what a sink lacks, from the record, and nothing that it has;
3. a sink that fails is named once and left out.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core.settings.view import View
from groupwise.core.types import Example, Group, RewardPart, Rollout, Segment
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.training.callbacks import reporting
from groupwise.training.callbacks.base import RunEnd, RunHandle
from groupwise.training.callbacks.reporting import Reporting
from groupwise.training.callbacks.sinks import MetricsRow, ReportedRun, State
from tests.unit.training.callbacks.fake_run import CONFIG

SECTION = {
    "name": None, "logging_steps": 2, "num_completions_to_print": 3, "log_unique_prompts": False,
    "wandb_project": None, "wandb_entity": None, "wandb_group": "g", "trackio_project": None,
    "mlflow_experiment": None,
}  # fmt: skip


class Kept:
    """A sink that keeps what it is sent, over several sessions."""

    package = "json"

    def __init__(self) -> None:
        self.lines: list[MetricsRow] = []
        self.begun: list[ReportedRun] = []
        self.ended: list[str] = []
        self.fails_at: int | None = None

    def check(self, config: View) -> None:
        pass

    def begin(self, run: ReportedRun) -> int:
        self.begun.append(run)
        return self.lines[-1].steps if self.lines else -1

    def write_row(self, row: MetricsRow) -> None:
        print("talk that is not part of a command's result")
        if row.steps == self.fails_at:
            raise OSError("database is locked")
        self.lines.append(row)

    def end(self, state: State) -> None:
        self.ended.append(state)

    @property
    def steps(self) -> list[int]:
        return [line.steps for line in self.lines]


@pytest.fixture
def sinks(monkeypatch) -> dict[str, Kept]:
    there = {"wandb": Kept(), "other": Kept()}
    monkeypatch.setattr(
        reporting, "SINKS", {name: lambda sink=sink: sink for name, sink in there.items()}
    )
    return there


def member(draw: int, index: int) -> Rollout:
    parts = (RewardPart("right", float(index), 1.0),)
    segments = (Segment("policy", (5, 6)),)
    return Rollout(draw, index, 0, (1,), segments, f"text {index}", "scored", None, 0.5, parts)


class Session:
    """A run in its folder, told to a callback as the loop would."""

    def __init__(self, folder: RunFolder, sinks: tuple[str, ...], step: int = 0, **section: Any):
        settings = {**CONFIG, "run": {**SECTION, **section}}
        self.run = SimpleNamespace(
            config=SimpleNamespace(model_dump=lambda mode: settings),
            folder=folder,
            step=step,
            say=lambda text: None,
        )
        self.callback = Reporting(sinks)
        self.handle = RunHandle(self.run, None, "report_to")  # type: ignore[arg-type]
        self.callback.on_run_begin(self.handle)

    def take(self, prompts: tuple[str, ...] = ("one", "two"), **metrics: float) -> None:
        """A step, recorded and told."""
        self.callback.on_step_begin(self.handle)
        step = self.run.step
        draws = tuple(range(len(prompts) * step, len(prompts) * (step + 1)))
        groups = [
            Group(draw, Example(draw, prompt, {}), (member(draw, 0), member(draw, 1)))
            for draw, prompt in zip(draws, prompts, strict=True)
        ]
        given = {"reward": 0.1 * step, **metrics}
        record = StepRecord(step, step, step + 1, "f", draws, 0.1, 100.0 + step)
        self.run.folder.store.commit_step(record, groups, given)
        self.run.step += 1
        self.callback.on_step_end(self.handle, given)

    def evaluate(self, name: str, **metrics: float) -> None:
        record = EvaluationRecord(self.run.step, name, f"r@{self.run.step}", metrics)
        self.run.folder.store.add_evaluation(record)
        self.callback.on_evaluate(self.handle, record)

    def record(self, name: str, steps: int, **metrics: float) -> None:
        """What another callback found of an earlier policy."""
        self.handle.record_evaluation(EvaluationRecord(steps, name, f"r@{steps}", metrics))

    def end(self, state: Any = "finished") -> None:
        self.callback.on_run_end(self.handle, RunEnd(state, {}))


@pytest.fixture
def folder(tmp_path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path, "r", {}, {"kind": "rl"}) as made:
        yield made


# --- lines


def test_a_line_is_sent_once_all_of_it_is_known(folder, sinks, capsys):
    session, sent = Session(folder, ("other",)), sinks["other"]
    session.evaluate("before", reward=0.0)
    assert sent.lines == []
    session.take(loss=1.0)
    assert [(line.steps, dict(line.values)) for line in sent.lines] == [(0, {"eval/reward": 0.0})]
    session.evaluate("step-1", eval_loss=2.0)
    session.take()
    assert dict(sent.lines[1].values) == {"reward": 0.0, "loss": 1.0, "eval/loss": 2.0}
    session.end()
    assert sent.steps == [0, 1, 2]
    assert sent.ended == ["finished"]
    assert capsys.readouterr().out == "", "standard output is the command's"


# --- going on


@pytest.mark.parametrize("had", [0, 1, 3, 4, 6])
def test_a_resume_sends_what_is_missing_and_nothing_twice(folder, sinks, had):
    """The checkpoint is that after 4 steps; a sink may lag behind it, or have more than it."""
    first, sent = Session(folder, ("wandb",)), sinks["wandb"]
    first.evaluate("before", reward=0.0)
    for step in range(6):
        first.take()
        if step == 3:
            first.evaluate("step-4", reward=0.7)
    del sent.lines[had + 1 :]  # what a dead process had not handed over yet
    folder.store.rewind(4)
    again = Session(folder, ("wandb",), step=4)
    for _ in range(3):
        again.take()
    again.end()
    assert sent.steps == list(range(8))
    lines = {line.steps: line for line in sent.lines}
    assert dict(lines[4].values) == {"reward": pytest.approx(0.3), "eval/reward": 0.7}
    assert lines[4].table
    assert {run.id for run in sent.begun} == {sent.begun[0].id}
    assert [run.steps for run in sent.begun] == [0, 4]
    assert sent.begun[1].began_at == folder.store.get_meta()["created_at"]
    if had < 2:
        assert lines[2].finished_at == 101.0, "when it was, not when it is sent"


def test_values_recorded_by_a_callback_are_sent_with_the_next_line(folder, sinks):
    session, sent = Session(folder, ("other",)), sinks["other"]
    for _ in range(4):
        session.take()
    session.record("benchmark", 2, x=0.5, eval_y=1.0)
    session.record("benchmark", 1, x=0.25)
    session.record("aftermath", 1, z=3.0)
    session.take()
    session.end()
    assert sent.steps == [1, 2, 3, 4, 5]
    assert [len(line.findings) for line in sent.lines] == [0, 0, 0, 3, 0]
    assert set(sent.lines[3].values) == {"reward"}
    assert [(each.steps, each.values) for each in sent.lines[3].findings] == [
        (1, {"eval/benchmark/x": 0.25}),
        (1, {"eval/aftermath/z": 3.0}),
        (2, {"eval/benchmark/x": 0.5, "eval/benchmark/y": 1.0}),
    ]


@pytest.mark.parametrize("had", [0, 1, 3, 4, 6])
def test_over_a_resume_each_of_them_is_sent_once(folder, sinks, had):
    """As with lines: the checkpoint is that after 4 steps, and a sink may lag behind it, or have more than it."""
    first, sent = Session(folder, ("wandb",)), sinks["wandb"]
    for step in range(6):
        first.take()
        if step in (2, 4):
            first.record("benchmark", step, x=float(step))
    first.end()
    assert [f.steps for line in sent.lines for f in line.findings] == [2, 4]
    del sent.lines[had:]  # what a dead process had not handed over yet
    folder.store.rewind(4)
    again = Session(folder, ("wandb",), step=4)
    again.record("benchmark", 4, x=4.0)  # as a callback does that is told of the checkpoint again
    for _ in range(3):
        again.take()
    again.record("benchmark", 6, x=6.0)
    again.end("interrupted")
    last = Session(folder, ("wandb",), step=7)
    last.end()
    assert sent.steps == list(range(1, 8))
    assert [f.steps for line in sent.lines for f in line.findings] == [2, 4, 6]
    assert all(f.steps <= line.steps for line in sent.lines for f in line.findings)


# --- failures


def test_a_sink_that_fails_is_named_once_and_left_out(folder, sinks, caplog):
    sinks["other"].fails_at = 1
    session = Session(folder, ("other", "wandb"))
    for _ in range(3):
        session.take()
    session.end()
    assert sinks["other"].lines == []
    assert sinks["other"].ended == []
    assert sinks["wandb"].steps == [1, 2, 3]
    (warned,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert (warned.startswith("other failed"), "database is locked" in warned) == (True, True)


# --- Weights & Biases, with a stand-in for its service


class FakeWandb(SimpleNamespace):
    """As much of the package as the sink uses."""

    def __init__(self, mode: str = "online", logged_in: bool = True) -> None:
        super().__init__(mode=mode, logged_in=logged_in, given={}, history={}, defined=[], codes=[])

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert not prompt
        return self.logged_in

    def init(self, **given: Any) -> Any:
        self.given = given
        return SimpleNamespace(
            offline=False,
            starting_step=max(self.history, default=-1) + 1,
            log=self.log,
            define_metric=self.define_metric,
            finish=self.finish,
        )

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)

    def log(self, values: Any, step: int) -> None:
        assert step not in self.history
        self.history[step] = values

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def Settings(self, **given: Any) -> Any:
        return given

    def Table(self, columns: list[str], data: list[list[Any]]) -> Any:
        return [dict(zip(columns, row, strict=True)) for row in data]


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


def test_a_run_is_taken_up_by_its_id_where_the_service_has_it(folder, wandb):
    first = Session(folder, ("wandb",), wandb_entity="lab")
    for _ in range(4):
        first.take()
    folder.store.rewind(2)
    again = Session(folder, ("wandb",), step=2, wandb_entity="lab")
    again.take()
    again.take()
    again.end("interrupted")
    assert sorted(wandb.history) == [1, 2, 3], "the fourth is sent when the run goes on"
    assert wandb.history[2]["completions"][0]["completion"] == "text 0"
    assert wandb.history[2]["completions"][1]["parts"] == '{"right": 1.0}'
    assert wandb.codes == [1]
    given = [wandb.given[key] for key in ("project", "entity", "group", "name", "resume")]
    assert given == ["groupwise", "lab", "g", "r", "allow"]
    assert len(wandb.given["id"]) == 8
    assert Path(wandb.given["dir"]) == folder.path
