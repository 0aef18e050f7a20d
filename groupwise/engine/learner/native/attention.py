"""Attention of a micro-batch's texts, forward and backward, and the choice of its class by device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from groupwise.engine.learner.native.compiled_attention import CompiledAttention
from groupwise.engine.learner.native.elementwise import rotary_gradient_
from groupwise.engine.learner.native.fused_attention import fused_attention
from groupwise.engine.learner.native.layout import FlatBatch, Texts
from groupwise.engine.learner.native.packed_attention import PackedAttention
from groupwise.engine.models import varlen
from groupwise.engine.models.native.linear import Layer
from groupwise.engine.models.native.weights import NativeModel, Shape


class Attention(Protocol):
    """Attention of all texts of a micro-batch in any layer; its N tokens are concatenated on one axis."""

    def forward(self, layer: Layer, qkv_NO: Tensor) -> Tensor:
        """The output [N, heads · D], from the output of the layer's first product: queries, keys and values before their rotation."""
        ...

    def backward(self, layer: Layer, qkv_NO: Tensor, d_out: Tensor) -> Tensor:
        """The gradient of `qkv_NO`, from that of the output."""
        ...


class RotatedAttention(Protocol):
    """Attention of some texts, from rotated queries and keys."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Write the output for the texts' queries [N, heads, D] into their rows of `out` [N, heads · D]."""
        ...

    def backward(
        self, d_out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, d_qkv: Tensor
    ) -> None:
        """Write the gradients of the texts' rows into `d_qkv` [N, heads + 2 kv_heads, D], and add those of their prompt's rows."""
        ...


class GpuAttention:
    """An `Attention` that rotates queries and keys, and calls its parts with them in their order."""

    def __init__(
        self, model: NativeModel, rotations_N1C: Tensor, parts: Sequence[RotatedAttention]
    ) -> None:
        self._model, self._rotations_N1C, self._parts = model, rotations_N1C, parts

    def forward(self, layer: Layer, qkv_NO: Tensor) -> Tensor:
        """See `Attention.forward`."""
        shape = self._model.shape
        heads = self._model.heads(layer, qkv_NO, self._rotations_N1C)
        attention_NO = qkv_NO.new_empty(len(qkv_NO), shape.heads * shape.head_size)
        for part in self._parts:
            part.forward(*heads, attention_NO)
        return attention_NO

    def backward(self, layer: Layer, qkv_NO: Tensor, d_out: Tensor) -> Tensor:
        """See `Attention.backward`."""
        model, shape = self._model, self._model.shape
        heads = model.heads(layer, qkv_NO, self._rotations_N1C)
        rotated = shape.heads + shape.kv_heads
        d_NJD = torch.empty(
            len(qkv_NO), rotated + shape.kv_heads, shape.head_size, device=qkv_NO.device
        )
        for part in self._parts:
            part.backward(d_out, *heads, d_NJD)
        raw_queries, raw_keys, _ = model.split(qkv_NO)
        for columns, raw, norm_D in (
            (slice(0, shape.heads), raw_queries, layer.query_norm_D),
            (slice(shape.heads, rotated), raw_keys, layer.key_norm_D),
        ):
            rotary_gradient_(d_NJD[:, columns], raw, norm_D, self._rotations_N1C, shape.epsilon)
        return d_NJD.flatten(1).to(model.dtype)


def attention_of(model: NativeModel, batch: FlatBatch) -> Attention:
    """The attention of a micro-batch."""
    device = model.device
    rotations_N1C = model.rotations(torch.tensor(batch.positions, device=device))
    if device.type == "cpu":
        return CompiledAttention(model, rotations_N1C, batch.texts)
    parts = rotated_attention(model.shape, batch.texts, model.dtype, device)
    return GpuAttention(model, rotations_N1C, parts)


def rotated_attention(
    shape: Shape, texts: Sequence[Texts], dtype: torch.dtype, device: torch.device
) -> Sequence[RotatedAttention]:
    """The attention of all texts on a GPU, in the order in which its parts must be called."""
    if varlen.suits(shape.head_size, dtype, device):
        return [PackedAttention(shape, texts, device)]
    return fused_attention(shape, texts, device)
