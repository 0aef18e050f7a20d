"""Measurements on layers and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.models.config import LoraConfig
from groupwise.models.lora import AdaptedModel, new_lora_config
from groupwise.models.probes import (
    adapter_slopes,
    free_memory,
    peak_memory,
    random_start,
    trained_adapter,
)
from groupwise.models.tiny import tiny_model


def adapted(dtype: torch.dtype, **settings: Any) -> AdaptedModel:
    base: Any = tiny_model(hidden_size=64, layers=2, heads=4)
    model = AdaptedModel(base.to(dtype), new_lora_config(LoraConfig(r=16, alpha=32, **settings)))
    model.add("policy", trainable=True, seed=0)
    return model


@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-4), (torch.bfloat16, 1e-6)]
)
def test_our_layer_lets_small_steps_through(dtype: torch.dtype, rate: float):
    slopes = adapter_slopes(adapted(dtype), "policy", rate)
    assert {slope.layer.rpartition(".")[2] for slope in slopes} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert all(0.9 < slope.value < 1.1 for slope in slopes)


def test_a_layer_that_rounds_first_is_seen(monkeypatch: pytest.MonkeyPatch):
    """As peft's does, which adds the adapter's share to an output that is rounded already."""
    from peft.tuners.lora.layer import Linear as PeftLinear

    from groupwise.models.lora import ExactLoraLinear

    model = adapted(torch.bfloat16, target_modules=("q_proj",))
    layer: Any = model.layers["model.layers.0.self_attn.q_proj"]
    with torch.no_grad():
        layer.get_base_layer().weight.normal_(generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(ExactLoraLinear, "forward", PeftLinear.forward)
    layer._active_adapter = ["policy"]
    assert adapter_slopes(model, "policy", 1e-5)[0].value < 0.5


def test_the_adapter_is_left_as_it_was():
    model = adapted(torch.bfloat16)
    before = {name: value.clone() for name, value in model.parameters("policy").items()}
    adapter_slopes(model, "policy", 1e-2)
    assert all(
        torch.equal(before[name], value) for name, value in model.parameters("policy").items()
    )
    assert model.switch.active is None


def test_only_adapters_are_taken_for_adapters():
    from groupwise.learner.weights import TrainedAdapter, TrainedModel

    model = adapted(torch.float32)
    assert trained_adapter(TrainedAdapter(model, seed=0, name="mine")) == (model, "mine")
    assert trained_adapter(TrainedModel(tiny_model())) is None
    assert trained_adapter(None) is None


def test_memory_is_told_in_bytes():
    assert peak_memory("cpu") > 50 << 20
    free = free_memory("cpu")
    assert free is None or free > 1 << 20


def test_a_start_depends_on_the_seed_alone():
    assert random_start(1, 3) == random_start(1, 3) != random_start(2, 3)
