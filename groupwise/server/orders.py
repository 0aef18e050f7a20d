"""From the settings that a client posts to the run that an engine is asked for.

`StartRequest` has flat names, which clients of such servers know; a run has the sections of `groupwise.config`. Here the one becomes
the other, and here alone. What a client may name is bounded: models and adapters that the server's settings allow, and nothing that
would run code or write elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config import load_config
from groupwise.errors import ConfigError, RunNotFoundError
from groupwise.models.bundled import ALIASES
from groupwise.runs import find
from groupwise.server.engine.port import OpenRun
from groupwise.wire.problems import Refusal
from groupwise.wire.training import TINY, StartRequest

TINY_RATE = 5e-2
"""Learning rate that moves a few thousand random parameters within minutes."""
RATE = 1e-5
RUNS = "runs"
"""Folder of the server's output that holds the runs."""
REFUSED_SECTIONS: Mapping[str, tuple[str, ...]] = {"sampler": ("temperature_schedule",)}
"""Keys that a served run cannot have: each request may say its own temperature."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What clients may have the server load."""

    model_dir: Path
    models: tuple[str, ...]
    """Beside the built-in aliases and the folders under `model_dir`: names as clients give them."""


def order_of(request: StartRequest, allowed: Allowed, output_dir: Path) -> OpenRun:
    """The run that is asked for. Raises Refusal: `model_not_allowed`, or `settings_conflict` with what the config says against it."""
    config = {
        "model": _model(request, allowed, output_dir / RUNS),
        "lora": None if request.trains_all else (request.lora or {}),
        "algorithm": _algorithm(request.algorithm),
        "sampler": {
            **_checked("sampler", request.sampler),
            "max_completion_length": request.max_completion_length,
        },
        "training": {
            **(request.training or {}),
            "max_steps": request.max_steps,
            "prompts_per_step": request.prompts_per_step,
            "num_generations": request.num_completions_per_prompt,
            "learning_rate": request.learning_rate or _rate(request.model_id),
            "lag": request.staleness,
            "schedule": "free" if request.staleness else "fixed_lag",
        },
        "run": {
            "name": request.run_name or _name_after(request.model_id),
            "dir": str(output_dir / RUNS),
            "save_steps": request.save_steps,
            "save_total_limit": request.save_total_limit,
            "logging_steps": request.logging_steps,
        },
    }
    try:
        load_config(config)
    except ConfigError as error:
        raise Refusal("settings_conflict", str(error)) from None
    return OpenRun(config, request.max_prompt_length)


def _model(request: StartRequest, allowed: Allowed, runs: Path) -> dict[str, Any]:
    model: dict[str, Any] = {"name": allowed_model("model_id", request.model_id, allowed)}
    if request.adapter_path is not None:
        model["adapter"] = _adapter(request.adapter_path, allowed, runs)
    return model


def allowed_model(field: str, name: str, allowed: Allowed) -> str:
    """What to load: an alias or an allowed name as it stands, else the folder under `model_dir`. Refused as `model_not_allowed`."""
    if name in ALIASES or name in allowed.models:
        return name
    if (folder := _inside(allowed.model_dir, name)) is not None:
        return str(folder)
    there = ", ".join(folders_in(allowed.model_dir)) or "no folders"
    raise Refusal(
        "model_not_allowed",
        f"{field}: {name!r} may not be loaded. Allowed are the built-in models ({', '.join(ALIASES)}), the folders in the server's "
        f"model_dir ({there}), and what its setting allowed_models names ({', '.join(allowed.models) or 'nothing'}). Put the model "
        "there, or have it added to allowed_models.",
    )


def _inside(root: Path, name: str) -> Path | None:
    """The folder of that name, if it is one in `root` and no link leads out of it."""
    top = root.resolve()
    try:
        path = (top / name).resolve()
        return path if path.is_dir() and path != top and path.is_relative_to(top) else None
    except (OSError, ValueError):  # no system has such a name
        return None


def folders_in(root: Path) -> list[str]:
    """Those that may be named as models."""
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _adapter(name: str, allowed: Allowed, runs: Path) -> str:
    """`run@step` of a run of this server, else as a model is named."""
    if re.fullmatch(r"[A-Za-z0-9._-]+@\d+", name):
        try:
            address = find.resolve(name, runs)
        except RunNotFoundError as error:
            raise Refusal("unknown_checkpoint", str(error)) from None
        assert address.checkpoint is not None, "a step was named"
        return str(address.checkpoint.path)
    return allowed_model("adapter_path", name, allowed)


def _algorithm(given: str | dict[str, Any] | None) -> dict[str, Any]:
    return {"type": given} if isinstance(given, str) else given or {}


def _checked(section: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    for key in REFUSED_SECTIONS[section]:
        if given and key in given:
            raise Refusal(
                "settings_conflict",
                f"{section}.{key} has no place in a served run: give `temperature` with each request for completions.",
            )
    return dict(given or {})


def _rate(model: str) -> float:
    return TINY_RATE if model == TINY else RATE


def _name_after(model: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1]).strip(".-_")
    return plain or "run"
