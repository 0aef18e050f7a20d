"""Merges an adapter into its base, into a model that needs neither peft nor the base.

The base is loaded in float32, the low-rank product is added in float32, and the sum is rounded once, to the number format of the result. A
layer that shares its weights with another one, such as an output head tied to the embeddings, gets its own weights, because the adapter
changed only that layer.

Training at a small learning rate may change weights by less than bfloat16 can represent. The share that survives the rounding is measured:
the slope of the realised change against the exact change, over all layers together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from transformers import AutoTokenizer

from groupwise.core.errors import ModelError
from groupwise.engine.models.adapters import check_adapter
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.experts import ByExpert, ExactLoraExperts
from groupwise.engine.models.files import disk_errors
from groupwise.engine.models.load import load_model, read_model_config
from groupwise.engine.models.lora import AdaptedModel, read_adapter
from groupwise.engine.models.lora_config import read_lora_config
from groupwise.engine.models.transformers_log import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ExportDtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Number format of an export; `auto`: that of the base's files."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Result of an export."""

    dtype: str
    """Its number format."""
    kept_share: float = 1.0
    """Share of the adapter's change that survived the rounding."""


def write_merged(
    model: ModelConfig,
    adapter: Path,
    into: Path,
    dtype: ExportDtype = "auto",
    *,
    keeping: float = 0.0,
) -> ExportResult:
    """Write the merged model into a folder. If its number format would keep less than the share `keeping` of the change, use float32.

    Raises `ModelError` if the adapter does not match this base, or is not plain LoRA; OSError if the files cannot be written.
    """
    merged = model.model_copy(update={"adapter": str(adapter), "adapter_revision": None})
    check_adapter(merged, LoraConfig(), "the adapter")
    base = load_model(model, "float32")
    format = _export_dtype(read_model_config(model), dtype)
    tensors = _add_adapter(base, adapter, format)
    if tensors < keeping:
        format, tensors = torch.float32, 1.0
    return replace(_write_model(base, format, into), kept_share=tensors)


def write_whole(weights: Path, into: Path, dtype: ExportDtype = "auto") -> ExportResult:
    """Write a model whose weights were all trained, in the requested number format; see `write_merged`."""
    config = ModelConfig(name=str(weights))
    return _write_model(
        load_model(config, "float32"), _export_dtype(read_model_config(config), dtype), into
    )


def stored_tokenizer(folder: Path) -> Any:
    """The tokenizer that is stored in a folder of weights."""
    with quiet():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _add_adapter(base: PreTrainedModel, adapter: Path, format: torch.dtype) -> float:
    """Compute W + scaling · B A for each layer that has an adapter. Returns the share of the change that `format` keeps."""
    config, tensors = read_lora_config(adapter), read_adapter(adapter)
    adapted = AdaptedModel(base, config)
    adapted.add("merged", trainable=False, seed=0)
    adapted.write("merged", tensors, str(adapter))
    changes: list[tuple[Any, str, ByExpert]] = []
    """Each layer, the name of its weight, and the adapter's A, B and scaling."""
    for layer in adapted.layers.values():
        owner = layer.get_base_layer()
        if isinstance(layer, ExactLoraExperts):
            changes.append((owner, layer.parameter_name, layer.by_expert("merged")))
        else:
            changes.append((owner, "weight", (*layer.factors("merged"), layer.scaling["merged"])))
    adapted.remove("merged")
    realised = exact = 0.0
    with torch.no_grad():
        for owner, name, (down, up, scaling) in changes:
            change = scaling * (up @ down)
            if isinstance(owner, nn.Linear):
                _untie(base, owner)
            elif owner.is_transposed:
                change = change.transpose(1, 2)
            weight = getattr(owner, name)
            merged = weight + change
            realised += float(((merged.to(format).float() - weight) * change).sum())
            exact += float((change * change).sum())
            weight.copy_(merged)
    return realised / exact if exact else 1.0


def _untie(base: PreTrainedModel, layer: nn.Linear) -> None:
    """Give a layer its own copy of the weights if other modules use the same ones."""
    modules = cast("nn.Module", base).modules()
    if sum(getattr(module, "weight", None) is layer.weight for module in modules) == 1:
        return
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    config: Any = base.config
    if not config.tie_word_embeddings:
        raise ModelError(
            f"{type(base).__name__} uses the weights of a layer twice in a way that its config does not mention; an adapter on that layer "
            "cannot be merged. Export the adapter."
        )
    config.tie_word_embeddings = False


def _export_dtype(stored: Any, dtype: ExportDtype) -> torch.dtype:
    if dtype != "auto":
        return getattr(torch, dtype)
    return getattr(stored, "dtype", None) or torch.float32


def _write_model(model: PreTrainedModel, dtype: torch.dtype, into: Path) -> ExportResult:
    cast("nn.Module", model).to(dtype)
    cast("Any", model.config).dtype = dtype
    model.config._name_or_path = ""  # it may be a path on this machine
    with disk_errors(into), quiet():
        model.save_pretrained(into)
    return ExportResult(str(dtype).removeprefix("torch."))
