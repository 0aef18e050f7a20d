"""The forward pass of one text by a native model: a prompt's keys and values, or plain logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.models.native.weights import NativeModel

Adapter = Sequence[Any]
"""Parts that are added to each of `NativeModel.products`, in their order without the head: from `low_rank`, or from `packed_low_rank`
for few rows."""

Attend = Callable[[int, Tensor], Tensor]
"""Attention of one layer: its number and its first product, queries, keys and values [N, O], to [N, heads · D]."""


def residual_after_layers(
    model: NativeModel,
    residual_NH: Tensor,
    attend: Attend,
    adapter: Adapter | None,
    *,
    few: bool,
) -> Tensor:
    """The residual stream [N, H] after all layers; overwrites `residual_NH`. `few` as in `groupwise.engine.models.native.linear`."""
    for number, layer in enumerate(model.layers):
        lows = adapter[4 * number : 4 * number + 4] if adapter is not None else (None,) * 4
        qkv, output, gate_up, down = (
            linear.few if few else linear.many for linear in layer.products
        )
        x_NH = model.normed(residual_NH, layer.attention_norm_H, few=few)
        residual_NH += output(attend(number, qkv(x_NH, lows[0])), lows[1])
        x_NH = model.normed(residual_NH, layer.mlp_norm_H, few=few)
        residual_NH += down(model.gated(gate_up(x_NH, lows[2]), few=few), lows[3])
    return residual_NH


def text_attention(model: NativeModel, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of one text, [N, heads · D]."""
    found = F.scaled_dot_product_attention(
        queries.to(model.dtype).transpose(0, 1)[None],
        keys.to(model.dtype).transpose(0, 1)[None],
        values.to(model.dtype).transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    return found[0].transpose(0, 1).flatten(1)


def plain_logits(model: NativeModel, ids_N: Tensor, adapter: Adapter | None = None) -> Tensor:
    """Logits [N, V] in float32 after each token of one text, as the model itself has them."""
    rotations_N1C = model.rotations(torch.arange(len(ids_N), device=ids_N.device))

    def attend(number: int, qkv_NO: Tensor) -> Tensor:
        return text_attention(model, *model.heads(model.layers[number], qkv_NO, rotations_N1C))

    residual_NH = residual_after_layers(model, model.embedded(ids_N), attend, adapter, few=False)
    return model.head.many(model.normed(residual_NH, model.norm_H)).float() + model.shift
