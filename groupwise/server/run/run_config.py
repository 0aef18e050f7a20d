"""Converts the settings posted by a client into the open request for an engine.

`StartRequest` has flat names, which clients of such servers know; a run's config has the sections of `groupwise.training.config`. This
module is the only place that translates between them. It also restricts requests: only models and adapters that the server's settings
allow, and nothing that would run code or write to other places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.algorithms.custom import refuse_custom
from groupwise.algorithms.distillation import Distillation
from groupwise.api.schemas.problems import FieldError, Refusal
from groupwise.api.schemas.training import NO_TEACHER, StartRequest
from groupwise.core.errors import ConfigError, RunNotFoundError, UsageError
from groupwise.core.types import TINY
from groupwise.engine.models.bundled import ALIASES
from groupwise.engine.sampler.config import SERVER_KEYS
from groupwise.runs import find
from groupwise.server.engine.engine_protocol import OpenRun
from groupwise.training.config import load_config

TINY_RATE = 5e-2
"""Learning rate for the built-in tiny model: moves a few thousand random parameters within minutes."""
RATE = 1e-5
MODEL_FILE = "config.json"
"""Files of a folder with a model."""
RUNS = "runs"
"""Subfolder of the server's output for runs."""

FLAT: Mapping[str, str] = {
    "model.name": "model_id",
    "model.adapter": "adapter_path",
    "sampler.max_completion_length": "max_completion_length",
    "training.max_steps": "max_steps",
    "training.prompts_per_step": "groups_per_step",
    "prompts_per_step": "groups_per_step",
    "training.num_generations": "num_completions_per_prompt",
    "num_generations": "num_completions_per_prompt",
    "training.learning_rate": "learning_rate",
    "training.max_off_policy_steps": "staleness",
    "run.name": "run_name",
    "run.save_steps": "save_steps",
    "run.save_total_limit": "save_total_limit",
    "run.logging_steps": "logging_steps",
}
"""Flat names in `StartRequest`, by config key; used in error messages."""


@dataclass(frozen=True, slots=True)
class AllowedModels:
    """Models that clients may load."""

    model_dir: Path
    models: tuple[str, ...]
    """Names allowed in addition to the built-in aliases and the folders under `model_dir`."""


def to_open_request(request: StartRequest, allowed: AllowedModels, output_dir: Path) -> OpenRun:
    """Convert the request into an open request.

    Raises Refusal: `model_not_allowed`; `invalid_request` if a section has unknown keys or invalid values; `settings_conflict` if settings
    contradict each other. The last two name each setting as the client knows it.
    """
    runs = output_dir / RUNS
    model = {"name": allowed_model("model_id", request.model_id, allowed)}
    if request.adapter_path is not None:
        if re.fullmatch(r"[A-Za-z0-9._-]+@\d+", request.adapter_path):
            try:
                address = find.resolve(request.adapter_path, runs)
            except RunNotFoundError as not_found:
                raise Refusal("unknown_checkpoint", str(not_found)) from None
            assert address.checkpoint is not None, "a step was named"
            model["adapter"] = str(address.checkpoint.path)
        else:
            model["adapter"] = allowed_model("adapter_path", request.adapter_path, allowed)
    algorithm = request.algorithm
    plain_name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.model_id.rstrip("/").rsplit("/", 1)[-1])
    config = {
        "model": model,
        "lora": None if request.trains_all else (request.lora or {}),
        "algorithm": {"type": algorithm} if isinstance(algorithm, str) else algorithm or {},
        "sampler": {
            **_checked_sampler(request.sampler or {}),
            "max_completion_length": request.max_completion_length,
        },
        "training": {
            **(request.training or {}),
            "max_steps": request.max_steps,
            "prompts_per_step": request.prompts_per_step,
            "num_generations": request.num_completions_per_prompt,
            "learning_rate": request.learning_rate
            or (TINY_RATE if request.model_id == TINY else RATE),
            "max_off_policy_steps": request.staleness,
            "schedule": "free" if request.staleness else "fixed_lag",
        },
        "run": {
            "name": request.run_name or plain_name.strip(".-_") or "run",
            "dir": str(runs),
            "save_steps": request.save_steps,
            "save_total_limit": request.save_total_limit,
            "logging_steps": request.logging_steps,
        },
    }
    kind = algorithm if isinstance(algorithm, str) else (algorithm or {}).get("type")
    try:
        refuse_custom(kind)
        if kind == Distillation.name:
            raise UsageError(f"The algorithm is {kind}, but {NO_TEACHER}")
    except UsageError as error:
        field = "algorithm" if isinstance(algorithm, str) else "algorithm.type"
        raise Refusal("invalid_request", str(error), field=field) from None
    try:
        load_config(config)
    except ConfigError as error:
        raise _refusal_of_config_error(error, request) from None
    return OpenRun(config, request.max_prompt_length)


def _refusal_of_config_error(error: ConfigError, request: StartRequest) -> Refusal:
    """Convert a config error with one line per problem: `algorithm.foo is not a key; …`, `training: the lag is …`.

    A line without a colon after its key is about that key alone; a line with a colon is about several keys.
    """
    names = dict(FLAT)
    if isinstance(request.algorithm, str):
        names["algorithm.type"] = "algorithm"
    any_name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    config_key = re.compile(rf"(?<![\w.])({any_name})(?!\w|\.\w)")
    lines = [_ORIGIN.sub("", line.strip()) for line in str(error).splitlines()]
    lines = [config_key.sub(lambda match: names[match[1]], line) for line in lines if line]
    errors = [
        FieldError(field=line.split(maxsplit=1)[0].rstrip(":"), message=line) for line in lines
    ]
    each_alone = all(_ALONE.match(line) for line in lines)
    code = "invalid_request" if each_alone else "settings_conflict"
    return Refusal(code, " ".join(lines), errors=errors)


_ALONE = re.compile(r"[\w.]+ is (not |required|.*; it must be )")
_ORIGIN = re.compile(r"^(config: )+")
"""Prefixes that name the config as the origin of a key. Clients send no config, so they are removed."""


def allowed_model(field: str, name: str, allowed: AllowedModels) -> str:
    """Name or folder to load: an alias or an allowed name, else a folder under `model_dir`. Refuses with `model_not_allowed`."""
    if name in ALIASES or name in allowed.models:
        return name
    if (folder := _folder_inside(allowed.model_dir, name)) is not None:
        return str(folder)
    folders = ", ".join(folders_in(allowed.model_dir)) or "no folders"
    raise Refusal(
        "model_not_allowed",
        f"{field}: {name!r} may not be loaded. Allowed are the built-in models ({', '.join(ALIASES)}), the folders in the server's "
        f"model_dir ({folders}), and what its setting allowed_models names ({', '.join(allowed.models) or 'nothing'}). Put the model "
        "there, or have it added to allowed_models.",
    )


def _folder_inside(root: Path, name: str) -> Path | None:
    """The folder of that name in `root`, or `org/name` two levels down; None if it is missing or a link leads outside `root`."""
    if not all(part not in ("", ".", "..") for part in name.split("/")):
        return None
    top = root.resolve()
    try:
        path = (top / name).resolve()
        return path if path.is_dir() and path != top and path.is_relative_to(top) else None
    except (OSError, ValueError):  # not a valid file name on this system
        return None


def folders_in(root: Path) -> list[str]:
    """Names of the folders that clients may load as models: `name`, and `org/name` for the models in a folder that is none itself."""
    names: list[str] = []
    for folder in sorted(path for path in root.glob("[!.]*") if path.is_dir()):
        inner = sorted(path.parent.name for path in folder.glob(f"[!.]*/{MODEL_FILE}"))
        if inner and not (folder / MODEL_FILE).is_file():
            names += [f"{folder.name}/{name}" for name in inner]
        else:
            names.append(folder.name)
    return names


def _checked_sampler(sampler: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse with `settings_conflict`: keys that would make this machine send requests to addresses chosen by a client, and a temperature
    schedule, because each request may set its own temperature.
    """
    reason = "this server samples itself, and asks no other one for a client."
    refused_keys = [key for key in SERVER_KEYS if key in sampler]
    if sampler.get("engine") in ("vllm", "sglang"):
        refused_keys.append("engine")
    if not refused_keys and "temperature_schedule" in sampler:
        refused_keys = ["temperature_schedule"]
        reason = "give `temperature` with each request for completions."
    if refused_keys:
        key = f"sampler.{refused_keys[0]}"
        message = f"{key} has no place in a served run: {reason}"
        raise Refusal("settings_conflict", message, field=key)
    return sampler
