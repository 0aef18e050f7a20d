"""The keys of TRL, open-r1 and Unsloth: their equivalents here, those without effect, and those without an equivalent.

The defaults are those of TRL 1.16.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_KEYS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("trl_keys.toml").read_text(encoding="utf-8")
)
"""The tables of trl_keys.toml, which explains each."""
SAME_MEANING: dict[str, str] = _KEYS["same"]
ALIASES: dict[str, str] = _KEYS["aliases"]
SECTION_ALIASES: dict[str, dict[str, str]] = _KEYS["within"]
WITHOUT_EFFECT: frozenset[str] = frozenset(_KEYS["without_effect"])
DEFAULTS: dict[str, Any] = _KEYS["defaults"]
REMARKS: dict[str, str] = {key: text for text, keys in _KEYS["remarks"].items() for key in keys}
NO_EQUIVALENT: dict[str, str] = {
    key: text for text, keys in _KEYS["no_equivalent"].items() for key in keys
}

TRL_BATCH, TRL_GENERATIONS = 8, 8
"""TRL's defaults of per_device_train_batch_size and num_generations."""
TRL_LEARNING_RATE, TRL_LENGTH = 1e-6, 512
"""TRL's defaults of learning_rate and max_completion_length."""
LORA_DEFAULTS = {"": (16, 32, 0.05), "LoraConfig": (8, 8, 0.0), "get_peft_model": (16, 16, 0.0)}
"""Default rank, alpha and dropout of an adapter, in TRL's own config, in peft's, and in Unsloth's call."""
LOSSES = {
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "dapo": "dapo",
    "bnpo": "dapo",
    "cispo": "cispo",
    "sapo": "sapo",
    "luspo": "luspo",
    "vespo": "vespo",
}
"""TRL's loss_type -> the algorithm here."""
LOSS_DIVISORS = {
    "dapo": "divides by all tokens of the step",
    "bnpo": "divides by the tokens of each device's batch",
    "dr_grpo": "divides by max_completion_length",
}
"""The divisor of each loss that does not first average over each rollout."""
SCALES = {"True": "group", "False": "none", "group": "group", "batch": "batch", "none": "none"}

SCHEDULES: dict[str, tuple[str, dict[str, Any], str]] = {
    "linear": ("linear", {}, ""),
    "cosine": ("cosine", {"num_cycles": 0.5}, ""),
    "cosine_with_restarts": ("cosine", {"num_cycles": 1}, ""),
    "polynomial": ("linear", {"power": 1.0, "lr_end": 1e-7}, ""),
    "constant": ("constant", {}, ""),
    "constant_with_warmup": ("constant", {}, ""),
    "inverse_sqrt": ("linear", {"timescale": None}, "falls with the root of the steps there, and does not end at 0"),
    "reduce_lr_on_plateau": ("constant", {}, "falls there when an evaluation no longer gets better"),
    "cosine_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": 0, "min_lr_rate": 0}, ""),
    "cosine_warmup_with_min_lr": (
        "cosine", {"num_cycles": 0.5, "min_lr": 0, "min_lr_rate": 0, "warmup_lr_rate": 0}, ""
    ),
    "warmup_stable_decay": ("constant", {}, "stays there, and falls in the last steps alone"),
    "greedy": ("constant", {}, "goes up and down there as the loss does"),
}  # fmt: skip
"""Learning-rate schedules of transformers: our schedule, the arguments for which both are equal, and any difference that remains."""

WHOLE_NUMBERS = frozenset(
    """
    num_generations per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size num_iterations
    max_steps max_completion_length max_prompt_length max_seq_length lora_r warmup_steps save_steps logging_steps eval_steps
    save_total_limit seed min_tokens num_generations_eval
    """.split()
)
NUMBERS = WHOLE_NUMBERS | frozenset(
    """
    num_train_epochs learning_rate beta epsilon epsilon_high delta temperature lora_alpha lora_dropout warmup_ratio weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm test_split_size vllm_importance_sampling_cap
    """.split()
)
MAY_BE_ZERO = frozenset({"warmup_steps", "seed", "max_steps", "min_tokens"})
MAY_BE_NULL = frozenset({"max_grad_norm", "save_total_limit"})
"""Keys of TRL that null or 0 switches off, as null does here."""
