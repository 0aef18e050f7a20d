"""Measures how much of a small update reaches the outputs of an adapter's layers, in the same products that learner and sampler compute.

The measurement changes nothing: a module's adapter is restored bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from groupwise.engine.learner.native.product import Product
from groupwise.engine.learner.weights import TrainedAdapter, TrainedWeights
from groupwise.engine.models.lora_layers import ExactLoraLinear
from groupwise.engine.models.machine import engine_products
from groupwise.engine.models.native.linear import Factors, Part
from groupwise.engine.models.native.weights import NativeModel

TOKENS = 1024
"""Random inputs of a layer. This many give the slope to about 1 %, except for small updates of layers with large outputs in bfloat16: there
rounding adds noise of 30 %, which must not be mistaken for a change without effect."""

Compute = Callable[[Tensor, Factors], Tensor]
"""Computes one layer's own output columns [N, O] of a fused product, for inputs [N, I] and an adapter with these factors."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Regression of the realised change of a layer's output on the exact one: 1 if the change takes full effect."""

    layer: str
    value: float
    error: float
    """Standard error of the value, from the random inputs."""


@engine_products()
def trained_slopes(weights: TrainedWeights, learning_rate: float) -> list[Slope]:
    """How much of an AdamW update, which moves every entry of B by the learning rate, reaches the outputs.

    One layer of each kind (`q_proj`, `down_proj` …) is measured, in the number format of its base, with inputs of unit variance. If
    sampler and learner compute it in different ways, the lowest slope is returned. The list is empty if all weights are trained. Experts,
    whose products are those of linear layers, are not measured.
    """
    if not isinstance(weights, TrainedAdapter):
        return []
    adapted = weights.adapted
    native = adapted.native(weights.name)
    layers = {
        path: layer
        for path, layer in adapted.layers_of(weights.name).items()
        if isinstance(layer, ExactLoraLinear)
    }
    kinds = {path.rpartition(".")[2]: path for path in reversed(layers)}
    slopes: list[Slope] = []
    with torch.no_grad(), adapted.using(weights.name):
        for path in sorted(kinds.values()):
            by_module = partial(_by_module, layers[path], weights.name)
            ways: list[Compute] = [by_module]
            if native is not None:
                by_engine = native_computations(native, path)
                ways = [
                    by_engine["sampler"],
                    by_module if weights.dropout else by_engine["learner"],
                ]
            before = adapted.low_rank(weights.name)[path]
            generator = torch.Generator().manual_seed(0)
            up_OR = before.up_OR
            inputs_NI = torch.randn(TOKENS, before.down_RI.shape[1], generator=generator)
            signs_OR = torch.randn(up_OR.shape, generator=generator).sign()
            after = replace(before, up_OR=up_OR + learning_rate * signs_OR.to(up_OR))
            inputs_NI = inputs_NI.to(up_OR.device, weights.model.dtype)
            changes = [_measure_changes(compute, inputs_NI, before, after) for compute in ways]
            least = min((slope_of(*change), error_of(*change)) for change in changes)
            slopes.append(Slope(path, *least))
    return slopes


def slope(compute: Compute, inputs_NI: Tensor, before: Factors, after: Factors) -> float:
    """Slope of the change that `compute` shows between two adapters of a layer, on the exact change (float64)."""
    return slope_of(*_measure_changes(compute, inputs_NI, before, after))


def _measure_changes(
    compute: Compute, inputs_NI: Tensor, before: Factors, after: Factors
) -> tuple[Tensor, Tensor]:
    """The realised and the exact change of the output, [N, O]."""
    exact_NO = _adapter_output(inputs_NI, after) - _adapter_output(inputs_NI, before)
    return compute(inputs_NI, after).double() - compute(inputs_NI, before), exact_NO


def slope_of(realised: Tensor, exact: Tensor) -> float:
    """Slope of one change on another, through 0: 1 if it takes full effect. `exact` is float64."""
    return float((realised * exact).sum() / (exact * exact).sum())


def error_of(realised_NO: Tensor, exact_NO: Tensor) -> float:
    """The standard error of `slope_of`, a ratio of sums over independent tokens, to first order (Cochran, Sampling Techniques, §6.5)."""
    squares_N = (exact_NO * exact_NO).sum(-1)
    residuals_N = (realised_NO * exact_NO).sum(-1) - slope_of(realised_NO, exact_NO) * squares_N
    return float(residuals_N.square().sum().sqrt() / squares_N.sum())


def native_computations(native: NativeModel, path: str) -> dict[str, Compute]:
    """The ways in which the native sampler and learner compute a layer, by name."""
    linear, part = next(
        (linear, part) for linear in native.products for part in linear.parts if part.path == path
    )

    def sampled(inputs: Tensor, factors: Factors) -> Tensor:
        output = linear.few(inputs, linear.packed_low_rank({part.path: factors}))
        return _own_columns(output, part)

    def learnt(inputs: Tensor, factors: Factors) -> Tensor:
        output, _ = Product(linear, {part.path: factors}).forward(inputs)
        return _own_columns(output, part)

    return {"sampler": sampled, "learner": learnt}


def _adapter_output(inputs_NI: Tensor, factors: Factors) -> Tensor:
    low_NR = inputs_NI.double() @ factors.down_RI.double().t()
    return factors.scaling * low_NR @ factors.up_OR.double().t()


def _by_module(layer: ExactLoraLinear, name: str, inputs: Tensor, factors: Factors) -> Tensor:
    """The layer's output as its transformers module computes it, with these factors as its adapter."""
    _, up = layer.factors(name)
    original = up.clone()
    try:
        up.copy_(factors.up_OR)
        return layer(inputs)
    finally:
        up.copy_(original)


def _own_columns(output_NX: Tensor, part: Part) -> Tensor:
    """The columns of a part, in the order of the model's own layer."""
    columns_NO = output_NX[:, part.start : part.end]
    if part.order is None:
        return columns_NO
    return torch.empty_like(columns_NO).index_copy_(1, part.order, columns_NO)
