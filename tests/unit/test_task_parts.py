"""Scorers from configs: what a worker makes of a task, with real workers."""

import os
from pathlib import Path

import pytest

from groupwise import task_parts
from groupwise.config import RunConfig, load_config
from groupwise.errors import TaskError
from groupwise.rewards.router import Router
from groupwise.rewards.scoring import ScoreRequest
from groupwise.rewards.workers import RewardWorkers
from groupwise.tasks.contract import Task, check_reward_columns, load_task
from groupwise.types import Example, RewardPart
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


@pytest.mark.soak(suite="tasks")
async def test_reward_uses_the_tokenizer_and_then_a_model(tmp_path):
    log = tmp_path / "log"
    config = load_config({"model": {"name": "tiny"}, "task": {"log": str(log)}}).config
    task = task_of(tmp_path, REWARDS)
    rubric = task_parts.task_rubric(config, task, None)
    scorer = task_parts.build_scorer(config, task, None, rubric)
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


OWN_AND_NAMED = """
def get_rl_dataset(config):
    return [{"prompt": "a"}]

def own(completions, **columns):
    return [0.0] * len(completions)

def named(completions, hint, **columns):
    return [float(len(text)) for text in completions]

def get_reward_funcs(config, tokenizer):
    return [own]
"""


async def test_the_config_names_rewards_instead_of_the_task(tmp_path):
    task = task_of(tmp_path, OWN_AND_NAMED)
    entry = {"name": f"{tmp_path}/task.py:named", "weight": 2.0}
    config = config_of(router={"x": [entry]}, default_task="x")
    rewarded = task_parts.rewarded(config, task)
    assert task_parts.rewarded(config_of(), task) is task
    rubric = task_parts.task_rubric(config, rewarded, None)
    assert rubric is not None
    assert (rubric.names, rubric.weights) == (("x/named",), (2.0,))
    with pytest.raises(TaskError, match=r"rewards\.router, x: `named` asks for `hint`"):
        check_reward_columns(rewarded, rubric, rewarded.rl_examples(config))
    scorer = task_parts.build_scorer(config, rewarded, None, rubric)
    assert isinstance(scorer, RewardWorkers)
    asked = ScoreRequest(0, ["p"] * 2, ["a", "abc"], [[1]] * 2, {"hint": [1, 2]}, 0, 1)
    score = await scorer.score(asked)
    await scorer.close()
    assert [member.reward for member in score.members] == [2.0, 6.0]
    assert score.members[0].parts == (RewardPart("x/named", 1.0, 2.0),)


ROUTED = """
from groupwise.rewards.router import Router

def f(completions, **columns):
    return [1.0] * len(completions)

def get_reward_funcs(config, tokenizer):
    return Router.of({"a": f, "b": f})
"""


def test_environment_names_the_default_label_of_whatever_routes(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_TASK", "b")
    loaded = load_config({"model": {"name": "tiny"}})
    rubric = task_parts.task_rubric(loaded.config, task_of(tmp_path, ROUTED), None)
    assert isinstance(rubric, Router)
    assert rubric.default == "b"
    kept = task_parts.with_default_label(loaded, rubric)
    assert kept.config.rewards.default_task == "b"
    monkeypatch.delenv("GROUPWISE_TASK")
    again = task_parts.task_rubric(kept.config, task_of(tmp_path, ROUTED), None)
    assert isinstance(again, Router)
    assert again.default == "b"
    monkeypatch.setenv("GROUPWISE_TASK", "b")
    plain = task_parts.task_rubric(loaded.config, task_of(tmp_path, OWN_AND_NAMED), None)
    assert task_parts.with_default_label(loaded, plain) is loaded


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


async def test_environment_of_a_task_file_answers_from_its_worker(tmp_path):
    config = rollouts_of(type="environment")
    tokenizer = task_parts.LazyTokenizer(config)
    kind = task_parts.build_rollouts(config, task_of(tmp_path, ENVIRONMENT), tokenizer, room=40)
    sampler = ScriptedSampler(tokenizer, lambda seed, seen: "b" if "no" in seen else "a")
    ask = ask_for(tokenizer, "p", tokenizer("p")["input_ids"], members=2, max_tokens=1, word="no")
    group = await kind.sample(sampler, ask)
    await kind.close()
    assert [each.completion for each in group.rollouts] == ["anobno"] * 2
    assert [len(each.parts) for each in group.rollouts] == [2, 2]


def test_task_and_type_of_rollout_must_go_together(tmp_path):
    playing = task_of(tmp_path, ENVIRONMENT)
    with pytest.raises(TaskError, match=r"has get_environment, but rollout\.type is single"):
        task_parts.check_rollouts(rollouts_of(), playing, ())
    with pytest.raises(TaskError, match="has no get_environment"):
        task_parts.check_rollouts(
            rollouts_of(type="environment"), task_of(tmp_path, METRICS_ONLY), ()
        )
    stuck = [Example(0, "p", {"word": "a", "hook": lambda: 1})]
    with pytest.raises(TaskError, match="column `hook` holds values"):
        task_parts.check_rollouts(rollouts_of(type="environment"), playing, stuck)


def test_whole_rollouts_have_room():
    assert task_parts.longest_completion(rollouts_of()) == 256
    assert task_parts.longest_completion(rollouts_of(type="environment", max_turns=3)) == 3 * (
        2 * 256 + 16
    )
    assert task_parts.longest_written(rollouts_of(type="environment", max_turns=3)) == 3 * 256
    limited = rollouts_of(type="environment", max_turns=3, max_rollout_length=500)
    assert task_parts.longest_completion(limited) == task_parts.longest_written(limited) == 500
