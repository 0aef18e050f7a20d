"""Small models of the families that are computed natively, with weights so large that every part of them matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.native.causal_lm import CausalLM, config_from_json

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _rope(kind: str, **numbers: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0, **numbers}


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama-mha-tied": lambda: LlamaConfig(
        **{**SMALL, "num_key_value_heads": 4}, tie_word_embeddings=True
    ),
    "llama-mqa": lambda: LlamaConfig(**{**SMALL, "num_key_value_heads": 1}, head_dim=16),
    "llama-128": lambda: LlamaConfig(**SMALL, head_dim=128),
    "llama-biases": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama-llama3": lambda: LlamaConfig(
        **SMALL,
        rope_parameters=_rope(
            "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
    "llama-linear": lambda: LlamaConfig(**SMALL, rope_parameters=_rope("linear")),
    "llama-yarn": lambda: LlamaConfig(
        **SMALL, rope_parameters=_rope("yarn", original_max_position_embeddings=32)
    ),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=None, head_dim=8),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen2-tied": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "qwen3-biases": lambda: Qwen3Config(**SMALL, head_dim=4, attention_bias=True),
}
"""A config of each kind; heads of 4, 8, 16 and 128 numbers, one to four queries for each key."""


def made(config: Any, *, dtype: torch.dtype = torch.float32, noise: float = 0.15) -> Any:
    """A model whose every weight, also of norms and biases, is off what it was initialised with."""
    generator = torch.Generator().manual_seed(7)
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.random.set_rng_state(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return model.to(dtype)


def in_own_modules(model: Any) -> CausalLM:
    """A copy of a transformers model in our own modules, with the same weights."""
    own = CausalLM(config_from_json(model.config.to_dict(), ""))
    assert own.take_tensors(model.state_dict())
    return own


def family(name: str, **how: Any) -> Any:
    """The model of `FAMILIES`."""
    return made(FAMILIES[name](), **how)


def randomised(adapted: AdaptedModel, name: str, size: float = 0.1, seed: int = 3) -> None:
    """Give an adapter weights that are far from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters(name).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def adapted(model: PreTrainedModel, targets: Any = "all-linear", rank: int = 4) -> AdaptedModel:
    """The model with an adapter `policy` that changes a lot."""
    found = AdaptedModel(
        model, new_lora_config(LoraConfig(r=rank, alpha=2 * rank, target_modules=targets))
    )
    found.add("policy", trainable=False, seed=0)
    randomised(found, "policy")
    return found


def text(length: int, vocabulary: int = SMALL["vocab_size"], seed: int = 0) -> Tensor:
    """Token ids [length]."""
    return torch.randint(
        3, vocabulary, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)
    )


@torch.no_grad()
def own_logits(model: Any, ids_N: Tensor) -> Tensor:
    """By transformers' own forward, [N, V] in float32."""
    return model(input_ids=ids_N[None], use_cache=False).logits[0].float()
