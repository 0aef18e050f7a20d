"""Records which weights a model name stood for, because a resume on other weights would silently continue with another model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import hf_hub_download

from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.files import FULL_WEIGHTS, INDEX, model_files, read_json
from groupwise.engine.models.tokenizer import ResolvedModel, explained, quiet, resolve

WHOLE = 64 << 20
"""Bytes up to which a file is read in whole."""
BLOCK = 1 << 20
BLOCKS = 32
"""Number of blocks read of a larger file, evenly spread from its beginning to its end: any training changes all of them."""

WANDERING = ("_name_or_path", "transformers_version")
"""Keys of a model's config that change without the model."""


def identity(config: ModelConfig) -> str:
    """16 hex digits for the base, and for `model.adapter` if it is set.

    For a model on the hub it is the commit, for local files a hash of config and weights, which takes about a second.
    Raises `ModelError` if the files cannot be had.
    """
    resolved = resolve(config)
    digest = hashlib.sha256()
    if resolved.local:
        for part in _folder_parts(Path(resolved.location)):
            digest.update(part)
    else:
        digest.update(f"{resolved.location}@{_commit(config, resolved)}".encode())
    if config.adapter is not None:
        for part in _adapter_parts(config):
            digest.update(part)
    return digest.hexdigest()[:16]


def _adapter_parts(config: ModelConfig) -> Iterator[bytes]:
    from groupwise.engine.models.adapters import adapter_commit, adapter_folder
    from groupwise.engine.models.lora import WEIGHTS

    folder, commit = adapter_folder(config), adapter_commit(config)
    if commit is not None:
        yield f"{config.adapter}@{commit}".encode()
    elif folder is not None:
        yield from _file_parts(folder / WEIGHTS)


def _commit(config: ModelConfig, resolved: ResolvedModel) -> str:
    with quiet(), explained(config, resolved, "model"):
        path = hf_hub_download(resolved.location, "config.json", revision=resolved.revision)
    return Path(path).parent.name  # …/snapshots/<commit>/config.json


def _folder_parts(folder: Path) -> Iterator[bytes]:
    described = read_json(folder / "config.json")
    kept = {key: value for key, value in described.items() if key not in WANDERING}
    yield json.dumps(kept, sort_keys=True).encode()
    for path in _weight_files(folder):
        yield from _file_parts(path)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / FULL_WEIGHTS).is_file() or (folder / INDEX).is_file():
        return model_files(folder)
    return sorted(folder.glob("pytorch_model*.bin"))


def _file_parts(path: Path) -> Iterator[bytes]:
    """Name, size and content of a file, or a sample of its content."""
    size = path.stat().st_size
    yield f"{path.name}|{size}|".encode()
    with path.open("rb") as file:
        if size <= WHOLE:
            yield hashlib.file_digest(file, "sha256").digest()
            return
        for index in range(BLOCKS):
            file.seek(index * (size - BLOCK) // (BLOCKS - 1))
            yield file.read(BLOCK)
