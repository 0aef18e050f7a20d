"""Attention by torch's fused kernels, for a GPU; they never write scores to memory.

Queries are the last of the keys, so their mask is causal and aligned to the lower right corner; the kernels support it without a mask
tensor. Queries and keys are rounded to the number format of the values, which these kernels require. Scores are divided by the root of the
head size after the product, as in the sampler: dividing the queries first would round them differently, unless that root is a power of
two. The gradient is torch's; the forward pass is recomputed for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.learner.native.padded_attention import PaddedAttention, real_places
from groupwise.engine.models.attention_kernels import deterministic_gradient, pinned_kernels
from groupwise.engine.models.native.weights import Shape


class FusedAttention(PaddedAttention):
    """An `Attention` that computes all texts of a set at once."""

    __slots__ = ()

    @property
    def query_scale(self) -> float:
        """See `Attention.query_scale`: 1, because the kernels scale the scores."""
        return 1.0

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """See `Attention.forward`."""
        out_NHD = out.view(len(out), self.shape.heads, self.shape.head_size)
        output_MLHD = self.room(out_NHD)
        output_MHLD = _attention_output(*self._attention_inputs(queries, keys, values))
        output_MLHD.copy_(output_MHLD.transpose(1, 2))
        self.put(output_MLHD, out_NHD)

    def gradients(
        self,
        d_out: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        d_queries_MLHD: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `PaddedAttention.gradients`."""
        inputs = self._attention_inputs(queries, keys, values)
        d_output_MLHD = self.to_batch(
            d_out.view(len(d_out), self.shape.heads, self.shape.head_size)
        )
        with torch.enable_grad():
            output_MHLD = _attention_output(*(tensor.requires_grad_() for tensor in inputs))
        with deterministic_gradient():
            d_queries_MHLD, d_keys_MJCD, d_values_MJCD = torch.autograd.grad(
                output_MHLD, inputs, d_output_MLHD.transpose(1, 2)
            )
        d_queries_MLHD.copy_(d_queries_MHLD.transpose(1, 2))
        return d_keys_MJCD, d_values_MJCD

    def _attention_inputs(
        self, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries [M, heads, L, D], and keys and values [M, J, C, D], in one number format; no result shares memory with the inputs."""
        queries_MHLD = self.to_batch(queries).transpose(1, 2)
        return (
            queries_MHLD.to(values.dtype, copy=True),
            self.with_prompt(keys).to(values.dtype),
            self.with_prompt(values),
        )


def fused_attention(
    shape: Shape, texts: Sequence[Texts], device: torch.device
) -> list[FusedAttention]:
    """One attention object for each set of texts."""
    return [FusedAttention(shape, text_set, real_places(text_set, device)) for text_set in texts]


def causal_lower_right(queries: int, keys: int) -> Tensor:
    """The mask with which queries are the last of the keys; its module takes a second to import."""
    from torch.nn.attention.bias import causal_lower_right as mask

    return mask(queries, keys)


def _attention_output(queries_MHLD: Tensor, keys_MJCD: Tensor, values_MJCD: Tensor) -> Tensor:
    """The output of attention, [M, heads, L, D]."""
    with pinned_kernels(queries_MHLD.device):
        return F.scaled_dot_product_attention(
            queries_MHLD,
            keys_MJCD,
            values_MJCD,
            attn_mask=causal_lower_right(queries_MHLD.shape[2], keys_MJCD.shape[2]),
            enable_gqa=queries_MHLD.shape[1] != keys_MJCD.shape[1],
        )
