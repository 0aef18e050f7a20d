"""Scorers from configs: what a worker makes of a task, with real workers."""

from pathlib import Path

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.request import ScoreRequest
from groupwise.core.types import Example, RewardPart
from groupwise.tasks.contract import Task, check_reward_columns, load_task
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.workers import RewardWorkers
from groupwise.training import rollout_builder
from groupwise.training.config import RunConfig, load_config
from tests.scripted import ScriptedSampler, ask_for

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
    rewarded = rollout_builder.with_configured_rewards(config, task)
    assert rollout_builder.with_configured_rewards(config_of(), task) is task
    rubric = rollout_builder.task_rubric(config, rewarded, None)
    assert rubric is not None
    assert (rubric.names, rubric.weights) == (("x/named",), (2.0,))
    with pytest.raises(TaskError, match=r"rewards\.router, x: `named` .*`hint`"):
        check_reward_columns(rewarded, rubric, rewarded.rl_examples(config))
    scorer = rollout_builder.build_scorer(config, rewarded, None, rubric)
    assert isinstance(scorer, RewardWorkers)
    asked = ScoreRequest(0, ["p"] * 2, ["a", "abc"], [[1]] * 2, {"hint": [1, 2]}, 0, 1)
    score = await scorer.score(asked)
    await scorer.close()
    assert [member.reward for member in score.members] == [2.0, 6.0]
    assert score.members[0].parts == (RewardPart("x/named", 1.0, 2.0),)


ROUTED = """
from groupwise.tasks.rewards.router import Router

def f(completions, **columns):
    return [1.0] * len(completions)

def get_reward_funcs(config, tokenizer):
    return Router.of({"a": f, "b": f})
"""


def test_environment_names_the_default_label_of_whatever_routes(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_TASK", "b")
    loaded = load_config({"model": {"name": "tiny"}})
    rubric = rollout_builder.task_rubric(loaded.config, task_of(tmp_path, ROUTED), None)
    assert isinstance(rubric, Router)
    assert rubric.default == "b"
    kept = rollout_builder.with_default_label(loaded, rubric)
    assert kept.config.rewards.default_task == "b"
    monkeypatch.delenv("GROUPWISE_TASK")
    again = rollout_builder.task_rubric(kept.config, task_of(tmp_path, ROUTED), None)
    assert isinstance(again, Router)
    assert again.default == "b"
    monkeypatch.setenv("GROUPWISE_TASK", "b")
    plain = rollout_builder.task_rubric(loaded.config, task_of(tmp_path, OWN_AND_NAMED), None)
    assert rollout_builder.with_default_label(loaded, plain) is loaded


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
    tokenizer = rollout_builder.LazyTokenizer(config)
    kind = rollout_builder.build_rollouts(
        config, task_of(tmp_path, ENVIRONMENT), tokenizer, room=40
    )
    sampler = ScriptedSampler(tokenizer, lambda seed, seen: "b" if "no" in seen else "a")
    ask = ask_for(tokenizer, "p", tokenizer("p")["input_ids"], members=2, max_tokens=1, word="no")
    group = await kind.sample(sampler, ask)
    await kind.close()
    assert [each.completion for each in group.rollouts] == ["anobno"] * 2
    assert [len(each.parts) for each in group.rollouts] == [2, 2]


def test_task_and_type_of_rollout_must_go_together(tmp_path):
    playing = task_of(tmp_path, ENVIRONMENT)
    with pytest.raises(TaskError, match=r"get_environment, .* is single"):
        rollout_builder.check_rollouts(rollouts_of(), playing, ())
    with pytest.raises(TaskError, match="has no get_environment"):
        rollout_builder.check_rollouts(
            rollouts_of(type="environment"), task_of(tmp_path, METRICS_ONLY), ()
        )
    stuck = [Example(0, "p", {"word": "a", "hook": lambda: 1})]
    with pytest.raises(TaskError, match="column `hook`"):
        rollout_builder.check_rollouts(rollouts_of(type="environment"), playing, stuck)
