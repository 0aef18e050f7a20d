"""Packs the files that a run passes on: weights, tokenizer and model card in one folder, as transformers, peft and vLLM read them.

The weights are those of a checkpoint or of `final/`. A checkpoint also holds the optimiser and the record, which are left out. Files that
wait in the run's own folder for upload or evaluation are hard-linked if the disk supports that, so they outlive their checkpoint at no
cost; exported files are copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import ModelError

CARD = "README.md"
"""File name of the model card, as the hub expects it."""
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
MODEL = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
)
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.jinja",
)


def write_artefact(
    into: Path, weights: Path, card: str, tokenizer: Any = None, *, linked: bool = False
) -> None:
    """Fill a folder that is being made. `tokenizer` is written if the weights' folder has none."""
    files = list(weight_files(weights))
    if not files:
        raise ModelError(f"{weights} holds neither an adapter nor a model in safetensors.")
    tokenizer_paths = list(tokenizer_files(weights))
    for file in (*files, *tokenizer_paths):
        if linked:
            atomic_files.keep_file(file, into / file.name)
        else:
            shutil.copyfile(file, into / file.name)
    if tokenizer is not None and not tokenizer_paths:
        tokenizer.save_pretrained(into)
    (into / CARD).write_text(card, encoding="utf-8")


def keep_artefact(folder: Path, weights: Path, card: str, tokenizer: Any = None) -> None:
    """Make a folder with linked weights. It appears complete, and replaces an earlier one."""
    atomic_files.make_folder(
        folder,
        lambda into: write_artefact(into, weights, card, tokenizer, linked=True),
        replace=True,
    )


def weight_files(folder: Path) -> Iterator[Path]:
    """The files of an adapter, or those of a whole model."""
    return _matching_files(folder, ADAPTER if is_adapter(folder) else MODEL)


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """The files of a tokenizer, including its chat template; none if the weights' folder has no tokenizer."""
    return _matching_files(folder, TOKENIZER)


def is_adapter(folder: Path) -> bool:
    """True if a folder with weights holds an adapter, not a whole model."""
    return (folder / ADAPTER[0]).is_file()


def _matching_files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    files = {file.name: file for pattern in patterns for file in folder.glob(pattern)}
    yield from (files[name] for name in sorted(files))
