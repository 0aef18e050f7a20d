"""How much of a small step reaches the outputs, told of what computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.learner.native.product import Product
from groupwise.learner.slopes import trained_slopes
from groupwise.learner.weights import TrainedAdapter, TrainedModel
from groupwise.models.config import LoraConfig
from groupwise.models.lora import AdaptedModel, ExactLoraLinear, new_lora_config
from groupwise.models.native.linear import Linear
from groupwise.models.native.weights import native_model
from groupwise.models.tiny import tiny_model

KINDS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def trained(dtype: torch.dtype, **settings: Any) -> TrainedAdapter:
    """Packed, as a sampler has it."""
    base: Any = tiny_model(hidden_size=64, layers=2, heads=4)
    adapted = AdaptedModel(base.to(dtype), new_lora_config(LoraConfig(r=16, alpha=32, **settings)))
    weights = TrainedAdapter(adapted, seed=0)
    native = native_model(adapted.base)
    assert native is not None
    native.pack()
    return weights


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-4), (torch.bfloat16, 1e-6)]
)
def test_every_way_lets_small_steps_through(dtype: torch.dtype, rate: float, dropout: float):
    """With dropout, the learner computes with modules."""
    slopes = trained_slopes(trained(dtype, dropout=dropout), rate)
    assert {slope.layer.rpartition(".")[2] for slope in slopes} == KINDS
    assert all(0.9 < slope.value < 1.1 for slope in slopes)


def by_module(layer: ExactLoraLinear, x: torch.Tensor) -> torch.Tensor:
    """As peft's layer does, which adds the adapter's share to an output that is rounded already."""
    down, up = layer.factors("policy")
    low = (x @ down.to(x.dtype).t()) @ up.to(x.dtype).t()
    return layer.get_base_layer()(x) + low * layer.scaling["policy"]  # pyright: ignore[reportCallIssue]


few = Linear.few


def by_sampler(linear: Linear, x: torch.Tensor, low: Any) -> torch.Tensor:
    alone = Linear(linear.parts, torch.zeros_like(linear.weight_OI))
    alone.pack()
    return few(linear, x).bfloat16() + few(alone, x, low).bfloat16()


def by_learner(product: Product, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert product.low is not None
    low = x @ product.low.down_RI.t()
    return low @ product.low.up_OR.t() + product.linear.many(x), low


ROUNDED_FIRST: list[Any] = [
    pytest.param(ExactLoraLinear, "forward", by_module, 0.5, id="module"),
    pytest.param(
        Linear,
        "few",
        lambda linear, x, low=None: few(linear, x) if low is None else by_sampler(linear, x, low),
        0.0,
        id="sampler",
    ),
    pytest.param(Product, "forward", by_learner, 0.0, id="learner"),
]


@pytest.mark.parametrize(("owner", "name", "computed", "dropout"), ROUNDED_FIRST)
def test_what_rounds_first_is_seen(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, computed: Any, dropout: float
):
    weights = trained(torch.bfloat16, dropout=dropout)
    monkeypatch.setattr(owner, name, computed)
    slopes = trained_slopes(weights, 1e-5)
    assert {slope.layer.rpartition(".")[2] for slope in slopes if slope.value < 0.5} == KINDS


def test_the_adapter_is_left_as_it_was():
    weights = trained(torch.bfloat16, dropout=0.5)
    before = {name: value.clone() for name, value in weights.parameters().items()}
    trained_slopes(weights, 1e-2)
    assert all(torch.equal(before[name], value) for name, value in weights.parameters().items())
    assert weights.adapted.switch.active is None


def test_only_adapters_have_slopes():
    assert trained_slopes(TrainedModel(tiny_model()), 1e-3) == []
