"""Keys of TRL, verl, OpenRLHF and vLLM with their equivalents here, for messages about unknown keys.

An unknown key is looked up here before a similar name is suggested. A name that ends in `*` matches as a prefix. The advice is stored in
foreign_keys.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from groupwise.core.settings.schema import ForeignKey

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
_USE_RL = ForeignKey(
    "other_command",
    "it belongs to `groupwise rl`, which has a config of its own; `groupwise sft` samples nothing",
)


@cache
def _tables() -> tuple[dict[str, ForeignKey], dict[str, ForeignKey]]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rl, sft = (
        {
            key: ForeignKey(kind, advice)
            for kind, table in tables.items()
            for advice, keys in table.items()
            for key in keys
        }
        for tables in tomllib.loads(text).values()
    )
    return rl, sft


def foreign_to_rl() -> Mapping[str, ForeignKey]:
    """Advice on foreign keys in a config of `groupwise rl`."""
    return _tables()[0]


@cache
def foreign_to_sft() -> Mapping[str, ForeignKey]:
    """Advice on foreign keys in a config of `groupwise sft`: that for RL as far as it applies, and its own."""
    rl, sft = _tables()
    common = {
        name: _USE_RL if any(part in foreign.advice for part in _ONLY_IN_RL) else foreign
        for name, foreign in rl.items()
        if foreign.kind != "other_command" and name not in _KEYS_OF_SFT
    }
    return {**common, **sft}
