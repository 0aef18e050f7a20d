"""Advice for names of other packages: it is true, and users who write the name get it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from groupwise.core.errors import ConfigError
from groupwise.tasks.rewards.registry import registered_rewards
from groupwise.training.callbacks.registry import BUILTIN, builtin
from groupwise.training.config import load_config
from groupwise.training.foreign_keys import foreign_to_rl, foreign_to_sft
from groupwise.training.sft_config import load_sft_config


def said_of(path: str, load: Callable[[Mapping[str, Any]], Any] = load_config) -> str:
    *above, key = path.split(".")
    config: dict[str, Any] = {key: 1}
    for section in reversed(above):
        config = {section: config}
    with pytest.raises(ConfigError) as caught:
        load({"model": {"name": "tiny"}, **config})
    return str(caught.value)


@pytest.mark.parametrize(("name", "said"), [
    ("dataset_train_split", "here it is data.dataset_split"), ("temp_start", "here it is sampler.temperature_schedule.start"),
    ("replay", "data.replay"), ("data.replay.warmup", "here it is data.replay.warmup_entries"), ("num_gpus", "run.processes"),
    ("push_to_hub_revision", "the callback push_to_hub_revision uploads each checkpoint"), ("evaluation.eval_steps", "the section eval"),
    ("training.early_stopping_patience", "`patience` of the callback early_stop"), ("wandb_run_group", "here it is run.wandb_group"),
    ("benchmarks", "the callback benchmark_on_checkpoint takes them"), ("actor.ppo_micro_batch_size_per_gpu", "actor is not a key"),
    ("training.ppo_micro_batch_size_per_gpu", "training.max_tokens_per_microbatch"), ("code_provider", "the reward python_tests"),
    ("model.init_adapter_repo", "model.adapter"), ("training.top_p", "the whole distribution"), ("eval_on_start", "eval.before_and_after"),
    ("vllm_gpu_memory_utilization", "sampler.gpu_memory_utilization"), ("training.per_device_batch_size", "training.prompts_per_step"),
    ("scale_rewards", "mean algorithm.scale_rewards?"), ("loss_type", "algorithm.type"), ("lora.bias", "null for the section lora"),
    ("lora.task_type", "leave it out"), ("model.attn_implementation", "chosen automatically"), ("vllm.url", "sampler.engine names"),
    ("model.enable_thinking", "model.chat_template_kwargs"), ("peft.r", "the section lora"), ("actor_rollout_ref.actor", "section of verl"),
    ("stop_strings", "here it is sampler.stop"), ("warmup", "the section warm_up"), ("trainer.total_epochs", "section of verl"),
])  # fmt: skip
def test_a_name_from_elsewhere_leads_to_what_it_is_here(name: str, said: str) -> None:
    assert said in said_of(name)


@pytest.mark.parametrize("section", ["", "model.", "lora.", "data.", "training.", "algorithm.", "sampler.", "eval.", "run."])  # fmt: skip
def test_an_unknown_key_gets_at_most_three_suggestions(section: str) -> None:
    assert (
        len(said_of(f"{section}qqq").partition("nearest are ")[2].partition("\n")[0].split(", "))
        == 3
    )


@pytest.mark.parametrize(("name", "said"), [
    ("early_stopping_patience", "did you mean eval.early_stopping_patience?"), ("replay_buffer", "it belongs to `groupwise rl`"),
    ("training.eval_on_start", "did you mean eval.eval_on_start?"), ("dataset_train_split", "here it is data.dataset_split"),
    ("num_gpus", "run.processes"), ("trainer.x", "section of verl"),
])  # fmt: skip
def test_a_supervised_run_is_told_what_it_has(name: str, said: str) -> None:
    assert said in said_of(name, load_sft_config)


def test_parameters_of_rewards_and_callbacks_are_there() -> None:
    kinds: dict[str, Mapping[str, Any]] = {
        "reward": registered_rewards(),
        "callback": {name: builtin(name) for name in BUILTIN},
    }
    found = 0
    for advice in {
        each.advice for keys in (foreign_to_rl(), foreign_to_sft()) for each in keys.values()
    }:
        for parameter, kind, name in re.findall(r"`(\w+)` of the (reward|callback) (\w+)", advice):
            assert parameter in inspect.signature(kinds[kind][name]).parameters, advice
            found += 1
    assert found > 9
