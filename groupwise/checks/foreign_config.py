"""Reading the GRPO configs of TRL, open-r1 and Unsloth, whatever file they stand in.

    .yaml, .yml, .json    its keys, also within one section each; what GRPOConfig.to_dict() writes too
    .py                   keyword arguments of GRPOConfig, LoraConfig, GRPOTrainer and Unsloth's loaders, as far as they are plain values

Nothing of a Python file is run.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from groupwise.errors import UsageError
from groupwise.settings.tree import read_yaml

CALLS = frozenset(
    {
        "GRPOConfig",
        "LoraConfig",
        "GRPOTrainer",
        "from_pretrained",
        "get_peft_model",
        "ModelConfig",
        "ScriptArguments",
    }
)
"""Calls in a Python file whose keyword arguments are taken."""

ALIASES = {
    "r": "lora_r", "target_modules": "lora_target_modules", "random_state": "seed", "reward_functions": "reward_funcs",
    "max_lora_rank": "lora_r", "model": "model_name_or_path", "wandb_log_unique_prompts": "log_unique_prompts", "dtype": "torch_dtype",
    "use_gradient_checkpointing": "gradient_checkpointing", "num_completions": "num_generations",
}  # fmt: skip
"""Names that a value also has, in the calls of peft and Unsloth above all."""


def read_foreign(file: Path) -> dict[str, Any]:
    """The keys of a foreign config with their values. Raises UsageError for a file that holds none."""
    if not file.is_file():
        raise UsageError(f"--from: there is no file {file}.")
    if file.suffix == ".py":
        found = _of_python(file)
    elif file.suffix == ".json":
        try:
            found = json.loads(file.read_text())
        except ValueError as error:
            raise UsageError(f"--from: {file} is no JSON: {error}.") from error
    else:
        found = read_yaml(file, "a config of TRL is a mapping of keys").values
    if not isinstance(found, Mapping):
        raise UsageError(f"--from: {file} holds {type(found).__name__}, not keys with values.")
    flat = _flat(cast("Mapping[str, Any]", found))
    if not flat.keys() & {
        "num_generations",
        "max_completion_length",
        "reward_funcs",
        "beta",
        "loss_type",
        "max_prompt_length",
    }:
        raise UsageError(
            f"--from: {file} has no key of a GRPO config (num_generations, max_completion_length, reward_funcs …). It has: "
            f"{', '.join(list(flat)[:12]) or 'none'}."
        )
    return flat


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of sections as keys of their own, unless the key is one whose value is a mapping."""
    flat: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, Mapping) and name not in (
            "chat_template_kwargs",
            "dataset_mixture",
            "lr_scheduler_kwargs",
        ):
            flat |= _flat(cast("Mapping[str, Any]", value))
        else:
            usual = ALIASES.get(name, name)
            if not (isinstance(value, NotPlain) and usual in flat):
                flat[usual] = value
    return flat


def _of_python(file: Path) -> dict[str, Any]:
    try:
        tree = ast.parse(file.read_text())
    except SyntaxError as error:
        raise UsageError(f"--from: {file} is no Python: {error}.") from error
    constants: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(_NotPlain):
                constants[node.targets[0].id] = _plain(node.value, constants)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in CALLS:
            for keyword in node.keywords:
                if keyword.arg is not None:
                    try:
                        found[keyword.arg] = _plain(keyword.value, constants)
                    except _NotPlain:
                        found.setdefault(keyword.arg, _not_plain(keyword))
    return found


def _not_plain(keyword: ast.keyword) -> Any:
    """One reward function alone by its name; any other value as it is written."""
    if keyword.arg == "reward_funcs" and isinstance(keyword.value, ast.Name):
        return keyword.value.id
    return NotPlain(ast.unparse(keyword.value))


@dataclass(frozen=True, slots=True)
class NotPlain:
    """A value that only running the file would tell, as it is written there."""

    written: str


_LARGEST_EXPONENT = 64
"""A larger power would fill the memory rather than be the value of a config."""


class _NotPlain(Exception):
    """A value that only running the file would tell."""


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _plain(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """A literal, a constant of the file, arithmetic with these, or the names of functions in a list."""
    match node:
        case ast.Name(name) if name in constants:
            return constants[name]
        case ast.List(entries) | ast.Tuple(entries):
            return [
                each.id if isinstance(each, ast.Name) else _plain(each, constants)
                for each in entries
            ]
        case ast.BinOp(left, operator, right):
            one, other = _plain(left, constants), _plain(right, constants)
            known: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
                ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.FloorDiv: lambda a, b: a // b,
                ast.Div: lambda a, b: a / b, ast.Pow: lambda a, b: a**b,
            }  # fmt: skip
            numbers = all(isinstance(each, int | float) for each in (one, other))
            huge = isinstance(operator, ast.Pow) and numbers and abs(other) > _LARGEST_EXPONENT
            if numbers and not huge and type(operator) in known:
                with suppress(ArithmeticError):
                    return known[type(operator)](one, other)
        case _:
            pass
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _NotPlain from None
