"""Translates the rewards of a foreign config, each with the parameters that give equal rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from groupwise.core.terminal.text import shorten
from groupwise.tasks.rewards.other_names import NameMeaning, meaning_of
from groupwise.tasks.rewards.registry import registered_rewards
from groupwise.training.init.foreign_names import TRL_LENGTH
from groupwise.training.init.foreign_python import Unread

OPEN_R1_REWARDS = ("accuracy", "format", "tag_count")
"""The rewards of open-r1 if a recipe names none."""
LIBRARY_REWARDS = frozenset(
    """
    accuracy format tag_count reasoning_steps cosine repetition_penalty length code binary_code ioi_code cf_code code_format
    soft_overlong_punishment accuracy_reward format_reward tag_count_reward reasoning_steps_reward len_reward get_cosine_scaled_reward
    get_repetition_penalty_reward code_reward binary_code_reward ioi_code_reward cf_code_reward get_code_format_reward
    get_soft_overlong_punishment think_format_reward reasoning_accuracy_reward
    """.split()
)
"""Names of open-r1's and TRL's own rewards. Any other name is the user's own, even if it resembles one of ours."""
CODE_REWARDS = ("code", "binary_code")
"""Rewards of open-r1 that read the column `verification_info`."""
OPEN_R1_KEYS = frozenset(
    """
    dataset_prompt_column dataset_mixture system_prompt benchmarks push_to_hub_revision overwrite_hub_revision hub_model_revision
    wandb_run_group wandb_entity cosine_max_len repetition_n_grams code_provider code_language soft_punish_cache
    """.split()
)
"""Keys that only open-r1 has."""

PARAMETERS: dict[str, dict[str, tuple[str, Any]]] = {
    "length": {
        "cosine_max_len": ("max_length", 1000), "cosine_min_value_wrong": ("wrong_short", 0.0),
        "cosine_max_value_wrong": ("wrong_long", -0.5), "cosine_min_value_correct": ("right_long", 0.5),
        "cosine_max_value_correct": ("right_short", 1.0),
    },
    "repetition": {"repetition_n_grams": ("n", 3), "repetition_max_penalty": ("max_penalty", -1.0)},
    "overlong": {"max_completion_len": ("max_length", 16384), "soft_punish_cache": ("cache", 4096)},
}  # fmt: skip
"""Each reward's parameters: open-r1's key -> our parameter, and open-r1's default."""
OVERLONG_OF_TRL = {"max_completion_len": 1280, "soft_punish_cache": 256}
"""The arguments with which TRL's command calls `get_soft_overlong_punishment`; a config names that reward without arguments."""
SAME_DEFAULT = {
    "max_length": 1000,
    "right_long": 0.5,
    "right_short": 1.0,
    "n": 3,
    "max_penalty": -1.0,
}
"""Parameters whose default here is the same, so they need not be written."""


def is_open_r1(settings: Mapping[str, Any]) -> bool:
    """True for a recipe of open-r1, which turns every prompt into a chat."""
    return bool(OPEN_R1_KEYS & settings.keys())


def reward_entry(
    name: Any, module: str, settings: Mapping[str, Any], open_r1: bool
) -> tuple[Any, str, bool]:
    """Our entry for a reward (None if there is none), a remark about it, and whether something is lost.

    `module` is the module of the file's own functions; if the file is not a module, the one that should contain them.
    """
    if isinstance(name, Unread):
        # A call such as `get_cosine_scaled_reward(max_len=500)` is found by its function's name.
        match = re.match(r"(?:partial\(|functools\.partial\()?([\w.]+)", name.written)
        function_name = match[1].rpartition(".")[2] if match else ""
        equivalent = meaning_of(function_name, registered_rewards()) if name.of_library else None
        if equivalent is None or not equivalent.rewards:
            text = f"`{shorten(name.written, 60)}` of line {name.line} is not taken over. Write a `def` at the top of the file"
            return None, text, True
        entry = _with_parameters(function_name, equivalent, settings, open_r1)
        remark = (
            f"`{shorten(name.written, 60)}` is `{equivalent.rewards[0]}` here, without what line {name.line} gives it: "
            f"{equivalent.remark}"
        )
        return entry, remark, True
    if not isinstance(name, str):
        return (
            None,
            f"{shorten(repr(name), 40)} is not taken over: name a reward, or path/to/file.py:function",
            True,
        )
    return _reward_by_name(name, module, settings, open_r1)


def _reward_by_name(
    name: str, module: str, settings: Mapping[str, Any], open_r1: bool
) -> tuple[Any, str, bool]:
    registry = registered_rewards()
    equivalent = meaning_of(name, registry)
    if name == "length" and open_r1:
        return (
            "length",
            "`length` compares lengths within a group there, along a cosine here",
            False,
        )
    if name in registry:
        return name, "", False
    if equivalent is not None and equivalent.rewards and name in LIBRARY_REWARDS:
        remark = f"`{name}` is `{equivalent.rewards[0]}` here: {equivalent.remark}"
        if equivalent.rewards[0] == "length" and "cosine_max_len" in settings:
            remark += "; cosine_max_len counts characters there, and tokens here"
        defaults = OVERLONG_OF_TRL if name == "get_soft_overlong_punishment" else {}
        return _with_parameters(name, equivalent, {**settings, **defaults}, open_r1), remark, False
    if ":" in name:
        return module + name if name.startswith(":") else name, "", False
    if "/" in name:
        text = f"{name} is not taken over: no model scores here by its weights. The reward `judge` asks one over HTTP"
        return None, text, True
    if "." in name:
        return ":".join(name.rsplit(".", 1)), "", False
    remark = f"`{name}` is taken for a function of {module}"
    if equivalent:
        similarity = f"`{equivalent.rewards[0]}` here is alike, " if equivalent.rewards else ""
        remark += f": {similarity}{equivalent.remark}"
    return f"{module}:{name}", remark, equivalent is not None


def _with_parameters(
    name: str, equivalent: NameMeaning, settings: Mapping[str, Any], open_r1: bool
) -> Any:
    reward = equivalent.rewards[0]
    parameters: dict[str, Any] = dict(equivalent.parameters)
    for foreign_name, (parameter, default) in PARAMETERS.get(reward, {}).items():
        value = settings.get(foreign_name, default if open_r1 else None)
        if value is not None and SAME_DEFAULT.get(parameter) != value:
            parameters[parameter] = value
    if reward == "overlong":
        parameters.setdefault("max_length", settings.get("max_completion_length", TRL_LENGTH))
    if reward == "python_tests" and "binary" in name:
        parameters["partial"] = False
    return {"name": reward, **parameters} if parameters else reward
