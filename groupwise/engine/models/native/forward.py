"""The forward pass of one text by a native model: a prompt's keys and values, or plain logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.models.attention_kernels import pinned_kernels
from groupwise.engine.models.native.fused import kernels_for
from groupwise.engine.models.native.linear import Layer, Linear, LowRank, rounds_before_adding

Adapter = Sequence[Any]
"""For each of `NativeModel.products` but the head, in their order, the adapter's addition or None: from `low_rank`, or for few rows from
`packed_low_rank`."""

Attend = Callable[[int, Tensor], Tensor]
"""Attention of one layer. Arguments: the layer's number, and its queries, keys and values [N, O]; result: [N, heads · D]."""


class Decoder(Protocol):
    """The parts of a `NativeModel` that the forward pass uses."""

    dtype: torch.dtype
    layers: list[Layer]
    norm_H: Tensor
    head: Linear
    shift: float

    def rotations(self, positions_N: Tensor) -> Tensor: ...
    def embedded(self, ids_N: Tensor) -> Tensor: ...
    def normed(self, x_NH: Tensor, weight_H: Tensor, *, few: bool = False) -> Tensor: ...
    def swiglu(self, gate_up_N2F: Tensor, *, few: bool = False) -> Tensor: ...
    def heads(
        self, layer: Layer, qkv_NO: Tensor, rotations_N1C: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def residual_after_layers(
    model: Decoder,
    residual_NH: Tensor,
    attend: Attend,
    adapter: Adapter | None,
    *,
    few: bool,
) -> Tensor:
    """The residual stream [N, H] after all layers; overwrites `residual_NH`. `few` as in `groupwise.engine.models.native.linear`."""
    for number, layer in enumerate(model.layers):
        lows = adapter[4 * number : 4 * number + 4] if adapter is not None else (None,) * 4
        x_NH = model.normed(residual_NH, layer.attention_norm_H, few=few)
        if few:
            attended = attend(number, layer.qkv.few(x_NH, lows[0]))
            residual_NH += layer.output.few(attended, lows[1])
            x_NH = model.normed(residual_NH, layer.mlp_norm_H, few=few)
            gated_NF = model.swiglu(layer.gate_up.few(x_NH, lows[2]), few=few)
            residual_NH += layer.down.few(gated_NF, lows[3])
        else:
            attended = attend(number, layer.qkv.many(x_NH, lows[0]))
            layer.output.add_many(residual_NH, attended, lows[1])
            x_NH = model.normed(residual_NH, layer.mlp_norm_H, few=few)
            layer.down.add_many(
                residual_NH, _swiglu_many(model, layer.gate_up, x_NH, lows[2]), lows[3]
            )
    return residual_NH


def _swiglu_many(model: Decoder, gate_up: Linear, x_NH: Tensor, low: LowRank | None) -> Tensor:
    """`silu(gate) · up` of many rows, [N, F]; on a GPU one kernel adds the adapter's part of both."""
    kernels = kernels_for(x_NH)
    if (
        low is None
        or kernels is None
        or gate_up.bias_O is not None
        or not rounds_before_adding(x_NH)
    ):
        return model.swiglu(gate_up.many(x_NH, low))
    gate_up_N2F = torch.mm(x_NH, gate_up.weight_OI.t(), out_dtype=torch.float32)
    return kernels.swiglu_with_low_rank(gate_up_N2F, x_NH @ low.down_RI.t(), low.up_OR, model.dtype)


def text_attention(model: Decoder, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of one text, [N, heads · D]."""
    with pinned_kernels(queries.device):
        output = F.scaled_dot_product_attention(
            queries.to(model.dtype).transpose(0, 1)[None],
            keys.to(model.dtype).transpose(0, 1)[None],
            values.to(model.dtype).transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )
    return output[0].transpose(0, 1).flatten(1)


def plain_logits(model: Decoder, ids_N: Tensor, adapter: Adapter | None = None) -> Tensor:
    """Logits [N, V] in float32 after each token of one text, without the shift of `NativeModel`."""
    rotations_N1C = model.rotations(torch.arange(len(ids_N), device=ids_N.device))

    def attend(number: int, qkv_NO: Tensor) -> Tensor:
        return text_attention(model, *model.heads(model.layers[number], qkv_NO, rotations_N1C))

    residual_NH = residual_after_layers(model, model.embedded(ids_N), attend, adapter, few=False)
    return model.head.many(model.normed(residual_NH, model.norm_H)).float() + model.shift
