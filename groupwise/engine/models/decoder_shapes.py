"""Computes the shapes of a Llama, Mistral, Qwen2 or Qwen3 from its config.json and nothing else.

A dry run and `groupwise check` need only counts and limits of a model, and torch and transformers' models take seconds to import.
`read_decoder` returns None if transformers might build another model from the file than this module counts: another family, a missing key,
anything unusual. The caller then builds the model without storage (`groupwise.engine.models.load.meta_model`); errors in the config are
reported there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.footprint import Counts, Sizes
from groupwise.engine.models.hub import fetch_config
from groupwise.engine.models.native.facts import FAMILIES
from groupwise.engine.models.tokenizer import locate

WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
ROTATIONS: Mapping[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
    },
}
"""Types of rotary positions, with the numbers that each needs in addition to its base."""
UNUSUAL = ("auto_map", "partial_rotary_factor", "quantization_config", "text_config")
"""Keys whose presence means that this module cannot count the model."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class DecoderShapes:
    """Shapes of a decoder that has a native form."""

    sizes: Sizes
    longest: int
    """Most tokens of a text that the model was trained for."""
    linear: Mapping[str, tuple[int, int]]
    """Inputs and outputs of all linear layers but the output head, by their paths in transformers' model."""
    other_parameters: int
    """Parameters outside of these layers: embeddings, an untied head, norms and biases."""
    in_bfloat16: bool

    def counts(self, config: ModelConfig, lora: LoraConfig | None) -> Counts | None:
        """Counts with this adapter; None if the config names a stored adapter, or if a target is not a linear layer of the model."""
        weights = sum(inputs * outputs for inputs, outputs in self.linear.values())
        trained = parameters = weights + self.other_parameters
        if lora is not None:
            paths = self._target_paths(lora)
            if config.adapter is not None or paths is None:
                return None
            trained = sum(lora.r * sum(self.linear[path]) for path in paths)
        return Counts(
            sizes=self.sizes,
            parameters=parameters,
            trained=trained,
            active=parameters,
            linear=weights,
            native=True,
            in_bfloat16=self.in_bfloat16,
            dropout=0.0 if lora is None else lora.dropout,
        )

    def _target_paths(self, lora: LoraConfig) -> set[str] | None:
        """The layers that the adapter changes, selected as peft does; None if a name matches no linear layer."""
        if lora.target_modules == "all-linear":
            return set(self.linear)
        paths: set[str] = set()
        for name in lora.target_modules:
            matches = {path for path in self.linear if f".{path}".endswith(f".{name}")}
            if not matches:
                return None
            paths |= matches
        return paths or None


def read_decoder(config: ModelConfig) -> DecoderShapes | None:
    """Shapes of the model, or None if they might be counted wrongly. Raises `ModelError` if its files cannot be located."""
    content = read_config(config)
    return None if content is None else _shapes(content)


def read_config(config: ModelConfig) -> dict[str, Any] | None:
    """The model's config.json, or None if transformers might build another model from it than this module counts. See `read_decoder`."""
    if config.trust_remote_code:
        return None
    resolved = locate(config)
    path = Path(resolved.location, "config.json")
    try:
        if not resolved.local:
            path = fetch_config(resolved.location, resolved.revision)
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    found = cast("dict[str, Any]", content)
    return None if _is_unusual(found) else found


def _is_unusual(config: Mapping[str, Any]) -> bool:
    """True if transformers might build another model from the config than `_shapes` counts."""
    family = config.get("model_type")
    if family not in FAMILIES or any(not _is_count(config.get(key)) for key in WHOLE_NUMBERS):
        return True
    heads, padding = config["num_attention_heads"], config.get("pad_token_id")
    types, size = config.get("layer_types"), config.get("head_dim")
    if size is None and family != "qwen3":
        size = config["hidden_size"] // heads
    if family == "mistral":
        sees_all = "sliding_window" in config and config["sliding_window"] is None and types is None
    else:
        full = ["full_attention"] * config["num_hidden_layers"]
        sees_all = types in (None, full) and config.get("use_sliding_window", False) is False
    return not (
        sees_all
        and config.get("hidden_act") == "silu"
        and isinstance(config.get("tie_word_embeddings"), bool)
        and all(isinstance(config.get(key, False), bool) for key in ("attention_bias", "mlp_bias"))
        and config["hidden_size"] % heads == heads % config["num_key_value_heads"] == 0
        and (_is_count(size) and size % 2 == 0)
        and (padding is None or (type(padding) is int and 0 <= padding < config["vocab_size"]))
        and config.get("torch_dtype", "float32") in ("float32", "bfloat16", "float16")
        and config.get("dtype", "float32") in ("float32", "bfloat16", "float16")
        and not {"dtype", "torch_dtype"} <= config.keys()
        and all(config.get(key) is None for key in UNUSUAL)
        and _has_plain_rotations(config)
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _has_plain_rotations(config: Mapping[str, Any]) -> bool:
    """True if rotary positions are not configured or are one of `ROTATIONS`, under the key of older or newer files."""
    scalings = [
        config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None
    ]
    if not scalings:
        return True
    if len(scalings) > 1 or not isinstance(scalings[0], dict):
        return False
    kind = scalings[0].get("rope_type", scalings[0].get("type"))
    numbers = scalings[0].keys() - {"rope_type", "type", "rope_theta"}
    return isinstance(kind, str) and numbers == ROTATIONS.get(kind)


def _shapes(config: Mapping[str, Any]) -> DecoderShapes:
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    sizes = Sizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_size=config.get("head_dim") or hidden // heads,
        inner=inner,
        vocabulary=config["vocab_size"],
    )
    of_a_layer = {
        "self_attn.q_proj": (hidden, sizes.queries),
        "self_attn.k_proj": (hidden, sizes.keys),
        "self_attn.v_proj": (hidden, sizes.keys),
        "self_attn.o_proj": (sizes.queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    biased: tuple[str, ...] = ATTENTION[:3] if family == "qwen2" else ()
    if family in ("llama", "qwen3") and config.get("attention_bias"):
        biased += ATTENTION
    if family == "llama" and config.get("mlp_bias"):
        biased += MLP
    biases = sum(
        outputs for path, (_, outputs) in of_a_layer.items() if path.partition(".")[2] in biased
    )
    norms = 2 * hidden + (2 * sizes.head_size if family == "qwen3" else 0)
    tables = 1 if config["tie_word_embeddings"] else 2
    return DecoderShapes(
        sizes=sizes,
        longest=config["max_position_embeddings"],
        linear={
            f"model.layers.{index}.{path}": shape
            for index in range(layers)
            for path, shape in of_a_layer.items()
        },
        other_parameters=tables * sizes.vocabulary * hidden + hidden + layers * (norms + biases),
        in_bfloat16=config.get("dtype", config.get("torch_dtype")) == "bfloat16",
    )
