"""How much of a small step reaches the outputs, measured on the modules that compute them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.engine.learner import gradient_flow
from groupwise.engine.learner.gradient_flow import native_computations, slope, trained_slopes
from groupwise.engine.learner.native.product import Product
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.load import load_model
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.lora_layers import ExactLoraLinear
from groupwise.engine.models.native.linear import Factors, Linear
from groupwise.engine.models.native.weights import NativeModel, native_model
from groupwise.engine.models.tiny import tiny_model
from groupwise.engine.models.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[4]
SOAK = pytest.mark.soak(suite="engine")
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


@pytest.mark.parametrize(("dtype", "rate", "tokens", "dropout"), [
    (torch.float32, 1e-6, 1 << 10, 0.0), pytest.param(torch.bfloat16, 1e-6, 1 << 15, 0.5, marks=SOAK),
    (torch.bfloat16, 1e-5, 1 << 13, 0.0), (torch.bfloat16, 1e-4, 1 << 13, 0.5),
])  # fmt: skip
def test_every_way_lets_small_steps_through(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rate: float, tokens: int, dropout: float
):
    """With dropout, the learner computes with modules. Layers are narrow here, so that it takes more tokens to be sure to 1 %."""
    monkeypatch.setattr(gradient_flow, "TOKENS", tokens)
    found = trained_slopes(trained(dtype, dropout=dropout), rate)
    assert {each.layer.rpartition(".")[2] for each in found} == KINDS
    assert all(0.95 < each.value < 1.05 for each in found), found


REAL = (
    "model.layers.9.self_attn.q_proj",
    "model.layers.6.mlp.gate_proj",
    "model.layers.9.mlp.down_proj",
)
LAYERS = 10
UPDATES = 10
FEW = 256
"""Tokens for the sampler, whose products are not rounded at all, so that they have no noise."""


@pytest.fixture(scope="module")
def real() -> tuple[NativeModel, dict[str, torch.Tensor], dict[str, Factors]]:
    """The first layers of the bundled model, what they read while the model reads a text, and a fresh adapter of theirs."""
    config = ModelConfig(name="smollm2-135m-instruct")
    ids = load_tokenizer(config)((ROOT / "LICENSE").read_text())["input_ids"][:1024]
    model: Any = load_model(config, "bfloat16")
    del model.model.layers[LAYERS:]
    adapted = AdaptedModel(model, new_lora_config(LoraConfig(r=16, alpha=32)))
    adapted.add("policy", trainable=False, seed=0)
    native = native_model(model)
    assert native is not None
    inputs: dict[str, torch.Tensor] = {}
    for path in REAL:
        adapted.layers[path].register_forward_hook(
            lambda _module, given, _output, path=path: inputs.update({path: given[0][0]})
        )
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for linear in native.products:
        if any(part.path in REAL for part in linear.parts):
            linear.pack()
    return native, inputs, adapted.low_rank("policy")


@SOAK
@pytest.mark.parametrize(("rate", "scales"), [(1e-6, 8), (1e-5, 1), (1e-4, 1)])
def test_real_layers_let_the_change_of_ten_updates_through(real: Any, rate: float, scales: int):
    """In the products of both engines.

    Ten updates in one direction move every entry of B by ten times the rate. Whether an output moves then is nearly chance, so that
    the smallest rate needs more rows: those of the text at several scales. Noise is 1 % with so many.
    """
    native, inputs, adapter = real
    generator = torch.Generator().manual_seed(0)
    for path in REAL:
        x_NI = torch.cat([inputs[path] * 2 ** (-number / scales) for number in range(scales)])
        before = adapter[path]
        signs = torch.randn(before.up_OR.shape, generator=generator).sign()
        after = replace(before, up_OR=UPDATES * rate * signs)
        with torch.no_grad():
            ways = native_computations(native, path)
            found = {
                "sampler": slope(ways["sampler"], x_NI[:FEW], before, after),
                "learner": slope(ways["learner"], x_NI, before, after),
            }
        assert all(abs(each - 1) < 0.05 for each in found.values()), (path, found)


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
def test_an_adapter_that_is_rounded_first_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, computed: Any, dropout: float
):
    weights = trained(torch.bfloat16, dropout=dropout)
    monkeypatch.setattr(owner, name, computed)
    found = trained_slopes(weights, 1e-5)
    assert {each.layer.rpartition(".")[2] for each in found if each.value < 0.5} == KINDS


def test_the_adapter_is_left_as_it_was():
    weights = trained(torch.bfloat16, dropout=0.5)
    before = {name: value.clone() for name, value in weights.parameters().items()}
    trained_slopes(weights, 1e-2)
    assert all(torch.equal(before[name], value) for name, value in weights.parameters().items())
    assert weights.adapted.switch.active is None
