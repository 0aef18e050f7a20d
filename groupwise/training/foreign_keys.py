"""Keys of TRL, verl, OpenRLHF and vLLM with their equivalents here, for messages about unknown keys.

An unknown key is looked up here before a similar name is suggested. A name that ends in `*` matches as a prefix. The advice is stored in
foreign_keys.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FOREIGN_VALUES: dict[tuple[str, str], str] = {
    ("max_steps", "-1"): "Where epochs say how long, write null, and training.num_train_epochs",
    ("scale_rewards", "True"): "TRL's true is group here",
    ("scale_rewards", "False"): "TRL's false is none here",
    ("dtype", "'float16'"): "Half precision is bfloat16 here, which needs no loss scaling",
    ("dtype", "'bf16'"): "Write bfloat16",
    ("dtype", "'tfloat32'"): "Write tf32",
}
"""Values that other frameworks use, by key and Python repr, with advice on their equivalents here."""

_ONLY_IN_RL = (
    *("sampler.", "algorithm", "rewards.", "rollout.", "the reward "),
    *("data.replay", "data.curriculum", "data.easy_pool", "data.max_prompt_length"),
    *("eval.before_and_after", "eval.samples_per_prompt"),
    *("training.num_generations", "training.prompts_per_step", "training.num_iterations"),
    "training.max_off_policy_steps",
)
"""Texts in an advice that refer to things which a supervised run does not have."""
_KEYS_OF_SFT = ("early_stopping_patience", "early_stopping_threshold", "eval_on_start")
_USE_RL = (
    "it belongs to `groupwise rl`, which has a config of its own; `groupwise sft` samples nothing"
)


@cache
def _tables() -> tuple[dict[str, str], dict[str, str]]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rl, sft = (
        {key: advice for advice, keys in table.items() for key in keys}
        for table in tomllib.loads(text).values()
    )
    return rl, sft


def foreign_to_rl() -> Mapping[str, str]:
    """Advice on foreign keys in a config of `groupwise rl`."""
    return _tables()[0]


@cache
def foreign_to_sft() -> Mapping[str, str]:
    """Advice on foreign keys in a config of `groupwise sft`: that for RL as far as it applies, and its own."""
    rl, sft = _tables()
    common = {
        name: _USE_RL if any(part in advice for part in _ONLY_IN_RL) else advice
        for name, advice in rl.items()
        if "`groupwise sft`" not in advice and name not in _KEYS_OF_SFT
    }
    return {**common, **sft}
