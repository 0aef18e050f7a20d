"""`warm_up` in a config of `groupwise rl`: a supervised run before it, made once, and ended by a rule on what it writes itself; and a run
that would need one."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.cli.main import main
from groupwise.core.errors import ConfigError, UsageError
from groupwise.engine.distributed.config import DistributedConfig
from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store
from groupwise.training.config import load_config
from groupwise.training.loops import sft as loop
from groupwise.training.sft_config import config_of_warm_up, holds
from tests.integration import toy_run

TASK = "from tests.integration.sft_task import *\nfrom tests.integration.toy_task import *\n"


@pytest.fixture
def task(tmp_path) -> str:
    (tmp_path / "both.py").write_text(TASK)
    return str(tmp_path / "both.py")


def config(runs: Path, evaluation: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    """An RL run of one step behind a warm-up of four."""
    given = {"max_steps": 4, "examples_per_step": 4, "learning_rate": 0.05, **training}
    return {
        **toy_run.config(runs, max_steps=1),
        "eval": {"before_and_after": False},
        "warm_up": {
            "training": given,
            "eval": evaluation or {},
            "run": {"save_steps": 2, "threads": 1},
        },
    }


DRAWN = {"eval_steps": 2, "completions": {"max_prompts": 4, "num_generations": 4}}


def test_it_is_made_once_for_all_that_begin_with_the_same(tmp_path, task):
    """Whatever follows it, and also where it draws completions as the RL run would."""
    first = config(tmp_path, DRAWN)
    again = {**first, "run": {**first["run"], "name": "sweep"}}
    again["training"] = {**first["training"], "learning_rate": 0.01}
    found = [
        groupwise.rl(each, task).summary for each in (first, again, config(tmp_path, DRAWN, seed=5))
    ]
    assert [each["warm_up"].get("reused", False) for each in found] == [False, True, False]
    assert [each["warm_up"]["policy"] for each in found] == [
        *2 * ["toy-warm-up@4"],
        "toy-warm-up-2@4",
    ]
    lineage = Store.facts(tmp_path / "sweep" / "run.db")["lineage"]
    assert [each["policy"] for each in lineage] == ["toy-warm-up@4"]


@pytest.fixture
def cut_off(tmp_path, task, monkeypatch) -> Path:
    """A warm-up that was interrupted after three of its four steps."""
    original = loop.take_step

    async def stop(run):
        await original(run)
        if run.step == 3:
            run.interruption._handle_signal(2, None)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", stop)
        result = groupwise.rl(config(tmp_path), task)
    assert (result.exit_code, result.summary["run"]) == (130, "toy-warm-up")
    assert not (tmp_path / "toy").exists()
    return tmp_path / "toy-warm-up"


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_an_interrupted_warm_up_continues(cut_off, tmp_path, task, with_checkpoint):
    """With its last checkpoint, or from its beginning where there was none yet."""
    if not with_checkpoint:
        shutil.rmtree(cut_off / "checkpoints")
    done = groupwise.rl(config(tmp_path), task, resume=True)
    assert done.summary["warm_up"]["policy"] == "toy-warm-up@4"
    assert {path.name for path in tmp_path.glob("toy*")} == {"toy", "toy-warm-up"}
    again = groupwise.rl(config(tmp_path), task)
    assert again.summary["run"] == "toy-2", "nothing is in its way"


def test_an_interrupted_warm_up_of_another_config_is_left_alone(cut_off, tmp_path, task):
    done = groupwise.rl(config(tmp_path, learning_rate=0.04), task)
    assert done.summary["warm_up"]["policy"] == "toy-warm-up-2@4"
    assert Store.facts(cut_off / "run.db")["state"] != "finished"


def test_errors_of_the_second_stage_are_raised_before_the_first(tmp_path, task):
    (tmp_path / "toy").mkdir()
    with pytest.raises(UsageError, match="is not a run folder"):
        groupwise.rl(config(tmp_path), task)
    assert not [*tmp_path.glob("*warm-up*")]


def test_a_warm_up_has_no_samplers_of_its_own():
    given = {**config(Path("runs")), "distributed": {"samplers": 1}, "run": {}}
    assert config_of_warm_up(load_config(given)).config.distributed == DistributedConfig()


def test_a_dry_run_shows_both_and_sft_makes_the_first_alone(tmp_path, task):
    plan = groupwise.rl(config(tmp_path), task, dry_run=True).summary
    assert (plan["plan"]["steps"], plan["warm_up"]["plan"]["steps"]) == (1, 4)
    assert groupwise.sft(config(tmp_path), task, dry_run=True).summary == plan["warm_up"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_held_out_prompts_that_the_warm_up_trains_on_are_a_warning(tmp_path, task):
    shares = "def get_eval_dataset(config):\n    return [{**row, 'wanted': 'a'} for row in get_sft_dataset(config, None)]\n"
    Path(task).write_text(TASK + shares)
    given = {**config(tmp_path), "eval": {"before_and_after": True}}
    warnings = groupwise.rl(given, task, dry_run=True).summary["plan"]["warnings"]
    assert any("11 of 11 held-out prompts are also trained on" in text for text in warnings)


def test_a_rule_on_what_it_writes_ends_it(tmp_path, task):
    drawn = {"eval_steps": 1, "completions": {"max_prompts": 4, "num_generations": 4}}
    rules = ["reward > 1", "groups/with_signal >= 0 and reward >= 0"]
    summary = groupwise.rl(config(tmp_path, drawn, stop_when=rules), task).summary
    assert summary["warm_up"]["stopped_by"] == rules[1]
    assert summary["warm_up"]["steps"] == 0
    with Store.open(tmp_path / "toy-warm-up" / "run.db", readonly=True) as store:
        (found,) = store.evaluations(rows=False)
    assert {"eval_loss", "reward", "rewards/share/mean", "groups/distinct"} <= set(found.metrics)
    assert found.metrics["completions/mean_length"] <= 6, "as long as the RL run's"


def test_both_are_one_curve_and_the_base_model_stands_beside_them(tmp_path, task, capsys):
    drawn = {"eval_steps": 2, "completions": {"max_prompts": 4, "num_generations": 4}}
    given = {**config(tmp_path, drawn), "eval": {"max_prompts": 4}}
    held_out = groupwise.rl(given, task).summary["held_out"]
    assert held_out["base"].keys() == held_out["before"].keys() == held_out["after"].keys()
    assert held_out["base"]["reward"] != held_out["before"]["reward"]
    alone = groupwise.rl({**given, "warm_up": None}, task).summary["held_out"]
    assert alone["before"] == held_out["base"]
    assert "base" not in alone
    card = (tmp_path / "toy/final/README.md").read_text()
    assert "| the base model | before | after |" in card
    assert main(["runs", "plot", "toy", "--dir", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    assert "held-out after 1 step: " in told.err
    drawn = json.loads(told.out)
    assert [step for step, _ in drawn["warm_up"]] == [-4, -2, 0]
    assert [step for step, _ in drawn["points"]] == [1]


def test_a_stop_condition_that_never_holds_is_reported(tmp_path, task, capsys):
    groupwise.rl(config(tmp_path, DRAWN, stop_when=["reward > 1"]), task)
    told = capsys.readouterr().err
    assert "no condition of training.stop_when was met in 4 steps (reward is 0." in told


@pytest.mark.parametrize(("values", "told"), [
    ((0.25, 0.5), r"\(groups/with_signal is 0.5\): train for longer, or ask for less"),
    ((0.25, 0.5625, 0.125), r"is 0.125 after it was 0.5625 at step 4\): more steps may lead further away"),
])  # fmt: skip
def test_an_unmet_condition_is_explained_by_what_was_nearest(values, told):
    found = [
        EvaluationRecord(4 * number, "", "", {"groups/with_signal": value})
        for number, value in enumerate(values)
    ]
    warning = loop.unmet_warning(["groups/with_signal >= 0.6"], found, 8)
    assert re.search(told, warning), warning


def test_an_invalid_stop_condition_is_refused(tmp_path, task):
    with pytest.raises(ConfigError, match="'reward is 1' is not a condition"):
        groupwise.rl(config(tmp_path, stop_when=["reward is 1"]), task)
    with pytest.raises(ConfigError, match=r"names groups/signal, which no .* groups/with_signal"):
        groupwise.rl(config(tmp_path, DRAWN, stop_when=["groups/signal > 1"]), task, dry_run=True)
    with pytest.raises(UsageError, match="names rewards/shape, which the evaluation after 0 steps"):
        groupwise.rl(config(tmp_path, DRAWN, stop_when=["rewards/shape > 1"]), task)


@pytest.mark.parametrize(("condition", "held"), [
    ("a >= 1", True), ("a > 1", False), ("a<=1.0", True), ("b/c < -1e-3", True), ("a >= 1 and b/c >= 0", False), ("d > 0", False),
])  # fmt: skip
def test_conditions(condition, held):
    assert holds(condition, {"a": 1.0, "b/c": -2.0}) is held


def test_a_run_whose_reward_cannot_rise_says_so_after_five_steps(tmp_path, capsys):
    (tmp_path / "flat.py").write_text(
        TASK + "def get_reward_funcs(config, tokenizer):\n    return [nothing]\n"
        "def nothing(completions, **kwargs):\n    return [0.0] * len(completions)\n"
    )
    settings = {**toy_run.config(tmp_path, max_steps=6), "eval": {"before_and_after": False}}
    groupwise.rl(settings, str(tmp_path / "flat.py"))
    said = capsys.readouterr().err
    assert said.count("after 5 steps: In 100% of the groups all rollouts earn the same") == 1
    assert "That is expected of model.name=tiny" in said
