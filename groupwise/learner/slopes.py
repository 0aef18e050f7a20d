"""How much of a small step reaches the outputs of an adapter's layers, in the very products that learner and sampler compute.

Nothing is changed: the adapter of a module is put back as it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from groupwise.learner.native.product import Product
from groupwise.learner.weights import TrainedAdapter, TrainedWeights
from groupwise.models.lora import ExactLoraLinear
from groupwise.models.native.linear import Factors, Linear, Part
from groupwise.models.native.weights import NativeModel, native_model

TOKENS = 1024
"""Random inputs of a layer; so many make the slope sure to about 1 %."""

Compute = Callable[[Tensor, Factors], Tensor]
"""A layer's output [N, O], without the rest of its product, for inputs [N, I] and an adapter of these factors."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Of the realised on the exact change of a layer's output: 1 where the change acts in full."""

    layer: str
    value: float


def trained_slopes(weights: TrainedWeights, learning_rate: float) -> list[Slope]:
    """After an AdamW step every entry of B has moved by the learning rate: how much of that reaches the outputs?

    One layer of each kind (`q_proj`, `down_proj` …) is tried, in the number format of its base, with inputs of unit variance. Where
    sampler and learner compute it in several ways, the least is told. None where all weights are trained.
    """
    if not isinstance(weights, TrainedAdapter):
        return []
    adapted = weights.adapted
    native = native_model(adapted.base)
    kinds = {path.rpartition(".")[2]: path for path in reversed(adapted.layers)}
    with torch.no_grad(), adapted.using(weights.name):
        return [
            Slope(path, _least(weights, native, path, learning_rate))
            for path in sorted(kinds.values())
        ]


def _least(
    weights: TrainedAdapter, native: NativeModel | None, path: str, learning_rate: float
) -> float:
    factors = weights.adapted.low_rank(weights.name)[path]
    layer = weights.adapted.layers[path]
    ways: list[Compute] = []
    if native is None or weights.dropout:  # with dropout, modules are trained
        ways.append(partial(_by_module, layer, weights.name))
    if native is not None:
        linear, part = _place(native, path)
        ways.append(partial(_by_sampler, linear, part))
        if not weights.dropout:
            ways.append(partial(_by_learner, linear, part))
    return min(_slope(compute, factors, weights.model.dtype, learning_rate) for compute in ways)


def _slope(compute: Compute, factors: Factors, dtype: torch.dtype, learning_rate: float) -> float:
    down, up = factors.down_RI, factors.up_OR
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(TOKENS, down.shape[1], generator=generator).to(down.device, dtype)
    step = learning_rate * torch.sign(torch.randn(up.shape, generator=generator)).to(up)
    exact = factors.scaling * (inputs.double() @ down.double().t()) @ step.double().t()
    changed = compute(inputs, replace(factors, up_OR=up + step)).double()
    realised = changed - compute(inputs, factors).double()
    return float((realised * exact).sum() / (exact * exact).sum())


def _by_module(layer: ExactLoraLinear, name: str, inputs: Tensor, factors: Factors) -> Tensor:
    """As a transformers model computes it, with its adapter acting."""
    _, up = layer.factors(name)
    kept = up.clone()
    try:
        up.copy_(factors.up_OR)
        return layer(inputs)
    finally:
        up.copy_(kept)


def _by_sampler(linear: Linear, part: Part, inputs: Tensor, factors: Factors) -> Tensor:
    return _own(linear.few(inputs, linear.packed_low_rank({part.path: factors})), part)


def _by_learner(linear: Linear, part: Part, inputs: Tensor, factors: Factors) -> Tensor:
    return _own(Product(linear, {part.path: factors}).forward(inputs)[0], part)


def _place(native: NativeModel, path: str) -> tuple[Linear, Part]:
    """The product that the layer is a part of."""
    return next(
        (linear, part) for linear in native.products for part in linear.parts if part.path == path
    )


def _own(found_NX: Tensor, part: Part) -> Tensor:
    """The columns of a part, in the order of the model's own layer."""
    own_NO = found_NX[:, part.start : part.end]
    if part.order is None:
        return own_NO
    return torch.empty_like(own_NO).index_copy_(1, part.order, own_NO)
