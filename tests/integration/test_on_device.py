"""What `tests/gpu` asks of a GPU, asked of a processor that computes as one would: with torch alone, and with recordings as strict."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from groupwise.learner import slopes
from groupwise.learner.native import body
from groupwise.learner.native.fused_attention import fused_attention
from groupwise.models.native.weights import NativeModel, Shape
from groupwise.sampler.native.graph_engine import KEYS
from tests import on_device
from tests.tape import Tape
from tests.unit.learner.native import test_attention

CPU = torch.device("cpu")
SOAK = pytest.mark.soak(suite="engine")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ONE = pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SOAK)])


def some(names: tuple[str, ...], *values: Any) -> list[Any]:
    """Every name with every value; in the usual run each name with one of them."""
    return [
        pytest.param(name, value, marks=() if place % len(values) == number else SOAK)
        for place, name in enumerate(names)
        for number, value in enumerate(values)
    ]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Torch alone computes: no kernels of our own, and no weights in another order."""
    monkeypatch.setattr("groupwise.models.native.compiled.suits", lambda tensor: False)
    monkeypatch.setattr(NativeModel, "pack", lambda self: None)


@pytest.fixture
def held() -> Callable[[], int]:
    """Tells the bytes of all tensors made from now on: what other tests have left is not looked through each time."""
    gc.collect()
    gc.freeze()
    return bytes_held


def bytes_held() -> int:
    """Of all tensors that the garbage collector looks at, after what hangs together in circles is gone."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    memory = [each.untyped_storage() for each in found]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


@pytest.mark.parametrize(
    ("name", "adapter"), some(("llama", "llama-mha-tied", "qwen3"), True, False)
)
def test_greedy_tokens_are_those_of_transformers(as_on_a_gpu, name, adapter):
    on_device.greedy_tokens_are_those_of_transformers(CPU, Tape, name, adapter=adapter)


@pytest.mark.parametrize(
    ("name", "dtype"),
    some(("llama-128", "llama-mqa", "qwen2"), torch.bfloat16, torch.float32),
)
def test_logits_are_near_those_of_transformers(as_on_a_gpu, name, dtype):
    on_device.logits_are_near_those_of_transformers(CPU, Tape, name, dtype)


@ONE
def test_recordings_change_no_bit(as_on_a_gpu, dtype):
    on_device.recordings_change_no_bit(CPU, Tape, "qwen3", dtype)


@ONE
def test_a_row_does_not_depend_on_the_others(as_on_a_gpu, dtype):
    longest = KEYS - 60  # within one number of keys, which is what holds on a processor
    on_device.a_row_does_not_depend_on_the_others(CPU, Tape, "llama", dtype, longest=longest)


@ONE
def test_sampling_again_gives_the_same(as_on_a_gpu, dtype):
    on_device.sampling_again_gives_the_same(CPU, Tape, "qwen3", dtype)


def test_what_is_drawn_does_not_depend_on_the_device():
    on_device.what_is_drawn_does_not_depend_on_the_device(CPU)


@pytest.mark.parametrize("adapter", [True, False])
def test_memory_does_not_grow(as_on_a_gpu, tmp_path, held, adapter):
    on_device.memory_does_not_grow(CPU, Tape, tmp_path, held, adapter=adapter)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_the_fused_attention_gives_the_gradients_of_the_other(monkeypatch, tmp_path, name):
    pieces = on_device.gradients(name, CPU, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(body, "piece_attention", fused_attention)
        fused = on_device.gradients(name, CPU, tmp_path)
    on_device.gradients_are_those_of_a_processor(CPU, tmp_path, name)
    for key, wanted in pieces.items():
        torch.testing.assert_close(fused[key], wanted, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(fused[key], wanted) for key, wanted in pieces.items()), "two ways"


def test_nothing_is_left_of_a_gradient(held):
    on_device.nothing_is_left_of_a_gradient(CPU, held)


@BOTH
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("size", [6, 128])
def test_attention_is_that_of_a_processor(size, kv_heads, dtype):
    shape = Shape(
        hidden=24, heads=4, kv_heads=kv_heads, head_size=size, vocabulary=10, epsilon=1e-5
    )
    texts = test_attention.LAYOUTS["two groups"]
    on_device.attention_is_that_of_a_processor(
        fused_attention, test_attention.plain, shape, texts, CPU, dtype
    )


@pytest.mark.parametrize(
    ("name", "dtype"), some(("llama-128", "llama-mha-tied"), torch.bfloat16, torch.float32)
)
def test_sampler_and_learner_agree_on_a_small_model(
    as_on_a_gpu, monkeypatch, tmp_path, name, dtype
):
    most = 1e-4 if dtype == torch.float32 else 0.003
    monkeypatch.setattr(body, "piece_attention", fused_attention)
    on_device.sampler_and_learner_agree_on_a_small_model(CPU, Tape, tmp_path, name, dtype, most)


@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, pytest.param(None, marks=SOAK)])
def test_a_short_run(tmp_path, lora):
    on_device.a_short_run_goes_through(CPU, tmp_path, lora=lora, enforce_eager=True)


@SOAK
def test_sampler_and_learner_agree(as_on_a_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(body, "piece_attention", fused_attention)
    few = {"members": 3, "tokens": 12}  # a difference of the two shows in each of them
    on_device.sampler_and_learner_agree(CPU, Tape, tmp_path, "float32", most=1e-4, **few)


@SOAK
@pytest.mark.parametrize(("rate", "tokens", "within"), [(1e-6, 8192, 0.5), (1e-4, 2048, 0.1)])
def test_small_steps_act_in_full(monkeypatch, as_on_a_gpu, rate, tokens, within):
    monkeypatch.setattr(slopes, "TOKENS", tokens)
    on_device.small_steps_act_in_full(CPU, rate, within)
