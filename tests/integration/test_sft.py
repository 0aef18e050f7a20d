"""A supervised run from its command to its folder:

1. It learns, records every row with who wrote it, and evaluates by steps; `runs` shows it.
2. A resumed run equals the uninterrupted one, to the bit, wherever it was stopped, with the best step and patience that it had.
3. The best checkpoint is never pruned; early stopping ends the run; `final/` is the last or the best.
4. Reinforcement learning starts from it. What is wrong with config, task or rows is said before anything is written.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import groupwise
from groupwise.core import atomic_files
from groupwise.core.errors import (
    ConfigError,
    ModelError,
    ResumeMismatchError,
    TaskError,
)
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.runs import checkpoints
from groupwise.runs.store import Store
from groupwise.training.evaluation.policies import find_policy
from groupwise.training.loops import sft as loop
from groupwise.training.review.export import export
from tests.integration import sft_task, toy_run
from tests.integration.toy_run import TOY, what_must_be_equal
from tests.integration.toy_run import config as rl_config
from tests.rotation import turn

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
TASK = str(Path(__file__).with_name("sft_task.py"))
STEPS = 5


def config(runs: Path, **more: Any) -> dict[str, Any]:
    """A run of a fraction of a second that evaluates, checkpoints, and goes over its rows almost twice."""
    return {
        "model": {"name": "tiny"},
        "lora": {"r": 4, "alpha": 8},
        "training": {
            "max_steps": STEPS,
            "examples_per_step": 4,
            "learning_rate": 0.05,
            "seed": 3,
            **more.pop("training", {}),
        },
        "eval": {"eval_steps": 2, **more.pop("eval", {})},
        "run": {"name": "sft", "dir": str(runs), "save_steps": 3, "threads": 1},
        **more,
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    result = groupwise.sft(config(runs), TASK)
    assert result.exit_code == 0
    return runs / "sft", what_must_be_equal(runs / "sft"), result.summary


def final(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "adapter_model.safetensors")


def checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step}" / "adapter_model.safetensors")


def same(first, second) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


# A run and its record


def test_it_learns(uninterrupted):
    _, _, summary = uninterrupted
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["eval_loss_last"] < summary["eval_loss_first"] - 0.05
    assert (summary["steps"], summary["best_step"]) == (STEPS, STEPS)


def test_the_record_of_its_steps(uninterrupted):
    folder, *_ = uninterrupted
    with Store.open(folder / "run.db", readonly=True) as store:
        assert [step.draws for step in store.steps()][:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
        assert [step.version_out for step in store.steps()] == [1, 2, 3, 4, 5]
        metrics = store.step_metrics(4)
        curve = store.metrics(["learning_rate", "epoch", "num_tokens"])
        groups = [group for step in range(STEPS) for group in store.groups(step)]
        evaluations = [(each.step, each.name) for each in store.evaluations()]
        row = store.evaluations()[0].rows[0]
        perplexity = store.evaluations()[0].metrics["perplexity"]
        accuracies = [each.metrics["eval_mean_token_accuracy"] for each in store.evaluations()]
    assert {"loss", "entropy", "grad_norm", "time/step"} <= metrics.keys()
    assert metrics["mean_token_accuracy"] == pytest.approx(4 / 24)
    assert accuracies[0] == 0 < accuracies[2]
    assert [value for _, value in curve["learning_rate"]] == pytest.approx(
        [0.05, 0.04, 0.03, 0.02, 0.01]
    )
    assert [value for _, value in curve["epoch"]] == pytest.approx(
        [4 / 11, 8 / 11, 12 / 11, 16 / 11, 20 / 11]
    )
    assert curve["num_tokens"][-1][1] == 20 * 15
    assert evaluations == [(0, "step-0"), (2, "step-2"), (4, "step-4"), (5, "step-5")]
    assert row.keys() == {"example", "loss", "tokens"}
    assert perplexity > 1
    drawn = [group.example.index for group in groups]
    assert sorted(drawn[:11]) == list(range(11)), "each example once in an epoch"
    (rollout,) = groups[0].rollouts
    assert [segment.source for segment in rollout.segments] == ["teacher"]
    assert (rollout.completion, rollout.outcome, rollout.reward) == (
        sft_task.LETTERS,
        "scored",
        None,
    )
    assert groups[0].example.columns.keys() == {"number"}


def test_packing_and_micro_batches_change_nothing_but_rounding(tmp_path):
    curves = []
    for name, training in (
        ("sft", {"packing": False, "max_tokens_per_microbatch": 16}),
        ("plain", {}),
    ):
        settings = config(tmp_path, training=training, model={"name": "tiny", "dtype": "float32"})
        settings["run"]["name"] = name
        groupwise.sft(settings, TASK)
        with Store.open(tmp_path / name / "run.db", readonly=True) as store:
            curves.append(store.metrics(["loss", "mean_token_accuracy"]))
    found, wanted = final(tmp_path / "sft"), final(tmp_path / "plain")
    for name, expected in wanted.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-3)
    for name in curves[0]:
        cut, whole = ([value for _, value in curve[name]] for curve in curves)
        assert cut == pytest.approx(whole, rel=1e-3)


def test_whole_epochs_end_with_what_is_left_and_may_change_after_it(tmp_path):
    """Every example once per epoch, also where the first epoch ended with three."""
    once = {"max_steps": None, "num_train_epochs": 1.0, "lr_scheduler_type": "constant"}
    assert groupwise.sft(config(tmp_path, training=once), TASK).summary["steps"] == 3
    with Store.open(tmp_path / "sft" / "run.db", readonly=True) as store:
        assert [len(step.draws) for step in store.steps()] == [4, 4, 3]
        assert store.step_metrics(2)["epoch"] == 1.0
    longer = config(tmp_path, training={**once, "num_train_epochs": 2.0})
    assert groupwise.sft(longer, TASK, resume_from="sft@3").summary["steps"] == 6
    with Store.open(tmp_path / "sft" / "run.db", readonly=True) as store:
        steps = store.steps()
    assert [len(step.draws) for step in steps] == [4, 4, 3, 4, 4, 3]
    assert [draw for step in steps for draw in step.draws] == list(range(22))
    counted = config(tmp_path, training={"max_steps": 7, "lr_scheduler_type": "constant"})
    assert groupwise.sft(counted, TASK, resume_from="sft@6").summary["steps"] == 7


# Stopping and going on


def short(runs: Path) -> dict[str, Any]:
    """Three steps, with a checkpoint, a best one and a pruned one among its writes."""
    settings = config(runs, training={"max_steps": 3, "examples_per_step": 2})
    settings["run"] |= {"save_steps": 1, "save_total_limit": 1}
    return settings


def go_on(settings: dict[str, Any]) -> None:
    toy_run.go_on(settings, TASK, groupwise.sft)


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(40, marks=pytest.mark.timeout(400)),
        pytest.param(1, marks=pytest.mark.soak(suite="kills")),
    ],
)
def test_a_crash_at_durable_writes(tmp_path, every):
    """At crash points that the commit hash chooses; the soak test crashes at all of them."""
    assert not writes_that_crash(tmp_path, every)


def writes_that_crash(folder: Path, every: int) -> list[str]:
    """Crash points that lead elsewhere than the run that was not disturbed."""
    points: list[str] = []
    atomic_files.on_write = points.append
    try:
        groupwise.sft(short(folder / "whole"), TASK)
    finally:
        atomic_files.on_write = lambda name: None
    whole = what_must_be_equal(folder / "whole" / "sft")
    assert {name.split(":")[0] for name in points} == {"file", "folder", "remove", "commit"}
    failed: list[str] = []
    for number in range(turn() % every, len(points), every):
        runs = folder / str(number)
        assert toy_run.crash_at(number, lambda runs=runs: go_on(short(runs))) == 17
        go_on(short(runs))
        if what_must_be_equal(runs / "sft") != whole:
            failed.append(f"{number} {points[number]}")
    return failed


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("gradient", 2),
        ("evaluation", 0),
        ("between", 2),
        *(
            pytest.param(place, step, marks=pytest.mark.soak(suite="kills"))
            for place, step in (("gradient", 0), ("evaluation", 2), ("between", 0))
        ),
    ],
)
def test_a_clean_stop(uninterrupted, tmp_path, monkeypatch, place, step):
    """Ctrl-C drops a partial gradient, checkpoints the last whole step, and exits with 130."""
    owner, name = {
        "gradient": (TorchLearner, "_backward"),
        "evaluation": (TorchLearner, "predictions"),
        "between": (loop, "_commit_step"),
    }[place]
    original, evaluate, learn, at = (
        getattr(owner, name),
        loop._measure_held_out,
        loop._update_weights,
        [],
    )

    def noting(function):
        def noted(run, *arguments):
            at.append(run.step)
            return function(run, *arguments)

        return noted

    def stop_in(*arguments, **keywords):
        if at and at[-1] == step:
            at.append(-1)
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **keywords)

    noted = ("_measure_held_out", evaluate) if place == "evaluation" else ("_update_weights", learn)
    monkeypatch.setattr(loop, noted[0], noting(noted[1]))
    monkeypatch.setattr(owner, name, stop_in)
    result = groupwise.sft(config(tmp_path), TASK)
    monkeypatch.undo()
    done = step + (place == "between")
    assert (result.exit_code, result.summary["state"]) == (130, "interrupted")
    assert result.summary["steps"] == done
    newest = checkpoints.newest(tmp_path / "sft" / "checkpoints")
    assert (newest.step if newest else 0) == done
    go_on(config(tmp_path))
    resumed, whole = what_must_be_equal(tmp_path / "sft"), uninterrupted[1]
    assert resumed["record"] == whole["record"]
    assert same(final(tmp_path / "sft"), final(uninterrupted[0]))


def test_only_what_may_change_changes(uninterrupted, tmp_path):
    short = config(tmp_path, training={"max_steps": 3, "lr_scheduler_type": "constant"})
    groupwise.sft(short, TASK)
    longer = config(tmp_path, training={"max_steps": 4, "lr_scheduler_type": "constant"})
    assert groupwise.sft(longer, TASK, resume_from="sft@3").summary["steps"] == 4
    with pytest.raises(ResumeMismatchError, match=r"examples_per_step: 4 .*5"):
        groupwise.sft(
            config(tmp_path, training={"examples_per_step": 5}), TASK, resume_from="sft@3"
        )
    with pytest.raises(ResumeMismatchError, match="run of `groupwise sft`"):
        groupwise.rl({**rl_config(tmp_path)}, TOY, resume_from="sft@3")


def test_other_held_out_rows_start_again(tmp_path):
    class Task:
        get_sft_dataset = staticmethod(sft_task.get_sft_dataset)
        held_out = 3

        @classmethod
        def get_sft_eval_dataset(cls, config, tokenizer):
            return sft_task.rows(cls.held_out, seed=1)

    groupwise.sft(config(tmp_path, training={"max_steps": 2}), Task)
    Task.held_out = 4
    summary = groupwise.sft(
        config(tmp_path, training={"max_steps": 3}), Task, resume_from="sft@2"
    ).summary
    with Store.open(tmp_path / "sft" / "run.db", readonly=True) as store:
        found = {each.step: each for each in store.evaluations()}
    assert {step: len(each.rows) for step, each in found.items()} == {0: 3, 2: 4, 3: 4}
    assert summary["best_step"] == 3


# The best step


def evaluated_as(monkeypatch, *losses: float) -> None:
    """The evaluation after step n finds the loss at place n."""

    async def evaluate(run):
        return {"eval_loss": losses[run.step]}

    monkeypatch.setattr(loop, "_measure_held_out", evaluate)


def test_the_best_checkpoint_is_kept_and_may_become_the_final_one(tmp_path, monkeypatch):
    settings = config(
        tmp_path,
        training={"max_steps": 6},
        eval={"eval_steps": 1, "load_best_model_at_end": True},
    )
    settings["run"] |= {"save_steps": 1, "save_total_limit": 1}
    evaluated_as(monkeypatch, 0.1, 3.0, 2.0, 2.5, 2.4, 2.3, 2.2)
    summary = groupwise.sft(settings, TASK).summary
    folder = tmp_path / "sft"
    assert (summary["best_step"], summary["eval_loss_best"]) == (2, 2.0)
    assert [each.step for each in checkpoints.complete(folder / "checkpoints")] == [2, 6]
    assert same(final(folder), checkpoint(folder, 2))
    assert not same(final(folder), checkpoint(folder, 6))
    assert_everybody_calls_it("sft@2", tmp_path, summary)
    groupwise.sft({**settings, "eval": {}}, TASK, resume_from="sft@2")
    assert label("sft", tmp_path) == "sft@6"
    settings["eval"]["load_best_model_at_end"] = False
    evaluated_as(monkeypatch, 0.1, 3.0, 2.0, 2.5, 2.4, 2.3, 2.2)
    groupwise.sft(settings, TASK)
    assert same(final(tmp_path / "sft-2"), checkpoint(tmp_path / "sft-2", 6))


def label(reference: str, runs: Path) -> str:
    return find_policy(reference, runs).label


def assert_everybody_calls_it(name: str, runs: Path, summary: dict[str, Any]) -> None:
    """One label never means two models: the card, the summary, exports and evaluations name the step of the weights."""
    step = int(name.partition("@")[2])
    assert (summary["policy"], summary["final_step"]) == (name, step)
    assert f"for {step} steps" in (runs / "sft/final/README.md").read_text()
    made = export("sft", "adapter", runs / "out", runs_dir=runs)
    assert made.step == step
    assert f"for {step} steps" in (runs / "out/README.md").read_text()
    assert label("sft", runs) == name


def test_early_stopping_counts_on_after_an_interruption(tmp_path, monkeypatch):
    """Two evaluations without a loss lower by more than the threshold; the one before the first step does not count.

    Nothing is counted twice or forgotten: the evaluation before the stop stands in the checkpoint.
    """
    stopping = {"eval_steps": 1, "early_stopping_patience": 2, "early_stopping_threshold": 0.1}
    settings = config(tmp_path, training={"max_steps": 9}, eval=stopping)
    evaluated_as(monkeypatch, 0.5, 3.0, 2.95, 2.8, 2.75, 2.71, 1.0)
    commit = loop._commit_step

    def stop_in(run, *arguments):
        commit(run, *arguments)
        if run.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "_commit_step", stop_in)
    assert groupwise.sft(settings, TASK).exit_code == 130
    monkeypatch.setattr(loop, "_commit_step", commit)
    summary = groupwise.sft(settings, TASK, resume=True).summary
    assert (summary["steps"], summary["best_step"], summary["stopped_early"]) == (5, 5, True)
    assert summary["eval_loss_best"] == 2.71
    assert "stopped early" in (tmp_path / "sft" / "log.txt").read_text()


# Before and after


def test_reinforcement_learning_starts_from_it(uninterrupted, tmp_path):
    folder, *_ = uninterrupted
    settings = rl_config(tmp_path)
    settings["training"]["max_steps"] = 1
    other = {**settings, "lora": {"r": 8}}
    with pytest.raises(ModelError, match=r"^--init-from .*: lora\.r is 8.* 4"):
        groupwise.rl(other, TOY, init_from=str(folder))
    assert groupwise.rl(settings, TOY, init_from=str(folder)).exit_code == 0
    started = load_file(tmp_path / "toy" / "start" / "adapter_model.safetensors")
    assert same(started, final(folder))
    card = (tmp_path / "toy/final/README.md").read_text()
    assert "It started from `sft@5` (supervised fine-tuning on the task `sft_task`)." in card
    assert '"adapter": "sft@5"' in card


DATA = {"get_sft_dataset": sft_task.get_sft_dataset}
HELD_OUT = {"get_sft_eval_dataset": sft_task.get_sft_eval_dataset}
WRONG: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {}, TaskError, "get_sft_dataset"),
    ({"get_sft_dataset": lambda config: []}, {}, TaskError, "parameters"),
    ({"get_sft_dataset": lambda config, tokenizer: []}, {}, TaskError, "empty dataset"),
    ({"get_sft_dataset": lambda config, tokenizer: [{"question": "a"}]}, {}, TaskError, "row 0"),
    (
        {"get_sft_dataset": lambda config, tokenizer: iter([])},
        {"training": {"max_steps": None, "num_train_epochs": 1.0}},
        *(TaskError, "no length"),
    ),
    (DATA, {"eval": {"early_stopping_patience": 1}}, TaskError, "get_sft_eval"),
    (
        {**DATA, **HELD_OUT, "get_sft_formatting_func": lambda config, tokenizer: "text"},
        *({}, TaskError, "get_sft_formatting_func returned str"),
    ),
    (DATA, {"sampler": {}}, ConfigError, "`groupwise rl`"),
]


@pytest.mark.parametrize(("hooks", "more", "error", "said"), WRONG)
def test_errors_are_raised_before_anything_is_written(tmp_path, hooks, more, error, said):
    class Task:
        pass

    for name, function in hooks.items():
        setattr(Task, name, staticmethod(function))
    with pytest.raises(error, match=said):
        groupwise.sft(config(tmp_path, **{"eval": {"eval_steps": None}, **more}), Task)
    assert not (tmp_path / "sft").exists()


def test_hooks_of_a_task_are_used(tmp_path):
    """A formatting function, a collator and no held-out rows: as the task says, or none of them."""

    class Task:
        @staticmethod
        def get_sft_dataset(config, tokenizer):
            return [{"q": "ab", "a": "cd"}, {"q": "ef", "a": "gh"}]

        @staticmethod
        def get_sft_eval_dataset(config, tokenizer):
            return None

        @staticmethod
        def get_sft_formatting_func(config, tokenizer):
            return lambda row: row["q"] + row["a"]

        @staticmethod
        def get_sft_data_collator(config, tokenizer):
            def collate(features):
                ids = [feature["input_ids"] for feature in features]
                return {"input_ids": ids, "labels": [[-100, -100, *row[2:4], -100] for row in ids]}

            return collate

    settings = config(tmp_path, training={"max_steps": 1})
    settings["eval"] = {}
    rows = groupwise.sft(settings, Task, dry_run=True).summary["plan"]["first_rows"]
    assert rows[0] in ("ab⟦cd⟧<eos>", "ef⟦gh⟧<eos>")
    assert groupwise.sft(settings, Task).summary["steps"] == 1
