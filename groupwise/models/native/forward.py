"""The forward pass of one text by a native model: a prompt's keys and values, or plain logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.models.native.linear import LowRank
from groupwise.models.native.weights import Layer, NativeModel

Adapter = Sequence[LowRank | None]
"""What is added to each of `NativeModel.products`, in their order without the head."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: its number, queries and keys (float32, at their positions) and values, to [N, heads · D]."""


def residual_after_layers(
    model: NativeModel,
    residual_NH: Tensor,
    rotations_N1C: Tensor,
    attend: Attend,
    adapter: Adapter | None,
    *,
    few: bool,
) -> Tensor:
    """The residual stream [N, H] after all layers; overwrites `residual_NH`. `few` as in `groupwise.models.native.linear`."""
    for number, layer in enumerate(model.layers):
        lows = adapter[4 * number : 4 * number + 4] if adapter is not None else (None,) * 4
        _layer(model, layer, number, residual_NH, rotations_N1C, attend, lows, few)
    return residual_NH


def _layer(
    model: NativeModel,
    layer: Layer,
    number: int,
    residual_NH: Tensor,
    rotations_N1C: Tensor,
    attend: Attend,
    lows: Sequence[LowRank | None],
    few: bool,
) -> None:
    qkv, output, gate_up, down = (linear.few if few else linear.many for linear in layer.products)
    x_NH = model.normed(residual_NH, layer.attention_norm_H)
    queries, keys, values = model.split(qkv(x_NH, lows[0]))
    queries = model.turned(queries, layer.query_norm_D, rotations_N1C)
    keys = model.turned(keys, layer.key_norm_D, rotations_N1C)
    residual_NH += output(attend(number, queries, keys, values), lows[1])
    x_NH = model.normed(residual_NH, layer.mlp_norm_H)
    gate_NF, up_NF = gate_up(x_NH, lows[2]).chunk(2, dim=-1)
    residual_NH += down(F.silu(gate_NF) * up_NF, lows[3])


def text_attention(model: NativeModel, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of one text, [N, heads · D]."""
    found = F.scaled_dot_product_attention(
        queries.to(model.dtype).transpose(0, 1)[None],
        keys.to(model.dtype).transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    return found[0].transpose(0, 1).flatten(1)


def plain_logits(model: NativeModel, ids_N: Tensor, adapter: Adapter | None = None) -> Tensor:
    """Logits [N, V] in float32 after each token of one text, as the model itself has them."""
    positions_N = torch.arange(len(ids_N), device=ids_N.device)
    residual_NH = residual_after_layers(
        model,
        model.embedded(ids_N),
        model.rotations(positions_N),
        lambda _, q, k, v: text_attention(model, q, k, v),
        adapter,
        few=False,
    )
    return model.head.many(model.normed(residual_NH, model.norm_H)).float() + model.shift
