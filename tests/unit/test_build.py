"""Scorers from configs: what a worker makes of a task, with real workers."""

import os
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from groupwise import build
from groupwise.config import RunConfig, load_config
from groupwise.rewards.inprocess import InProcessScorer
from groupwise.rewards.scoring import ScoreRequest
from groupwise.rewards.workers import RewardWorkers
from groupwise.tasks.contract import Task, load_task

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
