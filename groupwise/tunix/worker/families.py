"""The models that Tunix has: how one is described by transformers' `config.json`, and loaded; and what Tunix calls its linear layers.

What a family of Tunix would compute otherwise than transformers is refused, or mended here: its answers must be those of the model that
everybody else means by these files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from groupwise.errors import ModelError

Described = Mapping[str, Any]
"""The content of `config.json`; of a model with several parts that of its text."""

SEPARATE: Mapping[str, tuple[str, ...]] = {
    "attn.q_proj.w": ("self_attn.q_proj",),
    "attn.k_proj.w": ("self_attn.k_proj",),
    "attn.v_proj.w": ("self_attn.v_proj",),
    "attn.o_proj.w": ("self_attn.o_proj",),
    "mlp.gate_proj.kernel": ("mlp.gate_proj",),
    "mlp.up_proj.kernel": ("mlp.up_proj",),
    "mlp.down_proj.kernel": ("mlp.down_proj",),
}
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn.q_einsum.w": ("self_attn.q_proj",),
    "attn.kv_einsum.w": ("self_attn.k_proj", "self_attn.v_proj"),
    "attn.qkv_einsum.w": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.attn_vec_einsum.w": ("self_attn.o_proj",),
    **{name: layers for name, layers in SEPARATE.items() if name.startswith("mlp.")},
}
"""Weights of a layer by Tunix's names, and the layers of transformers that each of them is."""

GEMMA3_PATTERN = 6
"""One layer in so many sees everything, as Tunix has it."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one kind."""

    module: str
    """Of Tunix; has a module `model` and that of the loader."""
    loader: str
    weights: Mapping[str, tuple[str, ...]]
    config: Callable[[Any, Described, Any], Any]
    """From the module, `config.json` and the number format to Tunix's own config. Raises `ModelError`."""


def load(folder: Path, dtype: str, mesh: Any, *, remat: bool) -> tuple[Any, Family]:
    """A model with its weights, on the mesh; with `remat` its layers are computed again in the backward pass.

    Raises `ModelError` for what Tunix does not have, or not as transformers has it, and for files that lack weights.
    """
    described = _described(folder)
    family = family_of(described)
    code = import_module(f"{family.module}.model")
    number = jnp.dtype(dtype)
    config = family.config(code, described, number)
    if remat:
        config = replace(config, remat_config=code.RematConfig.DECODER)
    loader = import_module(f"{family.module}.{family.loader}")
    model = loader.create_model_from_safe_tensors(str(folder), config, mesh, number)
    _refuse_gaps(model, folder)
    return model, family


def _refuse_gaps(model: Any, folder: Path) -> None:
    """Tunix passes over what it cannot place, and leaves a weight that no file has without numbers."""
    hollow = [
        ".".join(map(str, path))
        for path, variable in nnx.to_flat_state(nnx.state(model))
        if not isinstance(variable.get_value(), jax.Array)
    ]
    if hollow:
        raise ModelError(
            f"{len(hollow)} weights are missing in {folder}, or Tunix has them by other names: {', '.join(hollow[:4])}."
        )


def family_of(described: Described) -> Family:
    """By `model_type`."""
    kind = described.get("model_type")
    found = FAMILIES.get(str(kind))
    if found is None:
        raise ModelError(
            f"model.backend tunix has no models of the type {kind!r}; it has: {', '.join(FAMILIES)}. "
            "Leave model.backend out to train it with torch."
        )
    return found


def _described(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "config.json").read_bytes())
    return {**content, **content.get("text_config", {})}


def _rope(described: Described) -> dict[str, Any]:
    """transformers 5 keeps all that is said of positions together; before, it stood beside each other."""
    told = described.get("rope_parameters") or described.get("rope_scaling") or {}
    return {"rope_theta": described.get("rope_theta"), **told}


def _refuse_scaled(rope: Mapping[str, Any]) -> None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in (None, "default"):
        raise ModelError(
            f"The positions of this model are scaled ({kind}), which Tunix does not compute, so that it would be another model. "
            "Leave model.backend out to train it with torch."
        )


def _separate(
    code: Any, described: Described, dtype: Any, tied: str, with_dtype: bool = True
) -> Any:
    rope = _rope(described)
    _refuse_scaled(rope)
    theta = float(rope["rope_theta"] or 10_000.0)
    if hasattr(code, "apply_rope"):
        # Its callers leave out the base that the config says, and mean 1,000,000.
        code.apply_rope = functools.partial(code.apply_rope, rope_theta=theta)
    heads = described["num_attention_heads"]
    formats = {"dtype": dtype, "param_dtype": dtype} if with_dtype else {}
    return code.ModelConfig(
        num_layers=described["num_hidden_layers"],
        vocab_size=described["vocab_size"],
        embed_dim=described["hidden_size"],
        hidden_dim=described["intermediate_size"],
        num_heads=heads,
        head_dim=described.get("head_dim") or described["hidden_size"] // heads,
        num_kv_heads=described.get("num_key_value_heads") or heads,
        rope_theta=theta,
        norm_eps=described["rms_norm_eps"],
        **{tied: described.get("tie_word_embeddings", False)},
        **formats,
    )


def _llama(code: Any, described: Described, dtype: Any) -> Any:
    if described.get("attention_bias") or described.get("mlp_bias"):
        raise ModelError(
            "This Llama has biases, which Tunix's has not. Leave model.backend out to train it with torch."
        )
    return _separate(code, described, dtype, "weight_tying", with_dtype=False)


def _qwen(code: Any, described: Described, dtype: Any) -> Any:
    if described.get("use_sliding_window"):
        raise ModelError(
            "This Qwen looks through sliding windows, which Tunix's does not. Leave model.backend out to train it with torch."
        )
    return _separate(code, described, dtype, "use_tied_embedding")


def _gemma3(code: Any, described: Described, dtype: Any) -> Any:
    rope = _rope(described)
    everywhere, nearby = (rope.get(name, {}) for name in ("full_attention", "sliding_attention"))
    factor = _linear_factor(everywhere or rope)
    _refuse_scaled(nearby)
    layers = described["num_hidden_layers"]
    _refuse_other_pattern(described.get("layer_types"), layers)
    heads, width = described["num_attention_heads"], described["hidden_size"]
    return code.ModelConfig(
        num_layers=layers,
        num_embed=described["vocab_size"],
        embed_dim=width,
        hidden_dim=described["intermediate_size"],
        num_heads=heads,
        head_dim=described["head_dim"],
        num_kv_heads=described["num_key_value_heads"],
        sliding_window_size=described["sliding_window"],
        local_base_frequency=nearby.get("rope_theta")
        or described.get("rope_local_base_freq", 10_000),
        global_base_frequency=everywhere.get("rope_theta") or rope["rope_theta"] or 1_000_000,
        global_scale_factor=factor,
        query_pre_attn_norm=_scaling_of_queries(code, described, width // heads),
        param_dtype=dtype,
    )


def _linear_factor(rope: Mapping[str, Any]) -> float:
    if rope.get("rope_type", rope.get("type")) == "linear":
        return float(rope["factor"])
    _refuse_scaled(rope)
    return 1.0


def _scaling_of_queries(code: Any, described: Described, by_width: int) -> Any:
    known = code.QueryPreAttentionNormalisation
    scalar = described["query_pre_attn_scalar"]
    if scalar == described["head_dim"]:
        return known.BY_ONE_OVER_SQRT_HEAD_DIM
    if scalar == by_width:
        return known.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
    raise ModelError(
        f"query_pre_attn_scalar is {scalar}; Tunix knows {described['head_dim']} (head_dim) and {by_width} (hidden_size by heads)."
    )


def _refuse_other_pattern(given: Any, layers: int) -> None:
    tunix = [
        "full_attention" if (layer + 1) % GEMMA3_PATTERN == 0 else "sliding_attention"
        for layer in range(layers)
    ]
    if given is not None and list(given) != tunix:
        raise ModelError(
            f"layer_types: Tunix's Gemma 3 sees everything in each {GEMMA3_PATTERN}th layer alone, this one in others, too. "
            "Leave model.backend out to train it with torch."
        )


FAMILIES: Mapping[str, Family] = {
    "gemma3_text": Family("tunix.models.gemma3", "params_safetensors", FUSED, _gemma3),
    "llama": Family("tunix.models.llama3", "params", SEPARATE, _llama),
    "qwen2": Family("tunix.models.qwen2", "params", SEPARATE, _qwen),
    "qwen3": Family("tunix.models.qwen3", "params", SEPARATE, _qwen),
}
"""By `model_type`. A model with pictures is one of them by its text."""
