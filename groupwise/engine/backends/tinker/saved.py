"""Saved weights of a Tinker service, as a run's folders keep them: `tinker.json`, a small file with the service's paths.

A checkpoint, the run's `final/` and each publication have one where other backends have tensors. The weights themselves stay at the
service; once they are deleted there, the file is useless. This module imports neither torch nor the tinker package.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import CheckpointError, ModelError
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.identity import OF_SERVICE

FILE = OF_SERVICE
FORMAT = 1
SCHEME = "tinker://"
NOT_EXACT = (
    "model.backend is tinker: a service has weights and optimiser, and checkpoints here name what it saved. A resumed run draws the same "
    "examples with the same seeds from there, but repeats to the bit only as far as the service does"
)
"""The warning of a run that it is not known to resume to the bit, as runs on this machine are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """The service's paths of the weights of one step."""

    base_model: str
    """The service's name of the base, such as `Qwen/Qwen3-8B`."""
    state: str | None
    """Path of weights and optimiser state (`save_state`), from which training goes on: `tinker://<model>/weights/<name>`."""
    sampler: str | None
    """Path of the same weights for sampling (`save_weights_for_sampler`): `tinker://<model>/sampler_weights/<name>`. None, as `state`: the
    weights live as long as the session that published them."""
    updates: int = 0
    """Number of optimiser steps before it."""


def write(saved: SavedWeights, folder: Path) -> None:
    """Write `tinker.json` into an existing folder. Raises StoreError if the disk refuses."""
    with atomic_files.explaining_disk_errors(folder):
        atomic_files.write_json(folder / FILE, {"format": FORMAT, **asdict(saved)})


def read(folder: Path) -> SavedWeights:
    """Read `tinker.json`. Raises CheckpointError if it is missing, damaged, or of a newer release."""
    path = folder / FILE
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
        if facts.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}; a newer release of Groupwise wrote it")
        return SavedWeights(**facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not say where a Tinker service has the weights: {error}. A checkpoint of the backend tinker is resumed and "
            "evaluated with that backend, and one of another backend with the other."
        ) from error


def sampler_path(model: ModelConfig) -> str | None:
    """The path to sample `model.adapter` from; None: the base. Raises ModelError if the state is not a sampler's, as `starting_state`."""
    state = starting_state(model)
    if state is None or model.adapter is None:
        return None
    if not model.adapter.startswith(SCHEME):
        return read(Path(model.adapter).expanduser()).sampler
    if "/weights/" in state:
        raise ModelError(
            f"model.adapter is {state!r}, a state to train from. To sample from it, give the path that save_weights_for_sampler returned "
            "(tinker://<model>/sampler_weights/<name>), or the folder of a run that names both."
        )
    return state


def starting_state(model: ModelConfig) -> str | None:
    """The path that `model.adapter` names: itself, or that in the folder of a run. None: a new adapter. Raises ModelError for any other."""
    if model.adapter is None or model.adapter.startswith(SCHEME):
        return model.adapter
    folder = Path(model.adapter).expanduser()
    if not (folder / FILE).is_file():
        raise ModelError(
            f"model.adapter is {model.adapter!r}, from which a Tinker service cannot start: it takes no files. Give a path that save_state "
            f"returned (tinker://<model>/weights/<name>), or a folder with {FILE}: a checkpoint or final/ of a run of the backend tinker."
        )
    saved = read(folder)
    if saved.base_model != model.name:
        raise ModelError(
            f"{folder} was trained on {saved.base_model}, but model.name is {model.name}. They must be equal."
        )
    return saved.state
