"""Sampler, learner and a whole run on a GPU: `make gpu`.

The bodies are in `tests/on_device.py`, and a processor runs most of them with the other tests.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from groupwise.learner import slopes
from groupwise.learner.native.fused_attention import fused_attention
from groupwise.learner.native.layout import Texts
from groupwise.models.machine import prepare_process
from groupwise.models.native.weights import Shape
from groupwise.ranks import ahead
from groupwise.sampler.native.graph_engine import GraphEngine
from groupwise.sampler.native.recording import cuda_graphs, plainly
from groupwise.sampler.torch_sampler import TorchSampler
from tests import on_device
from tests.unit.learner.native import test_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
GPU = torch.device("cuda")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
MODELS = ["llama", "llama-128", "llama-mha-tied", "llama-mqa", "llama-biases", "qwen2", "qwen3"]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """As a run sets the process up; products of float32 are float32, as torch has them where nobody says otherwise."""
    prepare_process(1)
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    yield
    torch.cuda.synchronize()


def held() -> int:
    """Bytes of all tensors on it, after what hangs together in circles is gone."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


# The sampler


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name, adapter):
    on_device.greedy_tokens_are_those_of_transformers(GPU, cuda_graphs, name, adapter=adapter)


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_near_those_of_transformers(name, dtype):
    on_device.logits_are_near_those_of_transformers(GPU, cuda_graphs, name, dtype)


@BOTH
@pytest.mark.parametrize("name", ["llama", "llama-128", "llama-mha-tied", "qwen2", "qwen3"])
def test_recordings_change_no_bit(name, dtype):
    on_device.recordings_change_no_bit(GPU, cuda_graphs, name, dtype)


@BOTH
@pytest.mark.parametrize("longest", [150, 280, 600])
@pytest.mark.parametrize("name", ["llama", "llama-128", "llama-mha-tied", "qwen3"])
def test_a_row_does_not_depend_on_the_others(name, longest, dtype):
    """Nor on the number of keys that they need."""
    on_device.a_row_does_not_depend_on_the_others(GPU, cuda_graphs, name, dtype, longest=longest)


@BOTH
@pytest.mark.parametrize("name", ["llama", "llama-128", "llama-mha-tied", "qwen3"])
def test_sampling_again_gives_the_same(name, dtype):
    on_device.sampling_again_gives_the_same(GPU, cuda_graphs, name, dtype)


def test_what_is_drawn_does_not_depend_on_the_device():
    on_device.what_is_drawn_does_not_depend_on_the_device(GPU)


@pytest.mark.parametrize("adapter", [True, False])
def test_memory_does_not_grow_over_refreshes(tmp_path, adapter):
    on_device.memory_does_not_grow(GPU, cuda_graphs, tmp_path, held, adapter=adapter)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_sampler_takes_the_engine_for_gpus(enforce_eager):
    weights = on_device.served("llama", GPU, torch.float32, adapter=False)
    sampler = TorchSampler(
        weights, on_device.tiny_tokenizer(), on_device.LAYOUT, enforce_eager=enforce_eager
    )
    assert isinstance(sampler._engine, GraphEngine)
    assert (sampler._engine._record is plainly) == enforce_eager


# The learner


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_processor(tmp_path, name):
    on_device.gradients_are_those_of_a_processor(GPU, tmp_path, name)


def test_nothing_is_left_of_a_gradient():
    on_device.nothing_is_left_of_a_gradient(GPU, held)


@BOTH
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("size", [6, 16, 64, 128])
@pytest.mark.parametrize("name", test_attention.LAYOUTS)
def test_attention_is_that_of_a_processor(name, size, kv_heads, dtype):
    shape = Shape(
        hidden=24, heads=4, kv_heads=kv_heads, head_size=size, vocabulary=10, epsilon=1e-5
    )
    texts: list[Texts] = test_attention.LAYOUTS[name]
    on_device.attention_is_that_of_a_processor(
        fused_attention, test_attention.plain, shape, texts, GPU, dtype
    )


# Both together


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.02), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", ["llama", "llama-128", "llama-mha-tied", "qwen3"])
def test_sampler_and_learner_agree_on_a_small_model(tmp_path, name, dtype, most):
    on_device.sampler_and_learner_agree_on_a_small_model(
        GPU, cuda_graphs, tmp_path, name, dtype, most
    )


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.025), ("float32", 1e-4)])
def test_sampler_and_learner_agree(tmp_path, dtype, most):
    on_device.sampler_and_learner_agree(GPU, cuda_graphs, tmp_path, dtype, most)


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4])
def test_small_steps_act_in_full(monkeypatch, rate):
    monkeypatch.setattr(slopes, "TOKENS", 1 << 15)
    on_device.small_steps_act_in_full(GPU, rate)


def test_a_zygote_that_is_asked_knows_of_it():
    ahead.begin()
    try:
        assert ahead.choose_device() == "cuda"
    finally:
        ahead.give_up()


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, None])
def test_a_short_run(tmp_path, lora, enforce_eager):
    on_device.a_short_run_goes_through(GPU, tmp_path, lora=lora, enforce_eager=enforce_eager)
