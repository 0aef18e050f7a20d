"""The adapter that a run starts from (`model.adapter`), checked before any weights are loaded.

The adapter decides its own shape: keys of `lora` that are set as well must agree with it. Names and shapes of its tensors are compared
with those of the model, which is built without storage (on the meta device) for this.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from groupwise.core.errors import ModelError
from groupwise.engine.models import config as settings_of_models
from groupwise.engine.models.bundled import BUNDLED
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.files import read_shapes
from groupwise.engine.models.hub import fetch_files, may_be_hub_id
from groupwise.engine.models.load import meta_model, read_model_config
from groupwise.engine.models.lora import (
    AdaptedModel,
    all_linear_names,
    refuse_mismatch,
    shapes_of,
)
from groupwise.engine.models.lora_config import (
    WEIGHTS,
    AdapterConfig,
    new_lora_config,
    read_lora_config,
)
from groupwise.engine.models.tokenizer import resolve

logger = logging.getLogger(__name__)


def adapter_folder(model: ModelConfig) -> Path | None:
    """The folder of `model.adapter`, downloaded from the hub if necessary; None if no adapter is configured.

    Raises `ModelError` if it cannot be obtained, or holds no plain LoRA adapter.
    """
    if model.adapter is None:
        return None
    if _is_on_hub(model.adapter):
        folder = _from_hub(model)
    elif model.adapter_revision is not None:
        raise ModelError(
            f"model.adapter_revision is {model.adapter_revision!r}, but it has no effect: {model.adapter!r} is a path on "
            "this machine, which has no revisions. Leave the key out, or give a hub id (OWNER/NAME) as model.adapter."
        )
    else:
        folder = Path(model.adapter).expanduser()
    read_lora_config(folder)
    return folder


def adapter_commit(model: ModelConfig) -> str | None:
    """The commit of a `model.adapter` from the hub; None for a local one, or without an adapter."""
    if model.adapter is None or not _is_on_hub(model.adapter):
        return None
    return _from_hub(model).name  # …/snapshots/<commit>


def _is_on_hub(adapter: str) -> bool:
    return may_be_hub_id(adapter) and not Path(adapter).exists()


def _from_hub(model: ModelConfig) -> Path:
    name, at, revision = (model.adapter or "").partition("@")
    if at:
        raise ModelError(
            f"model.adapter is {model.adapter!r}; a revision has a key of its own here. Write model.adapter={name} and "
            f"model.adapter_revision={revision or 'main'}."
        )
    reference = f"{name}@{model.adapter_revision}" if model.adapter_revision else name
    try:
        return _fetched_once(reference)
    except ModelError as error:
        raise ModelError(
            f"model.adapter: there is no folder {name!r} (looked in {Path.cwd()}).\nAs a hub id: {error}"
        ) from error


@cache
def _fetched_once(reference: str) -> Path:
    """Cached, so that one process uses one commit even if the branch moves meanwhile."""
    return fetch_files(reference)


def check_adapter(
    model: ModelConfig,
    lora: settings_of_models.LoraConfig | None,
    given_as: str = "model.adapter",
) -> None:
    """Raise `ModelError` unless a run with this config can start from `model.adapter`; null is always fine.

    `given_as` is the adapter's name in messages.
    """
    if model.adapter is not None and lora is None:
        raise ModelError(
            f"{given_as} is an adapter, but lora is null: all weights are trained, and an adapter has no part in that. "
            "Merge the adapter into the model first, or train it with lora: {}."
        )
    folder = adapter_folder(model)
    if folder is None or lora is None:
        return
    adapted = meta_adapter(model, starting_config(model, lora, given_as))
    if "target_modules" in lora.model_fields_set:
        fresh = new_lora_config(lora)
        fresh.target_parameters = adapted.config.target_parameters
        if adapted.config.exclude_modules:
            leave_out_pictures(model, fresh)
        expected_layers, stored = set(meta_adapter(model, fresh).layers), set(adapted.layers)
        different = [
            f"lora.target_modules {verb} {len(layers)} layers that the adapter {fact} ({', '.join(sorted(layers)[:3])} …)"
            for verb, fact, layers in (
                ("names", "leaves alone", expected_layers - stored),
                ("leaves out", "has", stored - expected_layers),
            )
            if layers
        ]
        _refuse_if_different(f"{given_as} {folder}", different)
    owned = shapes_of(adapted.parameters("hollow"))
    refuse_mismatch(owned, read_shapes(folder / WEIGHTS), str(folder / WEIGHTS))


def starting_config(
    model: ModelConfig, lora: settings_of_models.LoraConfig, given_as: str = "model.adapter"
) -> AdapterConfig:
    """The config of the adapter to train: that of the configured adapter, or else a new one. Its base name is set."""
    folder = adapter_folder(model)
    if folder is None:
        config = new_lora_config(lora)
    else:
        config = read_lora_config(folder)
        stored: dict[str, Any] = {
            "r": config.r,
            "alpha": config.lora_alpha,
            "rslora": config.use_rslora,
            "dropout": config.lora_dropout,
            "target_parameters": tuple(sorted(config.target_parameters or ())),
        }
        given = {**lora.model_dump(), "target_parameters": tuple(sorted(lora.target_parameters))}
        different = [
            f"lora.{key} is {given[key]}, but the adapter's is {value}"
            for key, value in stored.items()
            if key in lora.model_fields_set and given[key] != value
        ]
        _refuse_if_different(f"{given_as} {folder}", different)
    config.base_model_name_or_path = base_name(model)
    return config


def leave_out_pictures(model: ModelConfig, config: AdapterConfig) -> None:
    """Restrict the adapter to the text part of a model with several parts, here and in the file that peft loads elsewhere."""
    hf_config = read_model_config(model)
    if hf_config.get_text_config() is hf_config:
        return
    base = meta_model(model)
    text = next(path for path, part in base.named_modules() if part is base.get_decoder())
    config.exclude_modules = rf"(?!{re.escape(text)}\.).*"
    if config.target_modules == "all-linear":  # peft would include the names of all parts
        config.target_modules = all_linear_names(base, base.get_decoder())


def meta_adapter(model: ModelConfig, config: AdapterConfig) -> AdaptedModel:
    """The model with one adapter, called `hollow`; neither has storage."""
    base = meta_model(model)  # may prepare a bundled model, which loads real weights
    with torch.device("meta"):
        adapted = AdaptedModel(base, config)
        adapted.add("hollow", trainable=True, seed=0)
    return adapted


def base_name(model: ModelConfig) -> str:
    """The base's name in files: its hub id if it has one, else the config's name. Never a cache path of this machine."""
    return BUNDLED[model.name].hub_id if model.name in BUNDLED else model.name


def warn_of_other_base(config: AdapterConfig, model: ModelConfig, folder: Path) -> None:
    """Warn if an adapter names another model as its base."""
    named = config.base_model_name_or_path
    base_names = {base_name(model), model.name, resolve(model).location}
    if (
        named
        and named not in base_names
        and _resolved_path(named) not in map(_resolved_path, base_names)
    ):
        logger.warning(
            "the adapter %s names %s as its base, but model.name is %s: on another base it means nothing",
            folder,
            named,
            model.name,
        )


def _resolved_path(name: str) -> Path:
    return Path(name).expanduser().resolve()


def _refuse_if_different(adapter: str, different: list[str]) -> None:
    if different:
        raise ModelError(
            f"{adapter}: {'; '.join(different)}. Leave these keys out: the adapter decides, by its "
            "adapter_config.json."
        )
