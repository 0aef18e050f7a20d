"""Identifies the weights that a model name refers to, because a resume on other weights would silently continue with another model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.files import (
    FULL_WEIGHTS,
    INDEX,
    hash_sample,
    model_files,
    read_json,
)
from groupwise.engine.models.hub import fetch_config
from groupwise.engine.models.tokenizer import explaining_errors, resolve

OF_SERVICE = "tinker.json"
"""The file that represents weights of a Tinker service; see `groupwise.engine.backends.tinker.saved`."""
UNSTABLE_KEYS = ("_name_or_path", "transformers_version")
"""Keys of a model's config that change without the model."""


def identity(config: ModelConfig) -> str:
    """16 hex digits that identify the base, and `model.adapter` if it is set.

    For a model on the hub they depend on the commit, for local files on a hash of config and weights, which takes about a second, and for
    a model of a Tinker service on its name.
    Raises `ModelError` if the files cannot be obtained.
    """
    digest = hashlib.sha256()
    if config.backend == "tinker":  # the service's names are all that is known of its weights
        digest.update(config.name.encode())
        if config.adapter is not None:
            saved = Path(config.adapter).expanduser() / OF_SERVICE
            digest.update(saved.read_bytes() if saved.is_file() else config.adapter.encode())
        return digest.hexdigest()[:16]
    resolved = resolve(config)
    if resolved.local:
        folder = Path(resolved.location)
        hf_config = read_json(folder / "config.json")
        lasting = {key: value for key, value in hf_config.items() if key not in UNSTABLE_KEYS}
        digest.update(json.dumps(lasting, sort_keys=True).encode())
        is_full = (folder / FULL_WEIGHTS).is_file() or (folder / INDEX).is_file()
        files = model_files(folder) if is_full else sorted(folder.glob("pytorch_model*.bin"))
        for path in files:
            hash_sample(digest, path)
    else:
        with explaining_errors(config, resolved, "model"):
            config_file = fetch_config(resolved.location, resolved.revision)
        commit = config_file.parent.name  # …/snapshots/<commit>/config.json
        digest.update(f"{resolved.location}@{commit}".encode())
    if config.adapter is not None:
        from groupwise.engine.models.adapters import adapter_commit, adapter_folder
        from groupwise.engine.models.lora_config import WEIGHTS

        adapter, commit = adapter_folder(config), adapter_commit(config)
        if commit is not None:
            digest.update(f"{config.adapter}@{commit}".encode())
        elif adapter is not None:
            hash_sample(digest, adapter / WEIGHTS)
    return digest.hexdigest()[:16]
