"""Scorers from configs: what a worker makes of a task, with real workers."""

import os
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from groupwise import build
from groupwise.config import RunConfig, load_config
from groupwise.errors import ConfigError, TaskError
from groupwise.rewards.inprocess import InProcessScorer
from groupwise.rewards.scoring import ScoreRequest
from groupwise.rewards.workers import RewardWorkers
from groupwise.rollouts.environment import EnvironmentRollouts
from groupwise.rollouts.hosts import LocalHost, WorkerHost
from groupwise.rollouts.single import Single
from groupwise.rollouts.two_stage import TwoStage
from groupwise.sft_config import load_sft_config
from groupwise.tasks.contract import Task, load_task
from groupwise.types import Example
from tests.scripted import ScriptedSampler, ask_for

REWARDS = """
import os
import sys

def get_reward_funcs(config, tokenizer):
    with open(config["task"]["log"], "a") as log:
        log.write(f"{os.getpid()}\\n")

    def before(completions, log_extra, **kwargs):
        log_extra("torch", ["torch" in sys.modules] * len(completions))
        return [0.0] * len(completions)

    def counts_tokens(completions, **kwargs):
        return [float(len(tokenizer(text)["input_ids"])) for text in completions]

    def asks_a_model(completions, **kwargs):
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

        assert isinstance(tokenizer, PreTrainedTokenizerBase)
        model = AutoModelForCausalLM.from_pretrained(tokenizer.name_or_path)
        ids = tokenizer(completions, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return [float(logits.shape[0]) for logits in model(ids).logits]

    return [before, counts_tokens, asks_a_model]
"""
METRICS_ONLY = """
def get_eval_dataset(config):
    return [{"prompt": "a"}]

def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    return {"n": len(prompts), "tokens": len(tokenizer("abc")["input_ids"])}
"""


def config_of(**rewards: object) -> RunConfig:
    return load_config({"model": {"name": "tiny"}, "rewards": rewards}).config


def task_of(folder: Path, text: str) -> Task:
    (folder / "task.py").write_text(text)
    return load_task(folder / "task.py")


async def test_reward_uses_the_tokenizer_and_then_a_model(tmp_path):
    log = tmp_path / "log"
    config = load_config({"model": {"name": "tiny"}, "task": {"log": str(log)}}).config
    task = task_of(tmp_path, REWARDS)
    rubric = build.task_rubric(config, task, None)
    scorer = build.build_scorer(config, task, None, rubric)
    asked = ScoreRequest(0, ["p"] * 2, ["four", "five"], [[1]] * 2, {}, 0, 1)
    first = await scorer.score(asked)
    second = await scorer.score(asked)
    await scorer.close()
    assert [member.reason for member in (*first.members, *second.members)] == [None] * 4
    assert [part.value for part in second.members[0].parts] == [0.0, 4.0, 4.0]
    assert first.members[0].notes == {"torch": False}  # most rewards never ask for the tokenizer
    processes = log.read_text().split()
    assert processes[0] == str(os.getpid())
    assert len(set(processes)) == len(processes) == 2  # once in each process: it may load a model


@pytest.mark.parametrize(("in_process", "kind"), [(True, InProcessScorer), (False, RewardWorkers)])
async def test_task_without_rewards_still_has_metrics(tmp_path, in_process, kind):
    config, task = config_of(in_process=in_process), task_of(tmp_path, METRICS_ONLY)
    tokenizer = build.LazyTokenizer(config)
    assert build.task_rubric(config, task, tokenizer) is None
    scorer = build.build_scorer(config, task, tokenizer)
    assert type(scorer) is kind
    assert await scorer.compute_metrics(["a"], ["b"], [{}]) == {"n": 1, "tokens": 3}
    await scorer.close()


def test_where_rewards_run(tmp_path):
    def rubric_of(text: str):
        task = task_of(tmp_path, f"def f(completions): ...\n{text}")
        return task, build.task_rubric(config_of(), task, None)

    hook = "def get_reward_funcs(config, tokenizer):\n    return [f]\n"
    assert build.scores_in_workers(config_of(), *rubric_of(hook))
    assert not build.scores_in_workers(config_of(in_process=True), *rubric_of(hook))
    assert not build.scores_in_workers(config_of(), *rubric_of(f"f.stateful = True\n{hook}"))
    assert not build.scores_in_workers(config_of(), load_task(object()), None)


def test_limits_reach_the_workers(tmp_path):
    config = config_of(start_limit=5.0, time_limit=3.0)
    scorer = build.build_scorer(config, task_of(tmp_path, METRICS_ONLY), None)
    assert vars(vars(scorer)["_pool"])["_start_limit"] == 5.0
    assert vars(scorer)["_time_limit"] == 3.0


def test_lazy_tokenizer_passes_for_the_tokenizer():
    tokenizer = build.LazyTokenizer(config_of())
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    tokenizer.padding_side = "left"
    assert tokenizer(["a", "abc"], padding=True)["attention_mask"] == [[0, 0, 1], [1, 1, 1]]
    assert len(tokenizer) == tokenizer.vocab_size


ENVIRONMENT = """
from groupwise.tasks.environment import Step

class Echo:
    def reset(self, word):
        self.word = word

    def step(self, completion):
        return Step(self.word, done=completion == "b", reward=0.5)

def get_environment(config):
    return Echo
"""


def rollouts_of(**rollout: object) -> RunConfig:
    return load_config({"model": {"name": "tiny"}, "rollout": rollout}).config


def test_each_type_of_rollout_is_built(tmp_path):
    plain = task_of(tmp_path, METRICS_ONLY)
    assert type(build.build_rollouts(rollouts_of(), plain, None)) is Single
    assert type(build.build_rollouts(rollouts_of(type="two_stage"), plain, None)) is TwoStage
    playing = task_of(tmp_path, ENVIRONMENT)
    for in_process, host in ((False, WorkerHost), (True, LocalHost)):
        config = rollouts_of(type="environment", in_process=in_process)
        kind = build.build_rollouts(config, playing, None)
        assert type(kind) is EnvironmentRollouts
        assert type(vars(kind)["_host"]) is host


async def test_environment_of_a_task_file_answers_from_its_worker(tmp_path):
    config = rollouts_of(type="environment")
    tokenizer = build.LazyTokenizer(config)
    kind = build.build_rollouts(config, task_of(tmp_path, ENVIRONMENT), tokenizer, room=40)
    sampler = ScriptedSampler(tokenizer, lambda seed, seen: "b" if "no" in seen else "a")
    ask = ask_for(tokenizer, "p", tokenizer("p")["input_ids"], members=2, max_tokens=1, word="no")
    group = await kind.sample(sampler, ask)
    await kind.close()
    assert [each.completion for each in group.rollouts] == ["anobno"] * 2
    assert [len(each.parts) for each in group.rollouts] == [2, 2]


def test_task_and_type_of_rollout_must_go_together(tmp_path):
    playing = task_of(tmp_path, ENVIRONMENT)
    with pytest.raises(TaskError, match=r"has get_environment, but rollout\.type is single"):
        build.check_rollouts(rollouts_of(), playing, ())
    with pytest.raises(TaskError, match="has no get_environment"):
        build.check_rollouts(rollouts_of(type="environment"), task_of(tmp_path, METRICS_ONLY), ())
    stuck = [Example(0, "p", {"word": "a", "hook": lambda: 1})]
    with pytest.raises(TaskError, match="column `hook` holds values"):
        build.check_rollouts(rollouts_of(type="environment"), playing, stuck)


def test_whole_rollouts_have_room():
    assert build.longest_completion(rollouts_of()) == 256
    assert build.longest_completion(rollouts_of(type="environment", max_turns=3)) == 3 * (
        2 * 256 + 16
    )
    assert build.longest_written(rollouts_of(type="environment", max_turns=3)) == 3 * 256
    limited = rollouts_of(type="environment", max_turns=3, max_rollout_length=500)
    assert build.longest_completion(limited) == build.longest_written(limited) == 500
    assert build.choose_layout(limited, longest_prompt=12).key_length == 512


# --- how many processes ---------------------------------------------------------------------------


def processes(monkeypatch, *, cores=4, size=10**9, device="cpu", **sections) -> int:
    """How many are chosen on such a machine, for a model of that size."""
    monkeypatch.setattr(build, "_cores", lambda: cores)
    monkeypatch.setattr("groupwise.models.plan.count_parameters", lambda _: size)
    monkeypatch.setattr("groupwise.models.machine.choose_device", lambda: device)
    monkeypatch.setattr("groupwise.models.machine.describe_processor", lambda device: device)
    monkeypatch.setattr("groupwise.models.load.has_bfloat16", lambda device: False)
    config = load_config({"model": {"name": "tiny"}, **sections}).config
    return build.choose_layout(config, longest_prompt=12).processes


def test_one_process_for_each_core_that_has_enough_to_do(monkeypatch):
    step = {"prompts_per_step": 4, "num_generations": 8}
    assert processes(monkeypatch, cores=2, training=step) == 2
    assert processes(monkeypatch, cores=4, training=step) == 4
    assert processes(monkeypatch, cores=64, training=step) == 4
    assert processes(monkeypatch, cores=64, run={"threads": 3}, training=step) == 3
    huge = {"prompts_per_step": 64, "num_generations": 16}
    assert processes(monkeypatch, cores=64, training=huge) == build.MAX_PROCESSES


def test_one_process_where_several_would_not_pay(monkeypatch):
    assert processes(monkeypatch, cores=1) == 1
    assert processes(monkeypatch, run={"threads": 1}) == 1
    assert processes(monkeypatch, size=build.SMALL_MODEL - 1) == 1
    assert processes(monkeypatch, size=build.SMALL_MODEL) > 1
    assert processes(monkeypatch, lora=None) == 1
    assert processes(monkeypatch, device="cuda") == 1
    small = {"prompts_per_step": 2, "num_generations": 4}
    assert processes(monkeypatch, training=small) == 1
    monkeypatch.setattr("sys.platform", "darwin")
    assert processes(monkeypatch) == 1


def test_what_is_asked_for_is_had_or_refused(monkeypatch):
    for count in (1, 3):
        assert processes(monkeypatch, cores=1, size=1, lora=None, run={"processes": count}) == count
    with pytest.raises(ConfigError, match=r"run\.processes is 3(.|\n)*on cuda"):
        processes(monkeypatch, device="cuda", run={"processes": 3})
    assert processes(monkeypatch, device="cuda", run={"processes": 1}) == 1
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match="darwin"):
        processes(monkeypatch, run={"processes": 2})


def test_threads_and_slots_are_divided(monkeypatch):
    monkeypatch.setattr(build, "_cores", lambda: 5)
    settings = {"training": {"prompts_per_step": 4, "num_generations": 8}, "run": {"processes": 2}}
    layout = build.choose_layout(load_config({"model": {"name": "tiny"}, **settings}).config, 12)
    assert (layout.threads, layout.threads_each) == (5, 2)
    assert (layout.slots, layout.all_slots) == (16, 32)


def test_supervised_runs_have_processes_by_examples(monkeypatch):
    monkeypatch.setattr(build, "_cores", lambda: 4)
    monkeypatch.setattr("groupwise.models.plan.count_parameters", lambda _: 10**9)
    for examples, expected in ((1, 1), (4, 2), (16, 4)):
        given = {"model": {"name": "tiny"}, "training": {"examples_per_step": examples}}
        layout = build.supervised_layout(load_sft_config(given).config)
        assert layout.processes == expected


def test_a_zygote_is_begun_early_only_where_it_will_be_needed(monkeypatch):
    begun = []
    monkeypatch.setattr(build, "_begin_ranks", lambda: begun.append(True) or Begun())
    monkeypatch.setattr(build, "_begun", [])
    monkeypatch.setattr(build, "_cores", lambda: 2)

    class Begun:
        def close(self):
            begun.clear()

    def expected(**sections) -> bool:
        build.expect_ranks(load_config(sections).config)
        found = bool(begun)
        build._without_ranks()
        assert not begun
        return found

    large = {"name": "some/model"}
    assert expected(model=large) == (not Path("/dev/nvidiactl").exists())
    assert not expected(model={"name": "tiny"})
    assert not expected(model=large, run={"processes": 1})
    assert not expected(model=large, run={"threads": 1})
    assert not expected(model=large, lora=None)
