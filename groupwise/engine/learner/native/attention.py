"""Attention of a micro-batch's texts, forward and backward, and the choice of its class by device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from groupwise.engine.learner.native.fused_attention import fused_attention
from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.learner.native.packed_attention import PackedAttention
from groupwise.engine.learner.native.piece_attention import piece_attention
from groupwise.engine.models import varlen
from groupwise.engine.models.native.weights import Shape


class Attention(Protocol):
    """Attention of some texts of a micro-batch, whose N tokens are concatenated on one axis."""

    @property
    def query_scale(self) -> float:
        """Factor for the caller to apply to queries: the inverse root of the head size, or 1 if this class scales the scores."""
        ...

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Write the output for the texts' queries [N, heads, D], multiplied by `query_scale`, into their rows of `out` [N, heads · D]."""
        ...

    def backward(
        self, d_out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, d_qkv: Tensor
    ) -> None:
        """Write the gradients of the texts' rows into `d_qkv` [N, heads + 2 kv_heads, D], and add those of their prompt's rows."""
        ...


def attention_of(
    shape: Shape, texts: Sequence[Texts], dtype: torch.dtype, device: torch.device
) -> Sequence[Attention]:
    """The attention objects for all texts, in the order in which they must be called."""
    if device.type == "cpu":
        return piece_attention(shape, texts, device)
    if varlen.suits(shape.head_size, dtype, device):
        return [PackedAttention(shape, texts, device)]
    return fused_attention(shape, texts, device)
