"""What `groupwise.rl` refuses, remembers and leaves behind, seen from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import groupwise
from groupwise import machine_layout
from groupwise.errors import ResumeMismatchError, RunInUseError, RunNotFoundError, UsageError
from groupwise.loops import recording
from groupwise.loops import rl as loop
from groupwise.runs.folder import RunFolder, read_config
from groupwise.runs.store import Store
from tests.integration.running import STEPS, TOY, config


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "ways",
    [
        {"resume": True, "resume_from": "r@1"},
        {"resume": True, "init_from": "r@1"},
        {"resume_from": "r@1", "init_from": "r@1"},
    ],
)
def test_a_run_starts_in_one_way(tmp_path, ways):
    with pytest.raises(UsageError, match=r"exclude each other: --resume(-from)? goes on with the "):
        groupwise.rl(config(tmp_path), TOY, **ways)


def test_a_finished_run_leaves_everything_in_its_folder(tmp_path):
    result = groupwise.rl(config(tmp_path), TOY)
    folder = result.folder
    assert {path.name for path in folder.iterdir()} >= {
        "config.json",
        "run.db",
        "summary.json",
        "checkpoints",
        "final",
        "tokenizer",
        "results",
        "reward.svg",
        "log.txt",
    }
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
        "reward",
        "reward_std",
        "rewards/share/mean",
        "frac_reward_zero_std",
        "loss",
        "entropy",
        "grad_norm",
        "learning_rate",
        "completions/mean_length",
        "completions/clipped_ratio",
        "clip_ratio/region_mean",
        "sampling/logprob_gap",
        "num_tokens",
        "rollouts/scored",
        "time/step",
    }


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_final_adapter_gives_the_same_logits_in_peft(tmp_path):
    """Reloaded by peft from the folder, tokenizer included, it computes what the run's policy computes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from groupwise.models.bundled import tiny_folder
    from groupwise.models.lora import AdaptedModel, read_adapter, read_lora_config

    final = groupwise.rl(config(tmp_path), TOY).folder / "final"
    ids = AutoTokenizer.from_pretrained(final)("write a1:", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(tiny_folder())
    with torch.no_grad():
        plain = base(ids).logits
        theirs = PeftModel.from_pretrained(base, str(final)).eval()(ids).logits
        ours = AdaptedModel(
            AutoModelForCausalLM.from_pretrained(tiny_folder()), read_lora_config(final)
        )
        ours.add("final", trainable=False, seed=0)
        ours.write("final", read_adapter(final), "final")
        with ours.using("final") as model:
            mine = model(ids).logits
    assert torch.allclose(mine, theirs, atol=1e-6)
    assert not torch.allclose(plain, theirs, atol=1e-4), "the adapter has learnt something"


def test_full_fine_tuning_leaves_a_whole_model(tmp_path):
    from transformers import AutoModelForCausalLM

    settings = {**config(tmp_path, learning_rate=1e-3), "lora": None}
    result = groupwise.rl(settings, TOY)
    reloaded = AutoModelForCausalLM.from_pretrained(result.folder / "final")
    evaluated = groupwise.evaluate(settings, TOY, policy="toy")
    assert sum(parameter.numel() for parameter in reloaded.parameters()) > 6000
    assert evaluated.metrics == result.after.metrics


def test_kl_to_the_reference_is_computed_and_counts(tmp_path):
    settings = {**config(tmp_path), "algorithm": {"type": "grpo", "beta": 0.5}}
    result = groupwise.rl(settings, TOY)
    with Store.open(result.folder / "run.db", readonly=True) as store:
        kl = [value for _, value in store.metrics(["kl"])["kl"]]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 0


def test_init_from_takes_the_weights_only(tmp_path):
    first = groupwise.rl(config(tmp_path), TOY)
    settings = config(tmp_path)
    settings["run"]["name"] = "second"
    second = groupwise.rl(settings, TOY, init_from="toy@4")
    with Store.open(second.folder / "run.db", readonly=True) as store:
        assert store.steps()[0].version_in == 0
        start = store.evaluations()[0]
    checkpoint = groupwise.evaluate(config(tmp_path), TOY, policy="toy@4")
    assert [row["completion"] for row in start.rows] == [
        row["completion"] for row in checkpoint.rows
    ]
    kept = second.folder.resolve() / "start"
    assert read_config(second.folder)["model"]["adapter"] == str(kept)
    assert {path.name for path in kept.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert first.folder != second.folder


def test_resume_refuses_another_config_and_shows_the_difference(tmp_path, monkeypatch):
    interrupt(monkeypatch, tmp_path)
    with pytest.raises(ResumeMismatchError) as refused:
        groupwise.rl(config(tmp_path, learning_rate=0.5, num_generations=6), TOY, resume=True)
    assert "training.learning_rate: 0.01 then, 0.5 now" in str(refused.value)
    assert "training.num_generations: 4 then, 6 now" in str(refused.value)


def test_resume_refuses_another_task_and_other_data(tmp_path, monkeypatch):
    interrupt(monkeypatch, tmp_path)
    source = Path(TOY).read_text()
    (tmp_path / "other_task.py").write_text(source)
    with pytest.raises(
        ResumeMismatchError, match='--task-module: "toy_task" then, "other_task" now'
    ):
        groupwise.rl(config(tmp_path), str(tmp_path / "other_task.py"), resume=True)
    (tmp_path / "toy_task.py").write_text(source.replace("seed=0", "seed=5"))
    with pytest.raises(ResumeMismatchError, match="training data"):
        groupwise.rl(config(tmp_path), str(tmp_path / "toy_task.py"), resume=True)
    (tmp_path / "toy_task.py").write_text(source)
    assert groupwise.rl(config(tmp_path), str(tmp_path / "toy_task.py"), resume=True).exit_code == 0


def test_more_threads_than_cores_are_warned_about(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(machine_layout, "available_cores", lambda: 1)
    monkeypatch.setattr("groupwise.models.machine.set_threads", lambda threads: None)
    settings = config(tmp_path, max_steps=1)
    settings["run"]["threads"] = 2
    said = "2 threads of 1 process compute on 1 core:"
    plan = groupwise.rl(settings, TOY, dry_run=True).summary["plan"]
    (warning,) = [each for each in plan["warnings"] if said in each]
    assert groupwise.rl(settings, TOY).exit_code == 0
    assert [each.getMessage() for each in caplog.records].count(warning) == 1


def test_another_layout_is_warned_about(tmp_path, monkeypatch, caplog):
    interrupt(monkeypatch, tmp_path)
    settings = config(tmp_path)
    settings["sampler"]["slots"] = 16
    change = "resumed with another layout: sampler.slots was 8, is 16; results agree up to rounding"
    plan = groupwise.rl(settings, TOY, resume=True, dry_run=True).summary["plan"]
    assert change in plan["warnings"]
    assert groupwise.rl(settings, TOY, resume=True).exit_code == 0
    warned = [each.getMessage() for each in caplog.records if "layout" in each.getMessage()]
    assert warned == [change]


def test_a_longer_run_is_evaluated_anew(tmp_path):
    groupwise.rl(config(tmp_path), TOY)
    longer = groupwise.rl(config(tmp_path, max_steps=STEPS + 2), TOY, resume_from="toy@5")
    with Store.open(longer.folder / "run.db", readonly=True) as store:
        assert [(found.name, found.step) for found in store.evaluations()] == [
            ("before", 0),
            ("step-3", 3),
            ("after", 5),
            ("step-6", 6),
            ("after", 7),
        ]
    assert longer.after.policy == "toy@7"


def test_a_fully_trained_checkpoint_can_be_started_from(tmp_path):
    settings = {**config(tmp_path), "lora": None}
    groupwise.rl(settings, TOY)
    settings["run"]["name"] = "second"
    assert groupwise.rl(settings, TOY, init_from="toy@4").exit_code == 0


def test_resume_takes_free_keys_and_remembers_them(tmp_path, monkeypatch):
    interrupt(monkeypatch, tmp_path)
    settings = config(tmp_path)
    settings["run"]["save_total_limit"] = None
    assert groupwise.rl(settings, TOY, resume=True).exit_code == 0
    assert read_config(tmp_path / "toy")["run"]["save_total_limit"] is None
    with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
        assert list(store.resumes()[0].changes) == ["run.save_total_limit"]


def test_an_unfinished_run_is_not_overwritten(tmp_path, monkeypatch):
    interrupt(monkeypatch, tmp_path)
    with pytest.raises(UsageError, match="--resume") as refused:
        groupwise.rl(config(tmp_path), TOY)
    assert "run.name" in str(refused.value)


def test_a_live_run_is_not_disturbed(tmp_path, monkeypatch):
    interrupt(monkeypatch, tmp_path)
    with RunFolder.open(tmp_path / "toy"):
        for resume in (True, False):
            with pytest.raises(RunInUseError, match="process"):
                groupwise.rl(config(tmp_path), TOY, resume=resume)


@pytest.mark.parametrize("ends", ["interrupted", "failed"])
def test_a_dry_run_refuses_what_the_start_would_refuse(tmp_path, ends):
    with RunFolder.create(tmp_path, "toy", {}, {"kind": "rl"}) as run:
        before = contents(tmp_path)
        refused = [refusal(tmp_path, dry_run) for dry_run in (True, False)]
        assert refused[0] == refused[1]
        assert refused[0][0] is RunInUseError
        assert contents(tmp_path) == before
        run.finish(ends)
    before = contents(tmp_path)
    refused = [refusal(tmp_path, dry_run) for dry_run in (True, False)]
    assert refused[0] == refused[1]
    assert "holds an unfinished run" in refused[0][1]
    assert contents(tmp_path) == before


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


def test_a_dry_run_names_the_folder_that_the_run_would_get(tmp_path):
    RunFolder.create(tmp_path, "toy", {}, {"kind": "rl"})._let_go()
    assert refusal(tmp_path, True)[0] is UsageError
    with RunFolder.open(tmp_path / "toy") as run:
        run.finish("finished")
    assert groupwise.rl(config(tmp_path), TOY, dry_run=True).folder == tmp_path / "toy-2"
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_dry_run_of_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    told = [refusal(tmp_path / "file", dry_run) for dry_run in (True, False)]
    assert told[0] == told[1]
    assert "it is a file" in told[0][1]


def test_a_finished_run_keeps_its_name(tmp_path):
    assert groupwise.rl(config(tmp_path), TOY).summary["run"] == "toy"
    assert groupwise.rl(config(tmp_path), TOY).summary["run"] == "toy-2"
    with pytest.raises(RunNotFoundError, match="finished"):
        groupwise.rl(config(tmp_path), TOY, resume=True)


def test_what_fails_before_the_start_leaves_no_folder(tmp_path):
    """A usage error that only the building of the parts can find must not stand in the way of the next try."""
    settings = {**config(tmp_path), "lora": {"target_modules": ["no_such_layer"]}}
    with pytest.raises(UsageError, match="q_proj"):
        groupwise.rl(settings, TOY)
    assert not (tmp_path / "toy").exists()


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path):
    found = groupwise.rl(config(tmp_path / "runs"), TOY, dry_run=True).summary
    assert found["config"]["training"]["max_steps"] == STEPS
    plan = found["plan"]
    assert plan["parameters"] == 6_832
    assert 0 < plan["parameters_trained"] < plan["parameters"]
    assert plan["completions_per_step"] == 8
    assert plan["first_prompt"].startswith("write ")
    assert plan["memory_mib"]["total"] >= 0
    assert not (tmp_path / "runs").exists()


def test_a_template_that_does_not_ask_for_the_answer_is_warned_of(tmp_path, caplog):
    class Chats:
        get_rl_dataset = staticmethod(
            lambda config: [{"prompt": [{"role": "user", "content": "go"}]}]
        )
        get_reward_funcs = staticmethod(
            lambda config, tokenizer: [lambda completions, **_: [1.0 for _ in completions]]
        )

    template = tmp_path / "silent.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}")
    settings = config(tmp_path, max_steps=1)
    settings["model"]["chat_template"] = str(template)
    settings["eval"] = {}
    (warning,) = groupwise.rl(settings, Chats, dry_run=True).summary["plan"]["warnings"]
    assert "writes 'assistant: ' before an answer, but not at the end of a prompt" in warning
    groupwise.rl(settings, Chats)
    assert [record.message for record in caplog.records].count(warning) == 1


@pytest.mark.parametrize(
    ("cache", "called", "said"),
    [
        (7, "share", r"soft_punish_cache is 7, but the policy may write 6 tokens at most"),
        (None, "overlong", r"called 'overlong', which is the name of the algorithm's own"),
    ],
)
def test_what_an_algorithm_cannot_go_with_is_refused_before_the_start(
    tmp_path, cache, called, said
):
    task = tmp_path / "named.py"
    task.write_text(Path(TOY).read_text().replace("share", called))
    settings = config(tmp_path / "runs")
    settings["algorithm"] = {"type": "dapo", "soft_punish_cache": cache}
    with pytest.raises(UsageError, match=said):
        groupwise.rl(settings, str(task), dry_run=True)
    settings["algorithm"]["soft_punish_cache"] = 0
    groupwise.rl(settings, str(task), dry_run=True)


def test_a_run_with_a_start_of_its_own_is_resumed_by_its_command(tmp_path, monkeypatch):
    groupwise.rl(config(tmp_path), TOY)
    settings = config(tmp_path)
    settings["run"]["name"] = "second"
    whole = groupwise.rl(settings, TOY, init_from="toy@4").summary["fingerprint"]
    settings["run"]["name"] = "third"
    interrupt(monkeypatch, tmp_path, settings, init_from="toy@4")
    shutil.rmtree(tmp_path / "toy")
    resumed = groupwise.rl(settings, TOY, resume=True)
    assert resumed.summary["fingerprint"] == whole


def test_results_measured_otherwise_are_not_compared(tmp_path, monkeypatch):
    interrupt(monkeypatch, tmp_path)
    settings = config(tmp_path)
    settings["eval"]["max_completion_length"] = 3
    result = groupwise.rl(settings, TOY, resume=True)
    assert "held_out" not in result.summary
    assert result.before is None
    assert result.after is not None
    assert "no comparison" in (result.folder / "log.txt").read_text()


def test_fewer_steps_than_done_are_refused(tmp_path):
    groupwise.rl(config(tmp_path), TOY)
    with pytest.raises(ResumeMismatchError, match="4 steps done"):
        groupwise.rl(config(tmp_path, max_steps=2), TOY, resume_from="toy@4")


def test_metrics_that_fail_do_not_cost_the_training(tmp_path):
    task = tmp_path / "toy_task.py"
    source = Path(TOY).read_text()
    task.write_text(
        source.replace(
            "    shares = share(", "    raise RuntimeError('no measure')\n    shares = share("
        )
    )
    result = groupwise.rl(config(tmp_path), str(task))
    assert result.exit_code == 0
    assert (result.folder / "final" / "adapter_model.safetensors").exists()
    assert result.after is not None
    assert (len(result.after.rows), "share" in result.after.metrics) == (3, False)
    assert "reward" in result.summary["held_out"]["after"]
    assert "no measure" in (result.folder / "log.txt").read_text()


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


def test_failures_on_held_out_prompts_are_told(tmp_path):
    task = toy_with(tmp_path, (PAIRS, "    1 / (len(completions) - 1)\n" + PAIRS))
    result = groupwise.rl(config(tmp_path), task)
    assert result.after.metrics["rollouts/failed"] == 3
    assert "3 of 3 could not be scored" in (result.folder / "log.txt").read_text()


def test_logged_metrics_do_not_replace_our_own(tmp_path):
    logging = (
        "    if log_metric:\n        log_metric('reward', 99.0)\n        log_metric('mine', 7.0)\n"
    )
    task = toy_with(
        tmp_path,
        ("wanted, **kwargs):", "wanted, log_metric=None, **kwargs):"),
        (PAIRS, logging + PAIRS),
    )
    result = groupwise.rl(config(tmp_path), task)
    with Store.open(result.folder / "run.db", readonly=True) as store:
        metrics = store.step_metrics(0)
    assert metrics["reward"] < 1
    assert metrics["task/reward"] == 99.0
    assert metrics["mine"] == 7.0


def test_evaluation_steps_need_something_to_evaluate(tmp_path):
    task = tmp_path / "toy_task.py"
    task.write_text(Path(TOY).read_text().replace("def get_eval_dataset", "def not_a_hook"))
    with pytest.raises(UsageError, match=r"eval\.eval_steps"):
        groupwise.rl(config(tmp_path), str(task))


def test_dropped_prompts_are_counted_where_people_look(tmp_path):
    task = tmp_path / "toy_task.py"
    task.write_text(
        Path(TOY).read_text().replace('f"write {', "'long ' * (index % 2) + f\"write {")
    )
    settings = {
        **config(tmp_path),
        "data": {"max_prompt_length": 10},
        "eval": {"before_and_after": False},
    }
    result = groupwise.rl(settings, str(task))
    assert "20 of 40 prompts are longer" in (result.folder / "log.txt").read_text()


def test_a_wide_gap_is_warned_of_once(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_GAP", -1.0)
    result = groupwise.rl(config(tmp_path), TOY)
    assert (result.folder / "log.txt").read_text().count("sampler and learner differ") == 1


def test_a_changed_task_file_is_warned_about(tmp_path, monkeypatch):
    task = tmp_path / "toy_task.py"
    task.write_text(Path(TOY).read_text())
    interrupt(monkeypatch, tmp_path, task=str(task))
    task.write_text(Path(TOY).read_text() + "# another comment\n")
    result = groupwise.rl(config(tmp_path), str(task), resume=True)
    assert result.exit_code == 0


def interrupt(monkeypatch, runs, settings=None, task=TOY, **ways) -> None:
    """Leave an interrupted run with a checkpoint after three steps."""
    original = loop.take_step

    async def stop(run, drawn, begun):
        await original(run, drawn, begun)
        if run.step == 3:
            run.interruption._receive(2, None)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", stop)
        assert groupwise.rl(settings or config(runs), task, **ways).exit_code == 130


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


async def test_it_runs_where_an_event_loop_is_running_already(tmp_path):
    """As in a notebook."""
    assert groupwise.rl(config(tmp_path), TOY).exit_code == 0
    assert groupwise.evaluate(config(tmp_path), TOY, policy="toy").policy == "toy@5"


def test_a_damaged_checkpoint_is_skipped_and_named(uninterrupted_record, tmp_path, monkeypatch):
    """The one before it is taken, and the run ends as if nothing had happened."""
    settings = config(tmp_path)
    interrupt(monkeypatch, tmp_path, settings)
    damaged = tmp_path / "toy" / "checkpoints" / "step-3" / "optimiser.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-7] + b"garbage")
    skipped = "skipped a checkpoint: step-3: optimiser.safetensors was changed since it was written"
    plan = groupwise.rl(settings, TOY, resume=True, dry_run=True).summary["plan"]
    assert skipped in plan["warnings"]
    result = groupwise.rl(settings, TOY, resume=True)
    told = (result.folder / "log.txt").read_text()
    assert skipped in told
    assert "resumed after 2 steps" in told
    with Store.open(result.folder / "run.db", readonly=True) as store:
        assert store.deterministic_dump() == uninterrupted_record


@pytest.fixture(scope="module")
def uninterrupted_record(tmp_path_factory):
    folder = groupwise.rl(config(tmp_path_factory.mktemp("whole")), TOY).folder
    with Store.open(folder / "run.db", readonly=True) as store:
        return store.deterministic_dump()
