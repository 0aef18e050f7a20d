"""What is planned is what the engines hold: their own tensors are measured, byte for byte where that is possible.

1. A native model beside the model's own weights, packed or not, in each number format; and one that replaces another.
2. Keys and values of each engine of the sampler, while they grow, with those of prompts.
3. What a layer keeps for its backward pass, with and without recomputation.
4. An engine of our own is counted on exactly where it would be chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from groupwise.learner.native import body
from groupwise.learner.native.layout import flat
from groupwise.models.footprint import (
    Footprint,
    bytes_of,
    footprint_of,
    native_activations,
    native_anew,
    native_cache,
    native_copies,
    sizes_of,
)
from groupwise.models.native.weights import NativeModel
from groupwise.models.plan import Decoding
from groupwise.sampler.native.cache import NativePrompt, OwnCache
from groupwise.sampler.native.engine import NativeEngine
from groupwise.sampler.native.graph_engine import CopiedPrompt, GraphEngine
from groupwise.sampler.native.recording import plainly
from groupwise.sampler.slot_engine import CachedPrompt, SlotEngine
from groupwise.sampler.weights import ServedModel
from groupwise.types import Row
from tests.unit.models.native.families import made, text

CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "pad_token_id": 0,
}
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
    ("dtype", "published", "packed"),
    [("float32", "float32", 4), ("float32", "bfloat16", 2)],
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


def test_a_native_model_that_replaces_another():
    model = model_of("float32")
    old = NativeModel(model)
    old.pack()
    before = memory_of(model.parameters()) | memory_of_native(old)
    new = NativeModel(model, check=False)
    new.pack()
    held = before | memory_of(model.parameters()) | memory_of_native(new)
    assert sum(held.values()) - sum(before.values()) == native_anew(SIZES, 4, 4)


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
    cache = OwnCache(native)
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


@pytest.mark.parametrize("native", [True, False])
@DTYPES
@torch.inference_mode()
def test_slots_of_a_fixed_length(dtype, native, monkeypatch):
    monkeypatch.setattr(NativeModel, "pack", lambda self: None)
    model = model_of(dtype)
    weights = ServedModel(model)
    held = Footprint(
        sizes=SIZES,
        size=bytes_of(dtype),
        full=True,
        on_cpu=False,
        samples=True,
        native_sampler=native,
        native_learner=False,
        packed=0,
    )
    asked = [text(DECODING.prompt, seed=seed).tolist() for seed in (1, 2)]
    if native:
        found = weights.native()
        assert found is not None
        graph = GraphEngine(found, weights, DECODING.slots, DECODING.key_length, plainly)
        tensors = [graph._keys_LSJTD, graph._values_LSJTD, graph._logits_SV]
        for prompt in map(graph.prefill, asked):
            assert isinstance(prompt, CopiedPrompt)
            tensors += [prompt.keys_LJPD, prompt.values_LJPD]
    else:
        slots = SlotEngine(weights, DECODING.slots, DECODING.key_length)
        prompts = [slots.prefill(ids) for ids in asked]
        slots.begin(prompts[0])
        tensors = [*slots._cache.keys, *slots._cache.values]
        for prompt in prompts:
            assert isinstance(prompt, CachedPrompt)
            tensors += [*prompt.cache.keys, *prompt.cache.values]
    assert sum(tensor.nbytes for tensor in tensors) == held.cache(DECODING)


# Activations


@DTYPES
@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_layer_keeps(dtype, recompute, monkeypatch):
    kept: list[Any] = []
    original = body._Body.forward

    def forward(ctx: Any, *given: Any) -> Tensor:
        found = original(ctx, *given)
        kept.extend(ctx.kept)
        return found

    monkeypatch.setattr(body._Body, "forward", staticmethod(forward))
    prompt, completion = text(30).tolist(), text(20).tolist()
    row = Row(tuple(prompt), tuple(completion), (1,) * 20, (0.0,) * 20, 0.0, 1.0)
    batch = flat([row, row], [[0, 1]])
    body.residual_stream(NativeModel(model_of(dtype)), batch, {}, recompute=recompute)
    layers = [
        [layer] if isinstance(layer, Tensor) else [getattr(layer, f.name) for f in fields(layer)]
        for layer in kept
    ]
    held = [sum(t.nbytes for t in layer if isinstance(t, Tensor)) for layer in layers]
    assert len(held) == SIZES.layers

    def planned(count: int) -> int:
        sizes = replace(SIZES, layers=count)
        return native_activations(sizes, bytes_of(dtype), recompute=recompute)

    assert sum(held) == batch.tokens * (planned(2 * SIZES.layers) - planned(SIZES.layers))


# Which engines


@pytest.mark.parametrize(
    ("given", "sampler", "learner", "packed"),
    [
        ({}, True, True, 4),
        ({"dtype": "bfloat16"}, True, True, 2),
        ({"published": "bfloat16", "full": True}, True, False, 4),
        ({"device": "cuda"}, True, True, 0),
        ({"full": True}, True, False, 4),
        ({"dropout": True}, True, False, 4),
        ({"samples": False}, False, True, 0),
        ({"activation": "gelu"}, False, False, 0),
    ],
)
def test_native_engines_where_they_would_be_chosen(given, sampler, learner, packed):
    found = engines(**given)
    assert (found.native_sampler, found.native_learner, found.packed) == (sampler, learner, packed)


def engines(
    dtype: str = "float32",
    published: str = "float32",
    device: str = "cpu",
    activation: str = "silu",
    **given: bool,
) -> Footprint:
    config = LlamaConfig(**CONFIG, dtype=published, hidden_act=activation)
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(config)
    asked = {"full": False, "dropout": False, "samples": True, **given}
    return footprint_of(config, hollow, dtype=dtype, device=device, **asked)
