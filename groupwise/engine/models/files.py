"""Reads and writes tensors, and translates safetensors' own errors into ours.

safetensors reports a full or unwritable disk, and a damaged file, as its own error type, which is not an OSError. Functions here raise
OSError if writing fails and `ModelError` if reading fails, so callers need not know the library.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from groupwise.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

FULL_WEIGHTS = "model.safetensors"
"""Name of a file that holds a whole model, published or saved."""
INDEX = "model.safetensors.index.json"
"""File that lists the files of a model that is stored in several."""

WHOLE = 64 << 20
"""Size in bytes up to which a file is hashed completely."""
BLOCK = 1 << 20
BLOCKS = 32
"""Number of blocks that are hashed of a larger file, spread evenly from its start to its end: any training changes all of them."""


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one safetensors file. Raises OSError if it cannot be written."""
    from safetensors.torch import save_file

    with disk_errors(path):
        save_file(dict(tensors), path, metadata={"format": "pt"})


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn safetensors' error of a failed write into the OSError that caused it."""
    try:
        yield
    except SafetensorError as error:
        matched = re.search(r"os error (\d+)", str(error))
        number = int(matched[1]) if matched else errno.EIO
        raise OSError(number, os.strerror(number) if matched else str(error), str(path)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file. Raises `ModelError` if it is missing or damaged."""
    from safetensors.torch import load_file

    with _explain_errors(path):
        return load_file(path)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in one safetensors file, from its header alone."""
    with _explain_errors(path), safe_open(path, "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def read_model_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a whole model, stored in one file or in several with an index."""
    tensors: dict[str, Tensor] = {}
    for path in model_files(folder):
        tensors.update(read_tensors(path))
    return tensors


def model_files(folder: Path) -> list[Path]:
    """The safetensors files of a whole model. Raises `ModelError` if there are none."""
    if (folder / FULL_WEIGHTS).is_file():
        return [folder / FULL_WEIGHTS]
    if (folder / INDEX).is_file():
        return [folder / name for name in files_in_index(folder / INDEX)]
    raise ModelError(
        f"There is neither {FULL_WEIGHTS} nor {INDEX} in {folder}; it holds: {_folder_listing(folder)}."
    )


def files_in_index(index: Path) -> list[str]:
    """The file names that an index of weights lists. Raises `ModelError` if one of them is outside the index's folder."""
    weights = read_json(index).get("weight_map")
    names: list[Any] = list(weights.values()) if isinstance(weights, dict) else []  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
            raise ModelError(
                f"{index} lists {name!r:.80}; expected names of files in the same folder, without a path."
            )
    return sorted(set(names))


def hash_sample(digest: Any, path: Path) -> None:
    """Add a file's name, size, and content or a sample of its content to the digest."""
    size = path.stat().st_size
    digest.update(f"{path.name}|{size}|".encode())
    with path.open("rb") as file:
        if size <= WHOLE:
            digest.update(hashlib.file_digest(file, "sha256").digest())
            return
        for index in range(BLOCKS):
            file.seek(index * (size - BLOCK) // (BLOCKS - 1))
            digest.update(file.read(BLOCK))


LOADS_CODE = frozenset(
    {"auto_map", "custom_code", "custom_pipelines", "kernel_config", "kernel_mapping"}
)
"""Keys of a model's JSON files whose values name code to load."""
READS_FILES = frozenset(
    {"vocab_file", "merges_file", "tokenizer_file", "spm_file", "added_tokens_file"}
)
"""Keys of a tokenizer's JSON files whose values are paths."""
OF_HUB = frozenset({"backbone", "use_timm_backbone", "use_pretrained_backbone"})
"""Keys of a model's config that make transformers load a repository from the hub."""
IMPLEMENTATION = re.compile(r"(attn|experts)_implementation(_internal)?$")
"""Keys whose value names a kernel; transformers loads most of these from the hub."""


def check_sent(folder: Path) -> None:
    """Check a model folder uploaded by an untrusted user, before any library reads it.

    Raises ModelError if it names files outside of the folder, or code or repositories that would be loaded (an index with paths,
    `auto_map`, an attention or experts implementation other than `eager` and `sdpa`, a `backbone`), or if its model type is not a language
    model.
    """
    for path in sorted(folder.rglob("*.json")):
        if path.name.endswith(".index.json"):
            files_in_index(path)
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            content = None  # reported by the code that needs it
        if path.name == "config.json" and isinstance(content, dict):
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

            kind = cast("dict[str, Any]", content).get("model_type")
            if kind is not None and kind not in list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
                raise ModelError(
                    f"config.json of what was sent has 'model_type': {kind!r:.80}, which is not a language model that transformers knows."
                )
        for key, value in _json_entries(content):
            of_hub = key in OF_HUB and isinstance(value, str | int | float) and bool(value)
            of_hub |= bool(IMPLEMENTATION.search(key)) and not _is_plain_name(value)
            outside = key in READS_FILES and re.search(r"[/\\]", str(value))
            if (key in LOADS_CODE and value) or of_hub or outside:
                raise ModelError(
                    f"{path.name} of what was sent has {key!r}: {value!r:.80}. A model that is sent may name no code and no file outside "
                    "of its folder; remove the key, or ask the server's operator to put the model there."
                )


def _is_plain_name(value: Any) -> bool:
    """True if the value names no special kernel, neither for the model nor for a part of it."""
    if isinstance(value, dict):
        return all(_is_plain_name(inner) for inner in cast("dict[str, Any]", value).values())
    return value in (None, "eager", "sdpa")


def _json_entries(content: Any) -> Iterator[tuple[str, Any]]:
    """The keys and values of all objects in a JSON value, at any depth."""
    pending = [content]
    while pending:
        match pending.pop():
            case dict() as container:
                yield from cast("dict[str, Any]", container).items()
                pending += cast("dict[str, Any]", container).values()
            case list() as container:
                pending += cast("list[Any]", container)
            case _:
                pass


def read_json(path: Path) -> dict[str, Any]:
    """The object in a model's JSON file. Raises `ModelError` if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is damaged: it holds no JSON object.")
    return cast("dict[str, Any]", content)


@contextlib.contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise ModelError(
            f"There is no {path.name} in {path.parent}; it holds: {_folder_listing(path.parent)}."
        )
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is damaged or cannot be read: {error}. Restore it from a copy."
        ) from error


def _folder_listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.glob("*")) if folder.is_dir() else []
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") or "nothing"
