"""Attention by torch's fused kernels, for a GPU; they never write scores to memory.

Texts of similar length are a batch, padded to the longest, each with its prompt's keys before its own. Repeating the keys of a shared
prompt costs little: a key has `head size` numbers, while it has a score for each query. The gradient of the prompt's keys is the sum over
all texts that saw them. A padded query's output is dropped, and no real query sees a padded key, because padding comes last.

Queries are the last of the keys, so their mask is causal and aligned to the lower right corner; the kernels support it without a mask
tensor. Queries and keys are rounded to the number format of the values, which these kernels require. Scores are divided by the root of the
head size after the product, as in the sampler: dividing the queries first would round them differently, unless that root is a power of
two. The gradient is torch's; the forward pass is recomputed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.models.attention_kernels import deterministic_gradient, pinned_kernels
from groupwise.engine.models.native.weights import Shape


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """A `groupwise.engine.learner.native.attention.RotatedAttention` of one set of texts (M texts of L tokens, J key heads)."""

    shape: Shape
    texts: Texts
    real_X: Tensor | None
    """Indices of the M · L places of the padded texts that hold a token; None if all do."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """See `RotatedAttention.forward`."""
        out_NHD = out.view(len(out), self.shape.heads, self.shape.head_size)
        output_MLHD = self.room(out_NHD)
        output_MHLD = _attention_output(*self._attention_inputs(queries, keys, values))
        output_MLHD.copy_(output_MHLD.transpose(1, 2))
        self.put(output_MLHD, out_NHD)

    def backward(
        self, d_out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, d_qkv: Tensor
    ) -> None:
        """See `RotatedAttention.backward`."""
        shape, prompt = self.shape, self.texts.prompt_length
        d_own_MLXD = self.room(d_qkv)
        of_keys = self._gradients(d_out, queries, keys, values, d_own_MLXD[:, :, : shape.heads])
        for first, d_MJCD in zip((shape.heads, shape.heads + shape.kv_heads), of_keys, strict=True):
            part = slice(first, first + shape.kv_heads)
            d_of_own_MJLD = d_MJCD[:, :, prompt : prompt + self.length]
            d_own_MLXD[:, :, part].copy_(d_of_own_MJLD.transpose(1, 2))
            if prompt:
                d_of_prompt_JPD = d_MJCD[:, :, :prompt].sum(0, dtype=d_qkv.dtype)
                self._prompt_rows(d_qkv)[:, part] += d_of_prompt_JPD.transpose(0, 1)
        self.put(d_own_MLXD, d_qkv)

    def _gradients(
        self,
        d_out: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        d_queries_MLHD: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Write the gradients of the queries; return those of keys and values [M, J, C, D], with arbitrary values for padding."""
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

    @property
    def count(self) -> int:
        """Number of texts, M."""
        return len(self.texts.lengths)

    @property
    def length(self) -> int:
        """Tokens of the longest text, L."""
        return self.texts.lengths[0]

    def to_batch(self, x: Tensor) -> Tensor:
        """The rows of the texts as a batch [M, L, …], padded with 0."""
        rows = self._text_rows(x)
        if self.real_X is not None:
            padded = rows.new_zeros(self.count * self.length, *rows.shape[1:])
            rows = padded.index_copy_(0, self.real_X, rows)
        return rows.view(self.count, self.length, *rows.shape[1:])

    def with_prompt(self, x_NJD: Tensor) -> Tensor:
        """Keys or values [M, J, C, D]: those of the prompt, then the texts' own."""
        prompt, (heads, size) = self.texts.prompt_length, x_NJD.shape[1:]
        end = prompt + self.length
        all_MJCD = x_NJD.new_empty(self.count, heads, end, size)
        if prompt:
            all_MJCD[:, :, :prompt].copy_(self._prompt_rows(x_NJD).transpose(0, 1))
        all_MJCD[:, :, prompt:].copy_(self.to_batch(x_NJD).transpose(1, 2))
        return all_MJCD

    def room(self, x: Tensor) -> Tensor:
        """Output buffer [M, L, …]: the texts' rows of x themselves if none is padded, else new memory."""
        rows = self._text_rows(x)
        if self.real_X is not None:
            rows = x.new_empty(self.count * self.length, *x.shape[1:])
        return rows.view(self.count, self.length, *x.shape[1:])

    def put(self, room: Tensor, x: Tensor) -> None:
        """Copy the rows written to the buffer `room` to the texts' rows of x."""
        if self.real_X is not None:
            self._text_rows(x).copy_(room.flatten(0, 1).index_select(0, self.real_X))

    def _text_rows(self, x: Tensor) -> Tensor:
        return x[self.texts.start : self.texts.end]

    def _prompt_rows(self, x: Tensor) -> Tensor:
        assert self.texts.prompt is not None
        start, length = self.texts.prompt
        return x[start : start + length]


def real_places(texts: Texts, device: torch.device) -> Tensor | None:
    """See `FusedAttention.real_X`."""
    longest = texts.lengths[0]
    if longest == texts.lengths[-1]:
        return None
    lengths_M1 = torch.tensor(texts.lengths, device=device)[:, None]
    return (torch.arange(longest, device=device) < lengths_M1).flatten().nonzero()[:, 0]


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
