"""What callbacks are told, and what comes of what they ask, in whole runs:

1. every event in its order, each when what it tells of is durable;
2. a run that is observed equals the run without, whatever the observers do to what they are given;
3. a callback's state goes on over crashes and interruptions as if nothing had happened: nothing is missed, nothing twice;
4. a failing callback costs nothing but a warning, unless it is critical;
5. stop, save and evaluate are done after the step, and a resume remembers them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import groupwise
from groupwise.core import atomic_files
from groupwise.core.errors import CallbackError
from groupwise.runs import checkpoints
from groupwise.runs.find import newest_unfinished
from groupwise.runs.store import Store
from groupwise.training.loops import held_out
from tests.integration import toy_task
from tests.integration.toy_callbacks import HISTORY
from tests.integration.toy_run import STEPS, TOY, config, die, in_child, what_must_be_equal

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FILE = str(Path(__file__).with_name("toy_callbacks.py"))


def settings(runs: Path, *callbacks: Any, **training: Any) -> dict[str, Any]:
    named = [f"{FILE}:{c}" if isinstance(c, str) and c[0].isupper() else c for c in callbacks]
    return {**config(runs, **training), "callbacks": named}


def named(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": f"{FILE}:{name}", **parameters}


def task_with(*callbacks: object) -> Any:
    hooks = {name: value for name, value in vars(toy_task).items() if name.startswith("get_")}
    hooks["compute_metrics"] = toy_task.compute_metrics
    hooks["get_rl_callbacks"] = lambda config, tokenizer, output_dir: list(callbacks)
    return SimpleNamespace(**hooks)


def history(runs: Path) -> list[str]:
    return json.loads((runs / "toy" / HISTORY).read_text())


@pytest.fixture
def unobserved(whole_toy):
    return whole_toy.equal


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A run with a history and a table of its loss, and a checkpoint where it is evaluated."""
    runs = tmp_path_factory.mktemp("observed")
    torch.set_num_threads(1)
    groupwise.rl(settings(runs, "History", "loss_logging", named("Asking", save=3)), TOY)
    return runs


# --- what they are told


def test_every_event_comes_in_its_order_and_observing_changes_nothing(
    unobserved, observed, tmp_path, caplog
):
    """Beside one that meddles with what it is given, and one that fails, which costs a warning."""
    told = []

    class Witness(groupwise.Callback):
        def on_run_begin(self, run):
            told.append(("begin", run.step, run.max_steps, run.kind, run.folder.name))

        def on_step_begin(self, run):
            told.append(("step", run.step))

        def on_groups(self, run, groups, rejected):
            scored = {r.outcome for group in groups for r in group.rollouts}
            told.append(("groups", len(groups), list(rejected), scored))

        def on_step_end(self, run, metrics):
            with Store.open(run.folder / "run.db", readonly=True) as store:
                assert store.last_step() == run.step - 1
                assert store.step_metrics(run.step - 1) == metrics
            told.append(("done", run.step))

        async def on_evaluate(self, run, evaluation):
            told.append(("evaluated", evaluation.name, evaluation.step, len(evaluation.rows)))

        def on_save(self, run, checkpoint):
            assert checkpoints.newest(checkpoint.parent).path == checkpoint
            told.append(("saved", checkpoint.name))

        def on_run_end(self, run, end):
            assert json.loads((run.folder / "summary.json").read_text())["state"] == end.state
            told.append(("end", end.state, end.summary["steps"], end.error))

    result = groupwise.rl(settings(tmp_path, "Meddling", "Failing"), task_with(Witness()))

    def step(index):
        return [("step", index), ("groups", 2, [], {"scored"}), ("done", index + 1)]

    assert told == [
        ("begin", 0, STEPS, "rl", "toy"), ("evaluated", "before", 0, 3), *step(0), *step(1),
        ("saved", "step-2"), *step(2), ("evaluated", "step-3", 3, 3), *step(3), ("saved", "step-4"),
        *step(4), ("saved", "step-5"), ("evaluated", "after", 5, 3),
        ("end", "finished", STEPS, None),
    ]  # fmt: skip
    assert result.summary["steps"] == STEPS
    assert what_must_be_equal(observed / "toy") == unobserved
    assert what_must_be_equal(tmp_path / "toy") == unobserved
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    warned = [each for each in said if "also trained on" not in each]
    assert len(warned) == 2
    assert all(word in warned[0] for word in ("on_step_end", "toy_callbacks.py", "no luck after 1"))
    assert "5 × on_step_end" in warned[1]


# --- resumes


def go_on(runs: Path, *callbacks: Any) -> None:
    newest_unfinished("toy", runs)
    assert groupwise.rl(settings(runs, *callbacks), TOY, resume=True).exit_code == 0


def crash_at(point: str, given: dict[str, Any]) -> int:
    """The exit status of a run that dies at the crash point `name#count`."""
    name, _, count = point.partition("#")
    left = iter(range(int(count or 1) - 1))

    def count_down(written: str) -> None:
        if written == name and next(left, None) is None:
            die()

    def run() -> None:
        atomic_files.on_write = count_down
        groupwise.rl(given, TOY)

    return in_child(run)


@pytest.mark.parametrize(
    "point",
    [
        "commit:evaluation:after#2",  # the checkpoint stands, the evaluation is recorded, and nobody was told of that
        *(
            pytest.param(point, marks=pytest.mark.soak(suite="kills"))
            for point in (
                "commit:step:after#1",  # no checkpoint yet: all is told again to a callback that knows nothing
                "folder:step-2:after",  # the checkpoint stands, and nobody was told
                "commit:step:after#4",
                "folder:final:after",
            )
        ),
    ],
)
def test_a_crash_loses_and_repeats_nothing(unobserved, observed, tmp_path, point):
    callbacks = ("History", "loss_logging", named("Asking", save=3))
    assert crash_at(point, settings(tmp_path, *callbacks)) == 17
    go_on(tmp_path, *callbacks)
    assert history(tmp_path) == history(observed)
    assert what_must_be_equal(tmp_path / "toy") == unobserved
    tables = [(runs / "toy" / "loss_history.csv").read_bytes() for runs in (tmp_path, observed)]
    assert tables[0] == tables[1]


def test_an_interruption_loses_and_repeats_nothing(observed, tmp_path):
    """After an evaluation; only the checkpoint of the interruption is one more."""
    asking = named("Asking", interrupt=3)
    first = groupwise.rl(settings(tmp_path, "History", "loss_logging", asking), TOY)
    assert first.exit_code == 130
    go_on(tmp_path, "History", "loss_logging", asking)
    expected = [told for told in history(observed) if told != "saved step-3"]
    assert [told for told in history(tmp_path) if told != "saved step-3"] == expected
    assert (tmp_path / "toy" / "loss_history.csv").read_bytes() == (
        observed / "toy" / "loss_history.csv"
    ).read_bytes()


# --- failures


def test_a_critical_one_ends_the_run_after_its_step(unobserved, tmp_path):
    with pytest.raises(CallbackError, match="no luck after 3"):
        groupwise.rl(settings(tmp_path, named("Failing", critical=True, at=3), "History"), TOY)
    folder = tmp_path / "toy"
    assert json.loads((folder / "summary.json").read_text())["error"]["code"] == "callback"
    assert (folder / HISTORY).exists(), "others are told of the end"
    with Store.open(folder / "run.db", readonly=True) as store:
        assert store.last_step() == 2
    go_on(tmp_path)
    assert what_must_be_equal(folder) == unobserved


# --- what they ask for


@pytest.mark.parametrize(
    "point",
    [pytest.param(None, marks=pytest.mark.soak(suite="kills")), "folder:step-3:after"],
)
def test_save_evaluate_and_stop_are_done_after_the_step(tmp_path, point):
    """Also where it died between its last checkpoint and its end."""
    given = settings(tmp_path, named("Asking", save=1, evaluate=2, stop=3), "History")
    given["run"]["save_total_limit"] = None
    if point is None:
        result = groupwise.rl(given, TOY)
    else:
        assert crash_at(point, given) == 17
        result = groupwise.rl(given, TOY, resume=True)
    summary = result.summary
    assert (result.exit_code, summary["state"], summary["steps"]) == (0, "finished", 3)
    assert summary["stopped"] == {"by": "Asking", "reason": "enough"}
    assert result.after is not None
    folder = tmp_path / "toy"
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == ["step-1", "step-2", "step-3"]
    told = history(tmp_path)
    evaluated = [line.split()[1] for line in told if line.startswith("evaluated")]
    assert (evaluated[:2], evaluated[-1]) == (["before", "step-2"], "after")
    assert told.index("saved step-1") < told.index("begin 1")
    assert (folder / "final" / "adapter_model.safetensors").is_file()


def test_an_evaluation_by_early_stop_is_not_repeated(tmp_path, monkeypatch):
    answered: list[int] = []
    answer = held_out.answer_held_out

    def counted(*arguments, trainer, **more):
        answered.append(trainer[0])
        return answer(*arguments, trainer=trainer, **more)

    monkeypatch.setattr(held_out, "answer_held_out", counted)
    stopping = {"name": "early_stop", "min_delta": 5.0, "patience": 2}
    given = {**settings(tmp_path, stopping), "eval": {"eval_steps": 1, "max_prompts": 2}}
    result = groupwise.rl(given, TOY)
    assert answered == [0, 1, 2]
    with Store.open(result.folder / "run.db", readonly=True) as store:
        found = {record.name: record for record in store.evaluations()}
    assert found["after"].metrics == found["step-2"].metrics
    assert found["after"].rows == found["step-2"].rows
    assert result.after is not None
    assert result.after.metrics == found["after"].metrics


def test_callbacks_of_transformers_run(unobserved, tmp_path, capsys):
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    told = []
    base: Any = TrainerCallback

    class Own(base):
        def on_epoch_end(self, args, state, control, **kwargs):
            raise AssertionError("there are no epochs")

        def on_step_end(self, args, state, control, **kwargs):
            told.append((state.global_step, state.max_steps, args.output_dir, args.beta))
            if state.global_step == 1:
                control.should_save = control.should_evaluate = True
            return control

        def on_save(self, args, state, control, **kwargs):
            told.append("saved")

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            told.append(("evaluated", "eval_reward" in metrics, kwargs["processing_class"] is None))

    groupwise.rl(config(tmp_path), task_with(Own(), PrinterCallback, ProgressCallback()))
    folder = str(tmp_path / "toy")
    assert told[:5] == [
        ("evaluated", True, False), (1, STEPS, folder, 0.0), "saved", ("evaluated", True, False), (2, STEPS, folder, 0.0),
    ]  # fmt: skip
    log = (tmp_path / "toy" / "log.txt").read_text()
    assert "Own: on_epoch_end" in log
    assert "ProgressCallback: on_predict, on_prediction_step" in log
    warned = [line for line in log.splitlines() if " WARNING " in line]
    assert all("also trained on" in line for line in warned)
    assert "'eval_reward': '0'" in capsys.readouterr().err
