"""`groupwise init` with the model tiny: what it writes passes a dry run and trains, and what it refuses it explains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import groupwise
from groupwise.cli.main import main
from groupwise.core.errors import UsageError
from groupwise.runs.store import Store
from groupwise.training.assembly import start
from groupwise.training.checks import doctor_cost
from groupwise.training.config import load_config, resolved_values
from groupwise.training.init import choices
from groupwise.training.init import init as module
from groupwise.training.init.init import init
from groupwise.training.sft_config import load_sft_config
from tests.integration.toy_run import TOY

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = [*sorted(map(str, EXAMPLES.glob("*/task*.py"))), "sort_words"]
TAUGHT = str(EXAMPLES / "05_sft_then_rl/task.py")
SMALL = ["training.max_steps=2", "eval.max_prompts=2", "rewards.in_process=true"]
QUICK = ["training.prompts_per_step=2", "training.num_generations=2"]


@pytest.fixture(autouse=True)
def _quickly(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_cost, "BUDGET", 0.05)


@pytest.fixture
def no_weights(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(start, "training_parts", refuse)
    monkeypatch.setattr(start, "supervised_parts", refuse)


def level(report, name: str) -> str:
    (found,) = [each for each in report.findings if each.name == name]
    return found.level


USUAL = ("04_calculator_tool/task.py",)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=[] if task.endswith(USUAL) else [pytest.mark.soak(suite="docs")])
        for task in TASKS
    ],
    ids=lambda task: Path(task).parent.name + Path(task).stem,
)
def test_the_written_config_passes_a_dry_run_and_trains(task):
    turns = "guessing" in task or "calculator" in task
    words = [*QUICK, "run.threads=1", *(["sampler.max_completion_length=4"] if turns else [])]
    report = init(task, "tiny", overrides=words, out=Path("mine.yaml"))
    assert report.exit_code == 0
    assert level(report, "speed") == "ok"
    written = load_config("mine.yaml")
    assert {**report.details["config"], "task": {}} == {
        **resolved_values(written.config),
        "task": {},
    }
    planned = groupwise.rl("mine.yaml", task, dry_run=True).summary
    assert planned["config"] == {
        **report.details["config"],
        "run": {**report.details["config"]["run"], "name": "mine"},
    }
    assert planned["plan"]["layout"] == report.details["layout"]
    assert planned["plan"]["examples_dropped_as_too_long"] == 0
    groupwise.rl("mine.yaml", task, overrides=[*SMALL, *(["rollout.in_process=true"] * turns)])
    with Store.open(Path("runs/mine/run.db"), readonly=True) as store:
        assert store.last_step() == 1
        rollouts = [one for group in store.groups(0) for one in group.rollouts]
    assert len(rollouts) == 4
    assert {one.outcome for one in rollouts} == {"scored"}


def test_the_reasons_are_those_of_the_step_that_was_made_smaller(monkeypatch):
    """The length of one pass over the examples, and the memory planned for the step that was measured."""
    monkeypatch.setattr(choices, "MAX_STEP_SECONDS", 1e-9)
    monkeypatch.setattr(module.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(module, "LONG_RUN_SECONDS", 0.0)
    report = init(TOY, "tiny", overrides=["run.threads=1"], out=Path("s.yaml"))
    findings = {finding.name: finding for finding in report.findings}
    size = report.details["config"]["training"]["prompts_per_step"]
    examples = groupwise.rl("s.yaml", TOY, dry_run=True).summary["plan"]["examples"]
    assert size == choices.MIN_PROMPTS < min(examples, 8)
    assert f"takes {-(-examples // size)} step" in findings["training.max_steps"].meaning
    assert "larger step" in findings["peak memory"].measured
    assert "training.max_steps=50, training.prompts_per_step=1" in findings["shorter"].measured
    assert findings["cores"].level == "warning", "other programs made it slow"
    comments = " ".join(Path("s.yaml").read_text().replace("#", "").split())
    assert comments.count("while other programs run (load 99.0)") == 2


def test_a_task_with_given_answers_is_told_of_the_warm_up(no_weights):
    for task, said in ((TAUGHT, "make the section"), (TOY, "add that hook")):
        (found,) = (f for f in init(task, "tiny", measure=False).findings if f.name == "warm-up")
        assert said in found.meaning
    head, line, section = Path("task.yaml").read_text().partition("# warm_up:\n")
    Path("task.yaml").write_text(head + (line + section).replace("# ", ""))
    plan = groupwise.rl("task.yaml", TAUGHT, dry_run=True).summary
    assert plan["warm_up"]["plan"]["steps"] == 20
    assert plan["warm_up"]["config"]["training"]["stop_when"]
    (evaluation,) = (each for each in head.splitlines() if "--policy base" in each)
    assert main([*evaluation.split()[2:], "--dry-run"]) == 0


def test_keys_that_were_given_are_written_and_what_they_exclude_is_not(no_weights):
    words = [
        "algorithm.preset=dapo_paper", "training.num_train_epochs=3", "model.name=tiny", "eval.samples_per_prompt=2",
    ]  # fmt: skip
    report = init(TOY, "smollm2-135m-instruct", overrides=words, out=Path("o.yaml"), measure=False)
    assert report.exit_code == 0
    config = load_config("o.yaml").config
    assert (config.algorithm.type, config.algorithm.preset) == ("dapo", "dapo_paper")
    assert (config.training.max_steps, config.training.num_train_epochs) == (None, 3.0)
    assert (config.model.name, config.eval.temperature) == ("tiny", 1.0)
    title = Path("o.yaml").read_text().partition("\n\n")[0]
    assert "with tiny on" in " ".join(title.split())


def test_a_supervised_config_trains(capsys):
    assert main(["init", "-t", TAUGHT, "-m", "tiny", "--for", "sft", "run.threads=1"]) == 0
    shown = capsys.readouterr().out
    assert "wrote task-sft.yaml" in shown
    assert f"groupwise sft --config task-sft.yaml --task-module {TAUGHT} --dry-run" in shown
    assert load_sft_config("task-sft.yaml").config.data.max_length is None, "the model's limit"
    planned = groupwise.sft("task-sft.yaml", TAUGHT, dry_run=True).summary["plan"]
    assert planned["rows_cut_as_too_long"] == 0
    assert planned["steps"] == 12
    result = groupwise.sft("task-sft.yaml", TAUGHT, overrides=["training.max_steps=2"])
    assert result.summary["steps"] == 2


def test_a_file_that_is_there_is_kept_unless_forced(no_weights):
    Path("toy_task.yaml").write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        init(TOY, "tiny", measure=False)
    assert Path("toy_task.yaml").read_text() == "mine"
    init(TOY, "tiny", measure=False, force=True)
    assert load_config("toy_task.yaml").config.model.name == "tiny"


def test_for_a_model_that_does_not_fit_the_most_economical_settings_are_written(
    monkeypatch, no_weights, capsys
):
    monkeypatch.setattr(module, "free_memory", lambda device: 100 << 20)
    assert main(["init", "-t", TOY, "-m", "tiny", "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert summary["error"]["code"] == "init_failed"
    assert summary["file"] == "toy_task.yaml"
    written = load_config("toy_task.yaml").config
    assert written.training.gradient_checkpointing
    assert (written.sampler.max_num_seqs, written.training.max_tokens_per_microbatch) == (8, 512)
