"""Kernels of attention are chosen for a call, and not for the process. A GPU compares their results: `tests/gpu`."""

from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from groupwise.engine.learner.native import fused_attention
from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.models import decoder as decoder_module
from groupwise.engine.models import varlen
from groupwise.engine.models.attention_kernels import pinned_kernels
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.native.weights import Shape
from groupwise.engine.models.text_mask import TextMask
from groupwise.engine.sampler.native import graph_engine
from groupwise.engine.sampler.native.graph_engine import GraphEngine
from groupwise.engine.sampler.native.recording import run_eagerly
from groupwise.engine.sampler.weights import ServedModel
from tests.unit.engine.models.native.families import SMALL, family

GPU = torch.device("cuda")
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MODELS = {
    "llama": lambda heads: LlamaForCausalLM(LlamaConfig(**SMALL | {"num_key_value_heads": heads})),
    "qwen3_next": lambda heads: Qwen3NextForCausalLM(
        Qwen3NextConfig(**SMALL | LINEAR | {"num_key_value_heads": heads, "head_dim": 8})
    ),
}


def switches() -> tuple[bool, ...]:
    kinds = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled)
    return tuple(enabled() for enabled in (*kinds, cuda.math_sdp_enabled))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_model_of_one_key_head_does_without_the_efficient_kernel(monkeypatch, family, heads):
    monkeypatch.setattr(
        decoder_module, "pinned_kernels", lambda _, **options: pinned_kernels(GPU, **options)
    )
    decoder, before = Decoder(MODELS[family](heads).eval()), switches()
    seen: set[tuple[bool, ...]] = set()
    body: Any = decoder.body
    for layer in body.layers:
        layer.register_forward_hook(lambda *_: seen.add(switches()))
    positions = torch.arange(3)[None]
    with torch.no_grad():
        decoder.hidden(torch.tensor([[3, 4, 5]]), positions, TextMask(3), None)
        decoder.advance(torch.tensor([[3, 4, 5]]), 0, None)
    assert seen == {(True, heads > 1, False, True)}
    assert switches() == before


@torch.inference_mode()
def test_attention_to_pages_without_triton_takes_the_same_kernels(monkeypatch):
    weights = ServedModel(family("qwen3"))
    model = weights.native()
    assert model is not None
    engine = GraphEngine(model, weights, 2, 80, run_eagerly)
    engine.add_row(engine.prefill([3, 4, 5]))
    seen: list[tuple[bool, ...]] = []
    attention = F.scaled_dot_product_attention

    def attend(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(switches())
        return attention(*arguments, **options)

    monkeypatch.setattr(graph_engine, "pinned_kernels", lambda _: pinned_kernels(GPU))
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    before = switches()
    engine.decode([6])
    assert seen == [(True, True, False, True)] * len(model.layers)
    assert switches() == before


def test_a_processor_keeps_its_own():
    before = switches()
    with pinned_kernels(torch.device("cpu"), one_key_head=True):
        assert switches() == before


class Kernel(torch.autograd.Function):
    """In place of a kernel of attention: its backward pass notes torch's mode, and may fail."""

    modes: ClassVar[list[int]] = []
    fails = False

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return queries + keys + values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        Kernel.modes.append(torch.get_deterministic_debug_mode())
        if Kernel.fails:
            raise torch.OutOfMemoryError("no memory")
        return gradients * 3


@pytest.fixture
def modes(monkeypatch) -> list[int]:
    monkeypatch.setattr(Kernel, "modes", [])
    kernel: Any = lambda *given, **_: Kernel.apply(*given[:3])  # noqa: E731
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: kernel)
    return Kernel.modes


@pytest.mark.parametrize("fails", [False, True])
def test_the_gradient_of_packed_texts_is_deterministic(monkeypatch, modes, fails):
    monkeypatch.setattr(Kernel, "fails", fails)
    queries, keys, values = (torch.ones(3, 2, 8, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, 3], dtype=torch.int32)
    refused = pytest.raises(torch.OutOfMemoryError) if fails else nullcontext()
    with refused, pinned_kernels(GPU):
        found = varlen.attention(queries, keys, values, (ends, ends), (3, 3)) * queries
        assert torch.get_deterministic_debug_mode() == 0
        found.sum().backward()
        assert torch.get_deterministic_debug_mode() == 0
    assert modes == [2]
    assert torch.get_deterministic_debug_mode() == 0


def test_the_gradient_of_padded_texts_is_deterministic(monkeypatch, modes):
    monkeypatch.setattr(fused_attention, "_attention_output", Kernel.apply)
    shape = Shape(hidden=16, heads=2, kv_heads=2, head_size=8, vocabulary=10, epsilon=1e-5)
    (each,) = fused_attention.fused_attention(shape, [Texts(0, (3,))], torch.device("cpu"))
    ones_NHD = torch.ones(3, 2, 8)
    each.backward(torch.ones(3, 16), ones_NHD, ones_NHD, ones_NHD, torch.empty(3, 6, 8))
    assert modes == [2]
    assert torch.get_deterministic_debug_mode() == 0
