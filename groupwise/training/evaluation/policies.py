"""Finds the policy that a reference names: `base`, a folder, a run with or without a step, or a hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from groupwise.core.errors import ModelError, RunNotFoundError
from groupwise.engine.backends.tinker.saved import FILE
from groupwise.engine.models.files import FULL_WEIGHTS, INDEX
from groupwise.engine.models.hub import fetch_files, may_be_hub_id
from groupwise.runs import find

WEIGHT_FILES = ("adapter_config.json", FILE, FULL_WEIGHTS, INDEX)


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """The weights to serve, and their name."""

    label: str
    """`base`, `run@step`, or the reference as given."""
    folder: Path | None = None
    """Folder of an adapter or a whole model; None: the configured model itself."""
    run: Path | None = None
    """The folder of the run that trained the weights; None if they are of no known run."""


def find_policy(reference: str, runs_dir: Path) -> PolicyWeights:
    """Find a policy: an existing folder first, then a run, then a hub id. Raises a `UsageError` that lists the attempts."""
    if reference == "base":
        return PolicyWeights("base")
    path = Path(reference).expanduser()
    if any((path / name).is_file() for name in WEIGHT_FILES):
        return PolicyWeights(reference, path)
    try:
        # The named checkpoint or, without one, the final weights or the newest checkpoint.
        address = find.resolve(reference, runs_dir)
        if address.checkpoint is not None:
            label = f"{address.name}@{address.checkpoint.step}"
            return PolicyWeights(label, address.checkpoint.path, address.path)
        weights = find.newest_weights(address.path)
        if weights is None:
            raise ModelError(
                f"The run {address.name!r} has no checkpoint yet (run.save_steps; a training server also writes one on request), so its "
                "weights are those of its base model: the policy 'base'."
            )
        return PolicyWeights(find.label_of(address.path, weights), weights, address.path)
    except RunNotFoundError as not_a_run:
        if not may_be_hub_id(reference):
            raise
        try:
            folder = fetch_files(reference)
        except ModelError as error:
            raise ModelError(f"{not_a_run}\nAs a hub id: {error}") from error
        if not any((folder / name).is_file() for name in WEIGHT_FILES):
            raise ModelError(
                f"{reference!r} on the hub holds neither an adapter nor a model in safetensors "
                f"({', '.join(WEIGHT_FILES)})."
            ) from None
        return PolicyWeights(reference, folder)
