"""Converts a notebook's config into the core's: the run is the same as one described by a YAML file."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from groupwise.core.accelerators import accelerator
from groupwise.core.errors import ConfigError, GroupwiseError
from groupwise.core.settings.schema import KeyPath
from groupwise.runs.notebook_names import own_names
from groupwise.tasks.data.config import DatasetConfig
from groupwise.training.config import LoadedConfig, load_config

CHECKPOINTS = Path("checkpoints")
"""Parent folder of experiments if they are not on Drive."""
ACCURACY = "accuracy"
"""The reward part that measures whether an answer is right; recorded with weight 0."""
SMALL = "smollm2-135m-instruct"
GEMMA = "google/gemma-3-1b-it"
SAVE_STEPS = 100
MIN_SAVE_STEPS = 10
KEPT = 3

_DECIDED = "is decided by the notebook's own fields."
_ROWS = "has no effect here: the rows are those of the field dataset. "
_REWARDS = "cannot be given here: the rewards are those of the notebook. "
_LOADER = "Name a dataset there, or a loader of your own with register_dataset(name, loader)."
_GIVEN = "Give others to train_grpo(config, session, reward_functions=[…])."
_NOT_HERE = {
    "run.dir": f"{_DECIDED} Set checkpoint_dir instead.",
    "run.name": f"{_DECIDED} Set checkpoint_dir instead.",
    "run.server": "is decided by who prepares the session. Call remote = connect(url), then remote.prepare_session(config).",
    "model.name": f"{_DECIDED} Set model instead.",
    **{f"data.{key}": _ROWS + _LOADER for key in DatasetConfig.model_fields if key != "strict"},
    "data.seed": f"{_ROWS}Set seed, which splits them.",
    "data.test_split_size": f"{_ROWS}Set train_fraction, which splits them.",
    "data.system_prompt": f"{_ROWS}Set system_prompt, which is put before each question.",
    "rewards.in_process": _DECIDED,
    **{
        f"rewards.{key}": _REWARDS + _GIVEN
        for key in ("reward_funcs", "router", "default_task", "answer_column")
    },
    "task": "has no effect here, where no task reads it. What loaders and rewards are to know is a field of a subclass of TrainingConfig.",
}
"""Keys (with all keys below them) that cannot be overridden in a notebook, and why."""
_NO_ADAPTER = (
    "is given as a whole, but a notebook trains an adapter of the rank lora_rank, and exports it. Leave it out, or set keys of it, such as "
    "lora.dropout. All weights of a model are trained by the command groupwise rl."
)
_NO_ENVIRONMENT = "is environment, which a notebook has none of. Leave it out, or use the command groupwise rl with a task."


class Settings(Protocol):
    """The parts of a `TrainingConfig` that are read here."""

    model: str | None
    lora_rank: int
    lora_alpha: int
    total_generation_steps: int
    max_prompt_length: int
    beta: float
    epsilon: float
    batch_size: int
    num_generations: int
    num_iterations: int
    learning_rate: float
    seed: int
    experiment_name: str
    checkpoint_dir: str
    save_to_drive: bool
    overrides: dict[str, Any]
    devices: Literal["auto"] | int | tuple[int, int]

    @property
    def max_steps(self) -> int: ...
    @property
    def report_to(self) -> tuple[str, ...]: ...
    @property
    def backend(self) -> str: ...
    @property
    def chosen_backend(self) -> str: ...


def core_config(
    config: Settings, *, graded: bool = True, server: str | None = None
) -> LoadedConfig:
    """The core's config. Raises ConfigError for invalid values, with the core's key names.

    `graded`: True if rows have answers; success then means a right answer. `server`: URL of the training server, if any.
    """
    folder = run_folder(config)
    model_keys, run_keys = _devices(config, server)
    values: dict[str, Any] = {
        "model": {"name": model_of(config), **model_keys},
        "lora": {"r": config.lora_rank, "alpha": config.lora_alpha},
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
            # A short training saves after each quarter, so a lost machine does not lose everything.
            "save_steps": min(SAVE_STEPS, max(MIN_SAVE_STEPS, config.max_steps // 4)),
            "save_total_limit": KEPT,
            "report_to": list(config.report_to),
            "server": server,
            **run_keys,
        },
    }
    return load_config(values, _overrides(config), to_train=True)


@contextmanager
def by_own_names(config: Settings) -> Generator[None]:
    """Replaces keys of the core in error messages by their names here, unless the user gave the core's key."""
    try:
        yield
    except GroupwiseError as error:
        error.message = own_names(error.message, given=str(config.overrides))
        error.args = (error.message, *error.args[1:])
        raise


def run_folder(config: Settings) -> Path:
    """Folder of the run's record: checkpoint_dir, unless that is on Drive, which cannot hold a database."""
    if config.save_to_drive:
        return CHECKPOINTS / config.experiment_name
    return Path(config.checkpoint_dir)


def model_of(config: Settings) -> str:
    """The model that is trained: the one named in the config, or the one that suits the machine."""
    if config.model is not None:
        return config.model
    return SMALL if accelerator() == "cpu" else GEMMA


def _devices(config: Settings, server: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The backend and its devices, as keys of `model` and keys of `run`. A training server always uses torch, independently of this
    machine.
    """
    devices = config.devices
    if server is not None and config.backend == "tunix":
        raise ConfigError(
            "backend is 'tunix', but a training server computes with torch. Leave backend out, or train here: prepare_session(config)."
        )
    if server is None and config.chosen_backend == "tunix":
        if devices == "auto":
            return {"backend": "tunix"}, {}
        mesh = (devices, 1) if isinstance(devices, int) else devices
        return {"backend": "tunix", "mesh": mesh}, {}
    if isinstance(devices, tuple):  # possible if this machine's own backend would be tunix
        raise ConfigError(
            f"devices is {devices}, a mesh, which a training server does not have. Leave devices out."
        )
    return {}, {} if devices == "auto" else {"processes": devices}


def _overrides(config: Settings) -> list[str]:
    """The overrides as `key=JSON`. Raises ConfigError for keys that a notebook decides itself, all at once."""
    pairs = flat(config.overrides)
    refused: list[str] = []
    for key, value in pairs:
        reasons = [
            reason
            for key_prefix, reason in _NOT_HERE.items()
            if f"{key}.".startswith(f"{key_prefix}.")
        ]
        if key == "lora":
            reasons = [_NO_ADAPTER]
        elif (key, value) == ("rollout.type", "environment"):
            reasons = [_NO_ENVIRONMENT]
        refused += [f"overrides: {key} {reason}" for reason in reasons[:1]]
    if refused:
        raise ConfigError("\n".join(refused))
    assignments: list[str] = []
    for key, value in pairs:
        try:
            # Numbers of numpy and torch have `item`.
            text = json.dumps(value, default=lambda value: value.item())
        except (TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"overrides: {key} is of the type {type(value).__name__}; give a number, a text, a list or None."
            ) from None
        assignments.append(f"{key}={text}")
    return assignments


def flat(values: Mapping[Any, Any], parent: KeyPath = ()) -> list[tuple[str, Any]]:
    """Key-value pairs with dotted keys; input keys may be dotted or nested."""
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"overrides: {key!r} is not a key; give a text such as 'training.seed'."
            )
        path = (*parent, key)
        if isinstance(value, Mapping) and value:
            pairs += flat(cast("Mapping[str, Any]", value), path)
        else:
            pairs.append((".".join(path), cast("Any", value)))
    return pairs
