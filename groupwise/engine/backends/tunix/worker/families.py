"""Tunix's model families: how transformers' `config.json` describes one, how it is loaded, and Tunix's names of its linear layers.

Differences between Tunix's and transformers' computation of a family are corrected here, or have been refused
(`groupwise.engine.backends.tunix.fits`): results must be those of the model that other programs load from the same files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from groupwise.engine.backends.tunix.fits import HfConfig

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
"""Tunix's names of a layer's weights, with the transformers layers that each consists of; `SEPARATE` likewise."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one architecture."""

    module: str
    """A package of Tunix; it contains a module `model` and the loader's module."""
    loader: str
    weights: Mapping[str, tuple[str, ...]]
    config: Callable[[Any, HfConfig, Any], Any]
    """Makes Tunix's own config from the `model` module, the model's config and the number format."""


def load(folder: Path, hf_config: HfConfig, dtype: str, mesh: Any) -> tuple[Any, Family]:
    """Load a model with its weights onto the mesh."""
    family = FAMILIES[hf_config["model_type"]]
    code = import_module(f"{family.module}.model")
    number = jnp.dtype(dtype)
    config = family.config(code, hf_config, number)
    loader = import_module(f"{family.module}.{family.loader}")
    return loader.create_model_from_safe_tensors(str(folder), config, mesh, number), family


def _rotary_config(
    code: Any, hf_config: HfConfig, dtype: Any, tied: str, with_dtype: bool = True
) -> Any:
    theta = float(hf_config["rope_parameters"]["rope_theta"])
    if hasattr(code, "apply_rope"):
        # Tunix's callers omit the config's base, and the default is 1,000,000.
        code.apply_rope = functools.partial(code.apply_rope, rope_theta=theta)
    heads = hf_config["num_attention_heads"]
    formats = {"dtype": dtype, "param_dtype": dtype} if with_dtype else {}
    return code.ModelConfig(
        num_layers=hf_config["num_hidden_layers"],
        vocab_size=hf_config["vocab_size"],
        embed_dim=hf_config["hidden_size"],
        hidden_dim=hf_config["intermediate_size"],
        num_heads=heads,
        head_dim=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        num_kv_heads=hf_config.get("num_key_value_heads") or heads,
        rope_theta=theta,
        norm_eps=hf_config["rms_norm_eps"],
        **{tied: hf_config.get("tie_word_embeddings", False)},
        **formats,
    )


def _gemma3(code: Any, hf_config: HfConfig, dtype: Any) -> Any:
    rope = hf_config["rope_parameters"]
    everywhere, nearby = rope["full_attention"], rope["sliding_attention"]
    scalings = code.QueryPreAttentionNormalisation
    by_head = hf_config["query_pre_attn_scalar"] == hf_config["head_dim"]
    return code.ModelConfig(
        num_layers=hf_config["num_hidden_layers"],
        num_embed=hf_config["vocab_size"],
        embed_dim=hf_config["hidden_size"],
        hidden_dim=hf_config["intermediate_size"],
        num_heads=hf_config["num_attention_heads"],
        head_dim=hf_config["head_dim"],
        num_kv_heads=hf_config["num_key_value_heads"],
        sliding_window_size=hf_config["sliding_window"],
        local_base_frequency=nearby["rope_theta"],
        global_base_frequency=everywhere["rope_theta"],
        global_scale_factor=float(everywhere.get("factor") or 1.0),
        query_pre_attn_norm=scalings.BY_ONE_OVER_SQRT_HEAD_DIM
        if by_head
        else scalings.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        param_dtype=dtype,
    )


_llama = functools.partial(_rotary_config, tied="weight_tying", with_dtype=False)
_qwen = functools.partial(_rotary_config, tied="use_tied_embedding")

FAMILIES: Mapping[str, Family] = {
    "gemma3_text": Family("tunix.models.gemma3", "params_safetensors", FUSED, _gemma3),
    "llama": Family("tunix.models.llama3", "params", SEPARATE, _llama),
    "qwen2": Family("tunix.models.qwen2", "params", SEPARATE, _qwen),
    "qwen3": Family("tunix.models.qwen3", "params", SEPARATE, _qwen),
}
"""Families by `model_type`. A model with images is listed by the type of its text part."""
