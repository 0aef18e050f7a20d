"""What `groupwise.rl` refuses, remembers and leaves behind, seen from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.core.errors import ResumeMismatchError, RunInUseError, RunNotFoundError, UsageError
from groupwise.runs.folder import RunFolder, read_config
from groupwise.runs.store import Store
from groupwise.training.loops import recording
from groupwise.training.loops import rl as loop
from tests.integration.toy_run import STEPS, TOY, config, what_must_be_equal


@pytest.fixture
def finished(whole_toy):
    """The folder of runs with one that is finished, and its result."""
    return whole_toy.runs, whole_toy.result


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of runs with one that was interrupted after three steps."""
    torch.set_num_threads(1)
    runs = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, runs)
    return runs


@pytest.fixture
def runs(finished, tmp_path) -> Path:
    """A copy of the finished one."""
    return Path(shutil.copytree(finished[0], tmp_path / "runs"))


@pytest.fixture
def half(stopped, tmp_path) -> Path:
    """A copy of the interrupted one."""
    return Path(shutil.copytree(stopped, tmp_path / "half"))


def interrupt(monkeypatch, runs, settings=None, task=TOY, **ways) -> None:
    """Leave an interrupted run with a checkpoint after three steps."""
    original = loop.take_step

    async def stop(run, drawn, begun):
        await original(run, drawn, begun)
        if run.step == 3:
            run.interruption._handle_signal(2, None)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", stop)
        assert groupwise.rl(settings or config(runs), task, **ways).exit_code == 130


def toy_with(folder: Path, *changes: tuple[str, str]) -> str:
    """The toy task with some of its lines replaced."""
    source = Path(TOY).read_text()
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    task = folder / "toy_task.py"
    task.write_text(source)
    return str(task)


PAIRS = "    pairs = zip(completions, wanted"


# What a run leaves


def test_a_finished_run_leaves_everything_in_its_folder(finished):
    folder = finished[1].folder
    files = {path.name for path in folder.iterdir()}
    assert files >= {"config.json", "run.db", "final", "tokenizer", "results", "reward.svg"}
    assert [path.name for path in sorted(folder.glob("checkpoints/*"))] == ["step-4", "step-5"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["policy"]) == ("finished", STEPS, "toy@5")
    assert summary["held_out"]["prompts"] == 3
    with Store.open(folder / "run.db", readonly=True) as store:
        assert [len(store.groups(step)) for step in range(STEPS)] == [2] * STEPS
        assert {len(group.rollouts) for group in store.groups(0)} == {4}
        assert [found.name for found in store.evaluations()] == ["before", "step-3", "after"]
        names = set(store.metric_names())
    assert names >= {
        *("reward", "reward_std", "rewards/share/mean", "frac_reward_zero_std", "loss", "entropy"),
        *("grad_norm", "learning_rate", "completions/mean_length", "completions/clipped_ratio"),
        *("clip_ratio/region_mean", "sampling/logprob_gap", "num_tokens", "rollouts/scored"),
        "time/step",
    }


def test_full_fine_tuning_leaves_a_whole_model_that_can_be_started_from(tmp_path):
    from transformers import AutoModelForCausalLM

    settings = {**config(tmp_path, learning_rate=1e-3, max_steps=2), "lora": None}
    result = groupwise.rl(settings, TOY)
    reloaded = AutoModelForCausalLM.from_pretrained(result.folder / "final")
    evaluated = groupwise.evaluate(settings, TOY, policy="toy")
    assert sum(parameter.numel() for parameter in reloaded.parameters()) > 6000
    assert evaluated.metrics == result.after.metrics
    settings["run"]["name"] = "second"
    settings["training"]["max_steps"] = 1
    assert groupwise.rl(settings, TOY, init_from="toy@2").exit_code == 0


def test_a_second_run_has_a_name_of_its_own_and_a_finished_one_is_only_made_longer(runs):
    assert groupwise.rl(config(runs), TOY, dry_run=True).folder == runs / "toy-2"
    assert [path.name for path in runs.iterdir()] == ["toy"]
    with pytest.raises(RunNotFoundError, match="finished"):
        groupwise.rl(config(runs), TOY, resume=True)
    with pytest.raises(ResumeMismatchError, match="4 steps done"):
        groupwise.rl(config(runs, max_steps=2), TOY, resume_from="toy@4")
    with pytest.raises(ResumeMismatchError, match=r"run.name=other: toy@5 is continued"):
        groupwise.rl(config(runs), TOY, resume_from="toy@5", overrides=["run.name=other"])
    longer = groupwise.rl(config(runs, max_steps=STEPS + 2), TOY, resume_from="toy@5")
    with Store.open(longer.folder / "run.db", readonly=True) as store:
        found = [(each.name, each.step) for each in store.evaluations()]
    assert found == [("before", 0), ("step-3", 3), ("after", 5), ("step-6", 6), ("after", 7)]
    assert longer.after.policy == "toy@7"
    assert longer.summary["resumed_from_step"] == 5, "its seconds are those of the last two steps"
    assert groupwise.rl(config(runs, max_steps=1), TOY).summary["run"] == "toy-2"


def test_init_from_takes_the_weights_only_and_a_resume_needs_nothing_else(runs, monkeypatch):
    checkpoint = groupwise.evaluate(config(runs), TOY, policy="toy@4")
    settings = config(runs)
    settings["run"]["name"] = "second"
    second = groupwise.rl(settings, TOY, init_from="toy@4")
    with Store.open(second.folder / "run.db", readonly=True) as store:
        assert store.steps()[0].version_in == 0
        start = store.evaluations()[0]
    assert [row["completion"] for row in start.rows] == [
        row["completion"] for row in checkpoint.rows
    ]
    kept = second.folder.resolve() / "start"
    assert read_config(second.folder)["model"]["adapter"] == str(kept)
    files = {path.name for path in kept.iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    settings["run"]["name"] = "third"
    interrupt(monkeypatch, runs, settings, init_from="toy@4")
    shutil.rmtree(runs / "toy")
    resumed = groupwise.rl(settings, TOY, resume=True)
    assert resumed.summary["fingerprint"] == second.summary["fingerprint"]


# Resumes


def test_resume_refuses_another_config_another_task_and_other_data(half, tmp_path):
    source = Path(TOY).read_text()
    (tmp_path / "other_task.py").write_text(source)
    other_data = toy_with(tmp_path, ("seed=0", "seed=5"))
    changed = {"learning_rate": 0.5, "num_generations": 6}
    for training, task, told in (
        (changed, TOY, r"learning_rate: 0\.01 then, 0\.5 now(.|\n)*num_generations: 4 then, 6"),
        ({}, str(tmp_path / "other_task.py"), "--task-module"),
        ({}, other_data, "data"),
    ):
        with pytest.raises(ResumeMismatchError, match=told):
            groupwise.rl(config(half, **training), task, resume=True)
    commented = toy_with(tmp_path, (PAIRS, "    # another comment\n" + PAIRS))
    assert groupwise.rl(config(half), commented, resume=True).exit_code == 0


def test_resume_takes_free_keys_and_warns_of_another_layout(half, caplog):
    """And results that are measured otherwise are not compared."""
    settings = config(half)
    settings["sampler"]["max_num_seqs"] = 16
    settings["run"]["save_total_limit"] = None
    settings["eval"]["max_completion_length"] = 3
    plan = groupwise.rl(settings, TOY, resume=True, dry_run=True).summary["plan"]
    (change,) = [each for each in plan["warnings"] if "sampler.max_num_seqs was 8, is 16" in each]
    result = groupwise.rl(settings, TOY, resume=True)
    assert [each.getMessage() for each in caplog.records].count(change) == 1
    assert read_config(half / "toy")["run"]["save_total_limit"] is None
    with Store.open(half / "toy" / "run.db", readonly=True) as store:
        assert "run.save_total_limit" in list(store.resumes()[0].changes)
    assert (result.exit_code, "held_out" in result.summary) == (0, False)
    assert (result.before, result.after is None) == (None, False)
    assert "no comparison" in (result.folder / "log.txt").read_text()


def test_an_unfinished_run_is_not_overwritten_nor_a_live_one_disturbed(half):
    with pytest.raises(UsageError, match=r"--resume(.|\n)*run\.name"):
        groupwise.rl(config(half), TOY)
    with RunFolder.open(half / "toy"):
        for resume in (True, False):
            with pytest.raises(RunInUseError):
                groupwise.rl(config(half), TOY, resume=resume)


def test_a_damaged_checkpoint_is_skipped_and_named(half, finished):
    """The one before it is taken, and the run ends as if nothing had happened."""
    damaged = half / "toy" / "checkpoints" / "step-3" / "optimiser.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-7] + b"garbage")
    plan = groupwise.rl(config(half), TOY, resume=True, dry_run=True).summary["plan"]
    (skipped,) = [each for each in plan["warnings"] if "optimiser.safetensors was changed" in each]
    result = groupwise.rl(config(half), TOY, resume=True)
    told = (result.folder / "log.txt").read_text()
    assert skipped in told
    assert "resumed after 2 steps" in told
    found, whole = map(what_must_be_equal, (result.folder, finished[1].folder))
    assert found["record"] == whole["record"]


# What is refused, and what a dry run says


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path):
    found = groupwise.rl(config(tmp_path / "runs"), TOY, dry_run=True).summary
    plan = found["plan"]
    assert (found["config"]["training"]["max_steps"], plan["parameters"]) == (STEPS, 6_832)
    assert 0 < plan["parameters_trained"] < plan["parameters"]
    assert plan["completions_per_step"] == 8
    assert plan["first_prompt"].startswith("write ")
    assert plan["memory_mib"]["total"] >= 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("cache", "change", "told"),
    [
        (7, (), "soft_punish_cache is 7"),
        (None, ("share", "overlong"), "'overlong'"),
        (0, ("def get_eval_dataset", "def not_a_hook"), r"eval\.eval_steps"),
    ],
)
def test_conflicts_of_config_and_task_are_refused_before_the_start(tmp_path, cache, change, told):
    task = toy_with(tmp_path, *([change] if change else []))
    settings = config(tmp_path / "runs")
    settings["algorithm"] = {"type": "dapo", "soft_punish_cache": cache}
    with pytest.raises(UsageError, match=told):
        groupwise.rl(settings, task, dry_run=True)
    settings["algorithm"]["soft_punish_cache"] = 0
    settings["eval"] = {}
    groupwise.rl(settings, task, dry_run=True)


# What is told while it runs


def test_metrics_that_fail_do_not_cost_the_training_and_failures_are_reported(tmp_path):
    """Those of the task, and rewards of held-out prompts."""
    task = toy_with(
        tmp_path,
        ("    shares = share(", "    raise RuntimeError('no measure')\n    shares = share("),
        (PAIRS, "    1 / (len(completions) - 1)\n" + PAIRS),
    )
    result = groupwise.rl(config(tmp_path, max_steps=3), task)
    assert result.exit_code == 0
    assert (result.folder / "final" / "adapter_model.safetensors").exists()
    assert (len(result.after.rows), "share" in result.after.metrics) == (3, False)
    assert result.after.metrics["rollouts/failed"] == 3
    log = (result.folder / "log.txt").read_text()
    assert "no measure" in log
    assert "3 of 3 could not" in log


def test_logged_metrics_do_not_replace_our_own_and_dropped_prompts_are_reported(tmp_path):
    logging = (
        "    if log_metric:\n        log_metric('reward', 99.0)\n        log_metric('mine', 7.0)\n"
    )
    task = toy_with(
        tmp_path,
        ("wanted, **kwargs):", "wanted, log_metric=None, **kwargs):"),
        (PAIRS, logging + PAIRS),
        ('f"write {', "'long ' * (index % 2) + f\"write {"),
    )
    settings: dict[str, Any] = {**config(tmp_path, max_steps=1), "data": {"max_prompt_length": 10}}
    settings["eval"] = {"before_and_after": False}
    result = groupwise.rl(settings, task)
    with Store.open(result.folder / "run.db", readonly=True) as store:
        metrics = store.step_metrics(0)
    assert metrics["reward"] < 1
    assert (metrics["task/reward"], metrics["mine"]) == (99.0, 7.0)
    assert "20 of 40 prompts are longer" in (result.folder / "log.txt").read_text()


def test_a_wide_gap_is_warned_of_once(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_GAP", -1.0)
    result = groupwise.rl(config(tmp_path, max_steps=2), TOY)
    assert (result.folder / "log.txt").read_text().count("sampler and learner differ") == 1


# In a notebook


async def test_interrupting_a_cell_ends_the_run_cleanly(tmp_path, monkeypatch):
    """As the stop button of a notebook does: the waiting thread gets the interrupt, the run is in another one."""
    commit = loop.commit

    def stop_at_two(run, *arguments):
        commit(run, *arguments)
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "commit", stop_at_two)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = groupwise.rl(config(tmp_path), TOY)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.exit_code, result.summary["state"]) == (130, "interrupted")
    assert 2 <= result.summary["steps"] < STEPS
    assert groupwise.evaluate(config(tmp_path), TOY, policy="toy").policy.startswith("toy@")


def test_a_dry_run_refuses_what_the_start_would_refuse(tmp_path):
    with RunFolder.create(tmp_path, "toy", {}, {"kind": "rl"}) as run:
        assert refused_alike(tmp_path)[0] is RunInUseError
        run.finish("interrupted")
    assert "holds an unfinished run" in refused_alike(tmp_path)[1]
    (tmp_path / "file").write_text("")
    assert "file" in refused_alike(tmp_path / "file")[1]


def refused_alike(runs: Path) -> tuple[type[Exception], str]:
    """How a dry run is refused, which writes nothing, and the run in the same words."""
    before = contents(runs)
    refused = [refusal(runs, dry_run) for dry_run in (True, False)]
    assert refused[0] == refused[1]
    assert contents(runs) == before
    return refused[0]


def contents(folder: Path) -> dict[str, bytes]:
    """All files; the two that SQLite keeps beside a record come and go with whoever reads it."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if not path.name.endswith(("-wal", "-shm"))
    }


def refusal(runs: Path, dry_run: bool) -> tuple[type[Exception], str]:
    with pytest.raises(UsageError) as refused:
        groupwise.rl(config(runs), TOY, dry_run=dry_run)
    return refused.type, str(refused.value)
