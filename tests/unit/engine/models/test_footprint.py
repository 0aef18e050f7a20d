"""What is planned is what the engines hold: their own tensors are measured, byte for byte where that is possible.

1. A native model beside the model's own weights, packed or not, in each number format.
2. Keys and values of the sampler on a processor, while they grow, with those of prompts.
3. An engine of our own is counted on exactly where it would be chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Mamba2Config

from groupwise.core.errors import ModelError
from groupwise.engine.models.footprint import (
    Counts,
    Decoding,
    bytes_of,
    footprint_of,
    native_cache,
    native_copies,
    sizes_of,
)
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.native.cache import CompletionCache, NativePrompt
from groupwise.engine.sampler.native.engine import NativeEngine
from groupwise.engine.sampler.weights import ServedModel
from tests.unit.engine.models.native.families import made, text

CONFIG: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "pad_token_id": 0,
}  # fmt: skip
"""Heads of no whole vector, so that rows of values have room for more."""
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
DECODING = Decoding(slots=16, key_length=180, completion=140, prompts=2, prompt=40)


def model_of(dtype: str, **changes: Any) -> Any:
    return made(LlamaConfig(**CONFIG, **changes), dtype=getattr(torch, dtype), noise=0.02)


SIZES = sizes_of(LlamaConfig(**CONFIG))


def memory_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Where tensors lie, and how many bytes are there; each place once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def memory_of_native(native: NativeModel) -> dict[int, int]:
    found = memory_of(linear.weight_OI for linear in native.products)
    for linear in native.products:
        if linear._packed is not None:
            weights = linear._packed._weights
            found[weights.ctypes.data] = weights.nbytes
    return found


# Weights


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    ("dtype", "published", "packed"), [("float32", "float32", 4), ("float32", "bfloat16", 2)]
)
def test_a_native_model_beside_the_model(dtype, published, packed, packs):
    model = model_of(published).to(getattr(torch, dtype))
    before = memory_of(model.parameters())
    native = NativeModel(model)
    if packs:
        native.pack()
    held = memory_of(model.parameters()) | memory_of_native(native)
    planned = native_copies(SIZES, bytes_of(dtype), packed if packs else 0)
    assert sum(held.values()) - sum(before.values()) == planned


# Keys and values


@DTYPES
@torch.inference_mode()
def test_a_cache_of_a_processor_at_its_largest(dtype):
    """The moment at which it is copied for the last time, with the prompts that its rows have."""
    model = model_of(dtype)
    weights = ServedModel(model)
    native = weights.native()
    assert native is not None
    engine = NativeEngine(native, weights)
    prompts = [engine.prefill(text(DECODING.prompt, seed=seed).tolist()) for seed in (1, 2)]
    cache = CompletionCache(native)
    peak = before = 0
    for written in range(1, DECODING.completion):
        cache.reserve(DECODING.slots, written)
        now = cache.keys_LBKDS.nbytes + cache.values_LBTD.nbytes
        peak = max(peak, now + before if now > before else 0)
        before = now
    for prompt in prompts:
        assert isinstance(prompt, NativePrompt)
        peak += prompt.keys_LJKDS.nbytes + prompt.values_LJPD.nbytes
    assert native_cache(SIZES, bytes_of(dtype), DECODING) == peak


def test_a_model_without_attention_is_refused():
    with pytest.raises(ModelError, match="mamba2 has no layers of attention"):
        sizes_of(Mamba2Config())


# Which engines


@pytest.mark.parametrize(("given", "sampler", "learner", "packed"), [
    ({}, True, True, 4), ({"dtype": "bfloat16"}, True, True, 2), ({"in_bfloat16": True}, True, True, 2),
    ({"in_bfloat16": True, "full": True}, True, False, 4), ({"device": "cuda"}, True, True, 0), ({"full": True}, True, False, 4),
    ({"dropout": 0.1}, True, False, 4), ({"by_modules": True}, True, False, 4), ({"samples": False}, False, True, 0),
    ({"native": False}, False, False, 0),
])  # fmt: skip
def test_native_engines_where_they_would_be_chosen(given, sampler, learner, packed):
    counts = {"native": True, "in_bfloat16": False, "dropout": 0.0}
    asked = {
        "dtype": "float32", "device": "cpu", "full": False, "by_modules": False, "samples": True,
    }  # fmt: skip
    counts, asked = ({k: given.get(k, v) for k, v in each.items()} for each in (counts, asked))
    sizes = {"sizes": SIZES, "parameters": 9, "trained": 9, "active": 9, "linear": 9}
    found = footprint_of(Counts(**sizes, **counts), **asked)
    assert (found.native_sampler, found.native_learner, found.packed) == (sampler, learner, packed)
