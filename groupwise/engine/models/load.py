"""Loads the model that a config names into memory, on the right device and in the right number format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from groupwise.core.errors import ModelError
from groupwise.engine.models.config import Dtype, ModelConfig
from groupwise.engine.models.decoder_shapes import read_config
from groupwise.engine.models.experts import experts_of
from groupwise.engine.models.files import FULL_WEIGHTS, INDEX, read_json, read_model_tensors
from groupwise.engine.models.hub import OF_NATIVE_MODEL
from groupwise.engine.models.native.causal_lm import CausalLM, config_from_json
from groupwise.engine.models.native.facts import numba_works
from groupwise.engine.models.tokenizer import explaining_errors, locate, resolve
from groupwise.engine.models.transformers_log import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from groupwise.engine.models.native.causal_lm import CausalModel
    from groupwise.engine.models.native.weight_cache import WeightCache

GENERATION_CONFIG = "generation_config.json"


def load_base(config: ModelConfig, dtype: Dtype, device: str = "cpu") -> CausalModel:
    """The model for an adapter, or to sample it, as by `load_model`. On a CPU its modules are our own if it is of a native family, which
    saves seconds of imports."""
    base = _read_base(config, dtype) if device == "cpu" else None
    return load_model(config, dtype, device) if base is None else base


def _read_base(config: ModelConfig, dtype: Dtype) -> CausalLM | None:
    """The model in our own modules; None if they are not for its config or files. Then transformers loads it, or says why not."""
    resolved, content = locate(config), read_config(config)
    if content is None:
        return None
    try:
        folder = resolved.folder(OF_NATIVE_MODEL)
        if not any((folder / name).is_file() for name in (FULL_WEIGHTS, INDEX)):
            return None
        generation = folder / GENERATION_CONFIG
        cache = _weight_cache(folder, dtype)
        tensors = {} if cache is None else cache.tensors("matrices")
        stored = tensors or read_model_tensors(folder)
        stops = read_json(generation).get("eos_token_id") if generation.is_file() else None
    except ModelError:
        return None
    base = CausalLM(config_from_json(content, resolved.location), stops)
    if base.config.tie_word_embeddings and "lm_head.weight" in stored:
        return None  # transformers decides whether they are tied
    with explaining_errors(config, resolved, "model"):
        number_format = getattr(torch, dtype)
        # Cached tensors have this format already, also those that are not parameters.
        converted = tensors or {name: each.to(number_format) for name, each in stored.items()}
    if not base.take_tensors(converted):
        return None
    if cache is not None:
        cache.watch(base)
        base.weight_cache = cache
    return base


def _weight_cache(folder: Path, dtype: Dtype) -> WeightCache | None:
    """The cache of what is computed from the model's files; None if it has none."""
    if not numba_works():  # then there is no order for decoding
        return None
    from groupwise.engine.models.native.weight_cache import weight_cache_of

    return weight_cache_of(folder, dtype)


def load_model(config: ModelConfig, dtype: Dtype, device: str = "cpu") -> PreTrainedModel:
    """The model with its weights in transformers' modules, in evaluation mode; no parameter is trainable."""
    from transformers import AutoModelForCausalLM

    read_model_config(config)  # refuses kinds that cannot be loaded
    resolved = locate(config)
    with quiet(), explaining_errors(config, resolved, "model"):
        loaded = AutoModelForCausalLM.from_pretrained(
            resolved.location,
            dtype=getattr(torch, dtype),
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **resolved.arguments(),
        )
        model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
        # Transformers fills missing and mismatched tensors with random numbers.
        gaps = [*sorted(report["missing_keys"])]
        gaps += [
            f"{key} (stored as {tuple(stored)}, the config says {tuple(expected)})"
            for key, stored, expected in sorted(report["mismatched_keys"])
        ]
        if gaps:
            listed = ", ".join(gaps[:4]) + (", …" if len(gaps) > 4 else "")
            raise ValueError(
                f"{len(gaps)} of its tensors are missing or of another shape: {listed}"
            )
    model.requires_grad_(False)
    cast("nn.Module", model).to(device)  # modules move in place
    return model.eval()


def stored_tensors(model: CausalModel, folder: Path) -> dict[str, Tensor]:
    """The trained tensors of a whole model's files, by the names that they have in `model`.

    Transformers stores each expert by itself, as the model was published, and puts the experts of a layer together when it loads them.
    """
    if not experts_of(model):
        return read_model_tensors(folder)
    dtype = cast("Dtype", str(next(model.parameters()).dtype).removeprefix("torch."))
    loaded = load_model(ModelConfig(name=str(folder)), dtype)
    return dict(loaded.named_parameters())


def read_model_config(config: ModelConfig) -> PreTrainedConfig:
    """The config that comes with the model; no weights are read. Raises `ModelError` if it is not one of a causal language model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    resolved = locate(config)
    with quiet(), explaining_errors(config, resolved, "model"):
        found = AutoConfig.from_pretrained(
            resolved.location, trust_remote_code=config.trust_remote_code, **resolved.arguments()
        )
    if type(found) in AutoModelForCausalLM._model_mapping or config.trust_remote_code:
        return found
    kind = (
        "whose inputs include images or sound; rows here are tokens only"
        if found.get_text_config() is not found
        else "which transformers has not as a causal language model, one that continues a text"
    )
    raise ModelError(
        f"model.name {config.name!r} is a {found.model_type}, {kind}. Name a model of text, such as the language model of the same family: "
        "docs/how-to/your-own-model.md lists which work."
    )


def text_config_of(config: ModelConfig) -> dict[str, Any]:
    """The config of the model's text part as JSON, with transformers' defaults for its type."""
    hf_config = read_model_config(config)
    text = json.loads(hf_config.get_text_config().to_json_string(use_diff=False))
    # Only the whole model's config states whether the head is tied to the embedding.
    return {**text, "tie_word_embeddings": getattr(hf_config, "tie_word_embeddings", False)}


def meta_model(config: ModelConfig) -> CausalModel:
    """The model without storage for its weights (on the meta device), for names, shapes and counts."""
    content = read_config(config)
    if content is not None:
        return CausalLM(config_from_json(content, config.name))
    from transformers import AutoModelForCausalLM

    hf_config = read_model_config(config)
    with torch.device("meta"), quiet(), explaining_errors(config, resolve(config), "model"):
        return AutoModelForCausalLM.from_config(
            hf_config, trust_remote_code=config.trust_remote_code
        )


def model_folder(config: ModelConfig) -> Path:
    """The folder with the model's files, downloaded from the hub if necessary; see `groupwise.engine.models.hub.fetch_files`."""
    return locate(config).folder()


def stop_token_ids(model: CausalModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion, according to the model's config, its generation config, or the tokenizer."""
    return _stop_token_ids(model.config, model.generation_config, tokenizer)


def configured_stop_token_ids(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Like `stop_token_ids`, for a model that is not loaded."""
    from transformers import GenerationConfig

    resolved = locate(config)
    try:
        generation = GenerationConfig.from_pretrained(resolved.location, **resolved.arguments())
    except OSError:  # a generation config is optional
        generation = None
    return _stop_token_ids(read_model_config(config), generation, tokenizer)


def _stop_token_ids(*owners: object) -> tuple[int, ...]:
    ids: set[int] = set()
    for owner in owners:
        value = getattr(owner, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(ids))
