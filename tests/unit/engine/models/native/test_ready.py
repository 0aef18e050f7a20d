"""Engines that have been made have all kernels that they will call: nothing is left to compile in processes that are forked then."""

from __future__ import annotations

import asyncio
from typing import Any

import numba
import pytest
import torch

from groupwise.algorithms.registry import make
from groupwise.core.types import GroupRequest, Row, SamplingParams
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.native import kernels, products, text_attention
from groupwise.engine.models.tiny import tiny_tokenizer
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedAdapter
from tests.unit.engine.models.native.families import adapted, family

CACHED_KERNELS = {
    kernels: ("norm", "norm_gradient", "swiglu", "swiglu_gradient", "attend", "quantize"),
    products: ("narrow", "product"),
    text_attention: ("forward", "backward", "finish"),
}
FORMATS = [torch.bfloat16, torch.float32]


@pytest.fixture
def called(monkeypatch) -> set[tuple[str, ...]]:
    """Kernels, with the types of their arguments, for each of which there is code of its own."""
    found: set[tuple[str, ...]] = set()

    def told(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            found.add((name, *(str(numba.typeof(each)) for each in arguments)))
            return function(*arguments)

        return call

    for module, names in CACHED_KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, told(name, getattr(module, name)))
    return found


@pytest.mark.parametrize(
    "int8",
    [False, pytest.param(True, marks=pytest.mark.skipif(not products.HAS_VNNI, reason="no VNNI"))],
)
@pytest.mark.parametrize("numbers", FORMATS)
def test_a_sampler(called, numbers, int8):
    weights = ServedAdapter(adapted(family("qwen3", dtype=numbers)))
    weights.native(int8=int8)
    called.clear()
    sampler = TorchSampler(weights, tiny_tokenizer(), DecodeLayout(8, 32), int8=int8)
    before = {*called}
    request = GroupRequest(0, (5, 6, 7, 8), (1, 2, 3), SamplingParams(12))
    asyncio.run(sampler.generate(request))
    used = {"norm", "swiglu", "attend", "product"} | ({"quantize"} if int8 else set())
    assert {name for name, *_ in called} == used
    assert called == before


@pytest.mark.parametrize("numbers", FORMATS)
def test_a_learner(called, numbers, tmp_path):
    settings = new_lora_config(LoraConfig(r=4, alpha=8))
    weights = TrainedAdapter(AdaptedModel(family("qwen3", dtype=numbers), settings), seed=1)
    weights.native()
    called.clear()
    learner = TorchLearner(
        weights, run="r", publish_folder=tmp_path, max_tokens_per_microbatch=4096, seed=1
    )
    before = {*called}
    rows = [Row((5, 6, 7), (8, 9, 10), (1,) * 3, (-5.0,) * 3, sign, 1.0) for sign in (-1.0, 1.0)]
    loss = make("dr_grpo", {}).loss_spec()
    asyncio.run(learner.forward_backward(rows, loss, {"policy": 6.0}))
    between = {"norm", "norm_gradient", "swiglu", "swiglu_gradient"}
    assert {name for name, *_ in called} == between | {"forward", "backward", "finish"}
    assert called == before
