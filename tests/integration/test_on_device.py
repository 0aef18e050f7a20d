"""The checks of `tests/gpu`, on a CPU that computes as a GPU would: with torch only, and with recordings that are as strict."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.engine.learner import gradient_flow, torch_learner
from groupwise.engine.learner.native import attention
from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.native.engine import NativeEngine
from groupwise.training import placement
from groupwise.training.loops import rl_prepare
from tests import device_checks
from tests.device_checks import DeviceCase
from tests.fake_cuda_graph import FakeCudaGraph
from tests.integration import toy_run

CPU = torch.device("cpu")
SOAK = pytest.mark.soak(suite="engine")
HALF, WHOLE = torch.bfloat16, torch.float32


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceCase:
    """Torch alone computes: no kernels of our own, and no weights in another order."""
    monkeypatch.setattr("groupwise.engine.models.native.compiled.suits", lambda tensor: False)
    fuse_attention(monkeypatch)
    monkeypatch.setattr(NativeModel, "pack", lambda self, **_: None)
    monkeypatch.setattr(torch_learner, "FUSED_ON", {"cpu"})
    gc.collect()
    gc.freeze()  # what other tests have left is not looked through each time
    return DeviceCase(CPU, FakeCudaGraph, tmp_path, bytes_held)


def fuse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processor compute attention as a GPU does."""

    def fused(model: NativeModel, rotations_N1C: torch.Tensor, texts: Sequence[Texts]) -> Any:
        parts = attention.rotated_attention(model.shape, texts, model.dtype, CPU)
        return attention.GpuAttention(model, rotations_N1C, parts)

    monkeypatch.setattr(attention, "CompiledAttention", fused)


def bytes_held() -> int:
    """Of all tensors that the garbage collector looks at, after what hangs together in circles is gone."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    memory = [each.untyped_storage() for each in found]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def also(holds: Callable[..., None], **given: Any) -> Any:
    """As a soak test: what is asked of the sampler, its own tests ask with the same recordings."""
    return pytest.param(holds, given, marks=SOAK)


@pytest.mark.parametrize(
    ("holds", "given"),
    [
        also(device_checks.greedy_tokens_are_those_of_transformers, name="llama", adapter=True),
        also(device_checks.greedy_tokens_are_those_of_transformers, name="qwen3", adapter=False),
        also(device_checks.logits_are_near_those_of_transformers, name="llama-128", dtype=HALF),
        also(device_checks.logits_are_near_those_of_transformers, name="qwen2", dtype=WHOLE),
        also(device_checks.recordings_change_no_bit, name="qwen3", dtype=HALF),
        also(device_checks.recordings_change_no_bit, name="qwen3", dtype=WHOLE),
        (
            device_checks.a_row_does_not_depend_on_the_others,
            {"name": "llama", "dtype": HALF, "longest": 280},
        ),
        also(device_checks.sampling_again_gives_the_same, name="qwen3", dtype=HALF),
        (device_checks.what_is_drawn_does_not_depend_on_the_device, {}),
        (device_checks.memory_does_not_grow, {"adapter": True}),
        also(device_checks.memory_does_not_grow, adapter=False),
        (device_checks.a_cache_is_freed_while_nothing_is_sampled, {"frees_cache": True}),
        (device_checks.a_cache_is_freed_while_nothing_is_sampled, {"frees_cache": False}),
        (device_checks.gradients_are_those_of_a_processor, {"name": "llama-biases"}),
        also(device_checks.all_weights_have_the_gradients_of_a_processor, name="qwen3"),
        also(device_checks.gradients_repeat_to_the_bit, dtype="bfloat16", adapter=True),
        (device_checks.adapters_of_experts_have_the_gradients_of_a_processor, {"dtype": HALF}),
        (device_checks.replayed_experts_have_the_gradients_of_a_processor, {"dtype": "bfloat16"}),
        (device_checks.one_head_of_keys_is_that_of_a_processor, {"dtype": HALF}),
        (device_checks.updates_are_those_of_a_processor, {}),
        (device_checks.nothing_is_left_of_a_gradient, {}),
        *(
            (
                device_checks.attention_is_that_of_a_processor,
                {"name": "two groups", "size": size, "kv_heads": heads, "dtype": dtype},
            )
            for size, heads, dtype in ((6, 2, HALF), (128, 4, WHOLE))
        ),
        (device_checks.a_short_run_goes_through, {"lora": {"r": 4}, "enforce_eager": True}),
        also(device_checks.a_short_run_goes_through, lora=None, enforce_eager=True),
    ],
)
def test_device_checks_hold_on_this_machine(
    case: DeviceCase, holds: Callable[..., None], given: dict[str, Any]
) -> None:
    holds(case, **given)


def test_looking_ahead_draws_the_same(case, monkeypatch):
    device_checks.looking_ahead_draws_the_same(case, monkeypatch)


def test_a_sampler_beside_the_learner_draws_the_same(tmp_path):
    device_checks.a_sampler_beside_the_learner_draws_the_same(
        DeviceCase(CPU, FakeCudaGraph, tmp_path, bytes_held)
    )


def test_the_fused_attention_gives_the_gradients_of_the_other(monkeypatch, tmp_path):
    compiled = device_checks.gradients("qwen3", CPU, tmp_path)
    fuse_attention(monkeypatch)
    fused = device_checks.gradients("qwen3", CPU, tmp_path)
    for key, wanted in compiled.items():
        torch.testing.assert_close(fused[key], wanted, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(fused[key], wanted) for key, wanted in compiled.items()), "two ways"


@pytest.mark.parametrize(
    ("name", "dtype", "most"), [("llama-128", HALF, 0.003), ("llama-mha-tied", WHOLE, 1e-4)]
)
def test_sampler_and_learner_agree_on_a_small_model(case, name, dtype, most):
    device_checks.sampler_and_learner_agree_on_a_small_model(case, name, dtype, most)


@SOAK
@pytest.mark.parametrize("installed", [True, False])
def test_sampler_and_learner_agree(case, monkeypatch, installed):
    if not installed:  # as on a machine without an index: random weights of the same sizes
        monkeypatch.setattr(device_checks, "bundled_folder", lambda name: None)
    few = {"members": 3, "tokens": 12}  # a difference of the two shows in each of them
    device_checks.sampler_and_learner_agree(case, "float32", most=1e-4, **few)


@SOAK
@pytest.mark.parametrize(("rate", "tokens", "within"), [(1e-6, 8192, 0.5), (1e-4, 2048, 0.1)])
def test_small_steps_act_in_full(case, monkeypatch, rate, tokens, within):
    monkeypatch.setattr(gradient_flow, "TOKENS", tokens)
    device_checks.small_steps_act_in_full(case, rate, within)


def test_a_run_that_frees_its_cache_learns_the_same(monkeypatch, tmp_path):
    """The freed cache belongs to the engines of a processor here; all else is as with a GPU whose memory is short."""
    assert groupwise.rl(toy_run.config(tmp_path / "holds"), toy_run.TOY).exit_code == 0
    monkeypatch.setattr(
        rl_prepare,
        "training_layout",
        lambda *given: replace(placement.choose_layout(*given), frees_cache=True),
    )
    freed: list[int] = []
    free = NativeEngine.free_cache
    monkeypatch.setattr(
        NativeEngine, "free_cache", lambda engine: (freed.append(len(engine.rows)), free(engine))
    )
    assert groupwise.rl(toy_run.config(tmp_path / "frees"), toy_run.TOY).exit_code == 0
    assert freed == [0] * toy_run.STEPS
    holds, frees = (
        toy_run.what_must_be_equal(tmp_path / name / "toy") for name in ("holds", "frees")
    )
    assert frees == holds
