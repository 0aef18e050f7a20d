"""What a notebook's config means to the core: the same run as a YAML file would describe."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from groupwise.accelerators import accelerator
from groupwise.config import LoadedConfig, load_config
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.notebook.config import CHECKPOINTS, TrainingConfig
from groupwise.notebook.rewards import ACCURACY
from groupwise.settings.schema import KeyPath

SMALL = "smollm2-135m-instruct"
GEMMA = "google/gemma-3-1b-it"
SAVE_STEPS = 100
LEAST_SAVE_STEPS = 10
KEPT = 3

OWN_NAMES = {
    "run.name": "experiment_name",
    "run.dir": "checkpoint_dir",
    "run.processes": "devices",
    "run.report_to": "report_to",
    "model.name": "model",
    "model.mesh": "devices",
    "lora.r": "lora_rank",
    "sampler.max_completion_length": "total_generation_steps",
    "data.max_prompt_length": "max_prompt_length",
    "algorithm.beta": "beta",
    "algorithm.epsilon": "epsilon",
    "training.prompts_per_step": "batch_size",
    "training.num_generations": "num_generations",
    "training.num_iterations": "num_iterations",
    "training.learning_rate": "learning_rate",
    "training.seed": "seed",
}
"""Keys of the core, and what they are called here."""
_NOT_HERE = {
    "run.dir": "checkpoint_dir",
    "run.name": "checkpoint_dir",
    "model.name": "model",
    "rewards.in_process": "",
}


def core_config(
    config: TrainingConfig, *, graded: bool = True, server: str | None = None
) -> LoadedConfig:
    """The core's config. Raises ConfigError for what it refuses, by its own names.

    `graded`: whether rows have answers, so that success is a right one. `server`: where it is trained, if not here.
    """
    folder = run_folder(config)
    values: dict[str, Any] = {
        "model": {"name": model_of(config), **_backend(config, server)},
        "lora": {"r": config.lora_rank, "alpha": _whole("lora_alpha", config.lora_alpha)},
        "sampler": {"max_completion_length": config.total_generation_steps},
        "algorithm": {"type": "grpo", "beta": config.beta, "epsilon": config.epsilon},
        "training": {
            "max_steps": config.max_steps,
            "prompts_per_step": config.batch_size,
            "num_generations": config.num_generations,
            "num_iterations": config.num_iterations,
            "learning_rate": config.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.99,
            "weight_decay": 0.1,
            "max_grad_norm": 0.1,
            "seed": config.seed,
        },
        "data": {"max_prompt_length": config.max_prompt_length},
        "rewards": {"in_process": True},
        "eval": {"success_part": ACCURACY} if graded else {},
        "run": {
            "name": folder.name,
            "dir": str(folder.parent),
            "save_steps": _save_steps(config),
            "save_total_limit": KEPT,
            "report_to": list(config.report_to),
            "server": server,
            **_processes(config, server),
        },
    }
    return load_config(values, _overrides(config), to_train=True)


@contextmanager
def by_own_names(config: TrainingConfig) -> Generator[None]:
    """What is said of keys of the core is said by the names that they have here, unless the user gave the key."""
    try:
        yield
    except GroupwiseError as error:
        given = str(config.overrides)
        for key, name in OWN_NAMES.items():
            if key not in given:
                error.message = re.sub(rf"\b{re.escape(key)}\b", name, error.message)
        error.args = (error.message, *error.args[1:])
        raise


def _save_steps(config: TrainingConfig) -> int:
    """Of a short training a quarter: a machine that goes away shall not take all of it."""
    return min(SAVE_STEPS, max(LEAST_SAVE_STEPS, config.max_steps // 4))


def run_folder(config: TrainingConfig) -> Path:
    """Where the run is recorded: checkpoint_dir, unless that is on Drive, where no database may live."""
    if config.save_to_drive:
        return CHECKPOINTS / config.experiment_name
    return Path(config.checkpoint_dir)


def model_of(config: TrainingConfig) -> str:
    """The model that is trained: the named one, or what suits the machine."""
    if config.model is not None:
        return config.model
    return SMALL if accelerator() == "cpu" else GEMMA


def _chosen(config: TrainingConfig, server: str | None) -> str:
    """The backend: a training server computes with torch, whatever this machine has."""
    if server is None:
        return config.chosen_backend
    if config.backend == "tunix":
        raise ConfigError(
            "backend is 'tunix', but a training server computes with torch. Leave backend out, or train here: prepare_session(config)."
        )
    return "torch"


def _backend(config: TrainingConfig, server: str | None) -> dict[str, Any]:
    if _chosen(config, server) == "torch":
        return {}
    devices = config.devices
    if devices == "auto":
        return {"backend": "tunix"}
    return {"backend": "tunix", "mesh": (devices, 1) if isinstance(devices, int) else devices}


def _processes(config: TrainingConfig, server: str | None) -> dict[str, Any]:
    if _chosen(config, server) == "tunix" or config.devices == "auto":
        return {}
    if isinstance(config.devices, tuple):  # where the machine's own backend would be tunix
        raise ConfigError(
            f"devices is {config.devices}, a mesh, which a training server does not have. Leave devices out."
        )
    return {"processes": config.devices}


def _overrides(config: TrainingConfig) -> list[str]:
    found = flat(config.overrides)
    for key, _ in found:
        if key in _NOT_HERE:
            instead = _NOT_HERE[key]
            use = f" Set {instead} instead." if instead else ""
            raise ConfigError(f"overrides: {key} is decided by the notebook's own fields.{use}")
    return [f"{key}={_as_json(key, value)}" for key, value in found]


def _as_json(key: str, value: Any) -> str:
    try:
        return json.dumps(value, default=lambda other: other.item())  # a number of numpy or torch
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"overrides: {key} is of the type {type(value).__name__}; give a number, a text, a list or None."
        ) from None


def flat(values: Mapping[Any, Any], above: KeyPath = ()) -> list[tuple[str, Any]]:
    """Keys may be dotted or nested."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(f"overrides: {key!r} is no key; give a text such as 'training.seed'.")
        path = (*above, key)
        if isinstance(value, Mapping) and value:
            found += flat(cast("Mapping[str, Any]", value), path)
        else:
            found.append((".".join(path), cast("Any", value)))
    return found


def _whole(name: str, value: float) -> int:
    if value != int(value):
        raise ConfigError(f"{name} is {value}; both backends take whole numbers.")
    return int(value)
