"""How a notebook's config translates to the core's config."""

from __future__ import annotations

import pytest

from groupwise.core.errors import ConfigError, RunError
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import by_own_names, core_config, run_folder
from groupwise.runs.notebook_names import HOW_TO_OVERRIDE


def flat(config):
    found = core_config(config).config
    training, knobs = found.training, found.algorithm.knobs
    return {
        "steps": training.max_steps, "prompts": training.prompts_per_step, "group": training.num_generations,
        "passes": training.num_iterations, "rate": (training.learning_rate, training.lr_scheduler_type, training.warmup_ratio),
        "adamw": (training.adam_beta1, training.adam_beta2, training.weight_decay), "clip": training.max_grad_norm,
        "algorithm": (found.algorithm.type, knobs["beta"], knobs["epsilon"]), "lora": (found.lora.r, found.lora.alpha),
        "lengths": (found.data.max_prompt_length, found.sampler.max_completion_length),
        "saving": (found.run.save_steps, found.run.save_total_limit), "run": (found.run.dir, found.run.name), "seed": training.seed,
    }  # fmt: skip


def test_every_field_reaches_the_core():
    other = TrainingConfig(
        num_batches=10, batch_size=3, num_generations=4, num_iterations=2, learning_rate=1e-4, beta=0.0, epsilon=0.1, lora_rank=8,
        lora_alpha=16, max_prompt_length=99, total_generation_steps=77, experiment_name="mine", seed=5,
    )  # fmt: skip
    assert flat(other) == {
        "steps": 9, "prompts": 3, "group": 4, "passes": 2, "rate": (1e-4, "cosine", 0.1), "adamw": (0.9, 0.99, 0.1), "clip": 0.1,
        "algorithm": ("grpo", 0.0, 0.1), "lora": (8, 16), "lengths": (99, 77), "saving": (10, 3), "run": ("checkpoints", "mine"), "seed": 5,
    }  # fmt: skip


def test_overrides_take_any_key_dotted_or_nested_and_devices_are_processes():
    overrides = {"training.weight_decay": 0.0, "eval": {"max_prompts": 7}, "algorithm.type": "dr_grpo", "lora.r": 3}  # fmt: skip
    found = core_config(TrainingConfig(overrides=overrides, devices=2)).config
    assert (found.training.weight_decay, found.eval.max_prompts) == (0.0, 7)
    assert (found.algorithm.type, found.lora and found.lora.r) == ("dr_grpo", 3)
    assert found.run.processes == 2
    on_drive = TrainingConfig(save_to_drive=True, experiment_name="e")
    assert str(run_folder(on_drive)) == "checkpoints/e", "its record is here"


@pytest.mark.parametrize(("overrides", "instead"), [
    ({"lora": None}, "overrides: lora is given as a whole"), ({"lora": {}}, "of the rank lora_rank"),
    ({"task.words": 3}, "overrides: task.words has no effect here"), ({"task": {"words": 3}}, "a field of a subclass of TrainingConfig"),
    ({"data.dataset_name": "x.jsonl"}, "register_dataset"), ({"data": {"dataset_mixture": [{"source": "x"}]}}, "register_dataset"),
    ({"data.columns": {"answer": "gold"}}, "overrides: data.columns.answer has no effect"), ({"data.seed": 3}, "Set seed, which"),
    ({"data.test_split_size": 0.1}, "Set train_fraction"), ({"data.system_prompt": "Be brief."}, "Set system_prompt"),
    ({"rewards.reward_funcs": ["match_format"]}, "reward_functions="), ({"rewards.answer_column": "gold"}, "reward_functions="),
    ({"rewards.router": {"sums": ["match_format"]}}, "rewards.router.sums"), ({"training.weight_dekay": 0.0}, "training.weight_decay"),
    ({"run": {"dir": "x"}}, "checkpoint_dir"), ({"run": {"name": "x"}}, "checkpoint_dir"),
    ({"run.server": "http://gpu:8000"}, "connect(url)"), ({"rollout.type": "environment"}, "has none of"),
])  # fmt: skip
def test_an_override_without_effect_is_refused_with_what_to_use_instead(overrides, instead):
    with pytest.raises(ConfigError) as refused:
        TrainingConfig(overrides=overrides)
    assert instead in str(refused.value)


@pytest.mark.parametrize(("message", "shown"), [
    ("Raise the limit, or set data.max_prompt_length=null to have none.", " limit."),
    ("data.max_prompt_length is 5.", "max_prompt_length is 5."),
    ("Nothing was scored (rewards.max_unscored_steps).", HOW_TO_OVERRIDE),
    ("training.weight_decay is 2.", "training.weight_decay is 2."),
])  # fmt: skip
def test_an_error_names_what_a_notebook_can_set(message, shown):
    config = TrainingConfig(overrides={"training.weight_decay": 0.1})
    with pytest.raises(RunError) as raised, by_own_names(config):
        raise RunError(message)
    assert str(raised.value).endswith(shown)
