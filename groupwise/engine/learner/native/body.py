"""Computes all layers forward and backward, by hand: there is no autograd graph, and a layer keeps only tensors that are slow to recompute.

A layer keeps: the residual stream before it, and what attention adds to that; queries, keys and values before rotation; attention's output;
gate and up; and the narrow products of the adapter. Norms, rotary positions, probabilities and SwiGLU are recomputed. With `recompute`,
only the residual stream before each layer is kept.

The residual stream and its gradient are float32; products are in the model's number format, as in the sampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.engine.learner.native.attention import Attention, attention_of
from groupwise.engine.learner.native.elementwise import (
    norm_with_gradient,
    swiglu,
    swiglu_with_gradient,
)
from groupwise.engine.learner.native.layout import FlatBatch
from groupwise.engine.learner.native.product import Product
from groupwise.engine.models.native.linear import Factors
from groupwise.engine.models.native.weights import NativeModel


@dataclass(frozen=True, slots=True)
class MicrobatchPass:
    """A micro-batch, and the model with an adapter that computes it."""

    model: NativeModel
    batch: FlatBatch
    attention: Attention
    products: list[Product]
    recompute: bool
    """Keep only the input of each layer, and recompute the layer in the backward pass."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Results of a layer that its backward pass needs."""

    residual_NH: Tensor
    qkv_NO: Tensor
    attention_NO: Tensor
    """The output of attention."""
    output_NH: Tensor
    """What is added to the residual stream before the MLP."""
    gate_up_N2F: Tensor
    lows: tuple[Tensor | None, ...]
    """x Aᵀ of each of the layer's four products; None without an adapter."""


def residual_stream(
    model: NativeModel, batch: FlatBatch, factors: Mapping[str, Factors], *, recompute: bool
) -> Tensor:
    """The residual stream [N, H] after all layers; its backward pass computes the gradients of the factors."""
    with torch.no_grad():
        products = [Product(linear, factors) for linear in model.products[:-1]]
    work = MicrobatchPass(model, batch, attention_of(model, batch), products, recompute)
    return _Body.apply(work, torch.is_grad_enabled(), *_factors(work.products, factors))  # pyright: ignore[reportReturnType]


def _factors(products: Sequence[Product], factors: Mapping[str, Factors]) -> Iterator[Tensor]:
    """Factors of all products, in the order in which `_Body.backward` returns their gradients."""
    for product in products:
        for adapted in product.adapted:
            yield factors[adapted.part.path].down_RI
            yield factors[adapted.part.path].up_OR


class _Body(torch.autograd.Function):
    """The embeddings and all layers. Its inputs are the factors of the adapter, so autograd asks for their gradients."""

    @staticmethod
    def forward(ctx: Any, work: MicrobatchPass, gradient: bool, *_: Tensor) -> Tensor:
        model = work.model
        residual_NH = model.embedded(torch.tensor(work.batch.token_ids, device=model.device))
        saved: list[Activations | Tensor] = []
        for number in range(len(model.layers)):
            before_NH = residual_NH
            residual_NH, of_layer = _forward_layer(work, number, before_NH)
            if gradient:
                saved.append(before_NH if work.recompute else of_layer)
        ctx.work, ctx.kept = work, saved
        return residual_NH

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        work: MicrobatchPass = ctx.work
        saved: list[Activations | Tensor] = ctx.kept
        d_NH = grad_outputs[0].clone()  # changed in place from here on
        gradients: list[Tensor] = []
        for number in reversed(range(len(work.model.layers))):
            of_layer = saved.pop()
            if isinstance(of_layer, Tensor):
                _, of_layer = _forward_layer(work, number, of_layer)
            gradients = _backward_layer_(work, number, of_layer, d_NH) + gradients
        return None, None, *gradients


def _forward_layer(
    work: MicrobatchPass, number: int, residual_NH: Tensor
) -> tuple[Tensor, Activations]:
    """The residual stream after a layer, and the tensors that its backward pass needs."""
    model, layer = work.model, work.model.layers[number]
    qkv, output, gate_up, down = work.products[4 * number : 4 * number + 4]
    qkv_NO, qkv_low = qkv.forward(model.normed(residual_NH, layer.attention_norm_H))
    attention_NO = work.attention.forward(layer, qkv_NO)
    output_NH, output_low = output.forward(attention_NO)
    middle_NH = residual_NH + output_NH
    gate_up_N2F, gate_up_low = gate_up.forward(model.normed(middle_NH, layer.mlp_norm_H))
    y_NH, down_low = down.forward(swiglu(gate_up_N2F))
    lows = qkv_low, output_low, gate_up_low, down_low
    activations = Activations(residual_NH, qkv_NO, attention_NO, output_NH, gate_up_N2F, lows)
    return middle_NH + y_NH, activations


def _backward_layer_(
    work: MicrobatchPass, number: int, activations: Activations, d_NH: Tensor
) -> list[Tensor]:
    """Turn the gradient of a layer's output into that of its input, in place; return the gradients of the layer's factors."""
    layer = work.model.layers[number]
    qkv, output, gate_up, down = work.products[4 * number : 4 * number + 4]
    qkv_low, output_low, gate_up_low, down_low = activations.lows
    epsilon = work.model.shape.epsilon

    dy_NH = d_NH.to(work.model.dtype)
    u_NR = down.low_gradient(dy_NH)
    a_NF, d_gate_up = swiglu_with_gradient(
        activations.gate_up_N2F, down.input_gradient(dy_NH, u_NR)
    )
    of_down = down.factor_gradients(a_NF, dy_NH, down_low, u_NR)
    middle_NH = activations.residual_NH + activations.output_NH
    of_gate_up = _through_norm_(
        gate_up, gate_up_low, d_gate_up, middle_NH, layer.mlp_norm_H, epsilon, d_NH
    )
    dy_NH = d_NH.to(work.model.dtype)
    u_NR = output.low_gradient(dy_NH)
    d_attention_NO = output.input_gradient(dy_NH, u_NR)
    d_qkv_NO = work.attention.backward(layer, activations.qkv_NO, d_attention_NO)
    of_output = output.factor_gradients(activations.attention_NO, dy_NH, output_low, u_NR)
    d_input = d_NH if number else None  # the embeddings need no gradient
    of_qkv = _through_norm_(
        qkv, qkv_low, d_qkv_NO, activations.residual_NH, layer.attention_norm_H, epsilon, d_input
    )
    return [*of_qkv, *of_output, *of_gate_up, *of_down]


def _through_norm_(
    product: Product,
    low_NR: Tensor | None,
    dy_NO: Tensor,
    residual_NH: Tensor,
    norm_H: Tensor,
    epsilon: float,
    d_NH: Tensor | None,
) -> list[Tensor]:
    """Add to `d_NH` the gradient through a product and the norm before it; return the gradients of the product's factors."""
    u_NR = product.low_gradient(dy_NO)
    dx_NH = None if d_NH is None else product.input_gradient(dy_NO, u_NR)
    x_NH = norm_with_gradient(residual_NH, norm_H, epsilon, dy_NO.dtype, dx_NH, d_NH)
    return product.factor_gradients(x_NH, dy_NO, low_NR, u_NR)
