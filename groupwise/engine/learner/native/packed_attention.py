"""Attention of texts of any lengths at once, by torch's flash attention for packed sequences, for a GPU.

Each text's keys are those of its prompt, gathered again for each text, and its own. There is one call for a micro-batch, not one for each
group, because starting a kernel takes longer than a GPU needs for most groups. Rounding is that of
`groupwise.engine.learner.native.fused_attention`. The gradient is torch's; the forward pass is recomputed for it. That of a prompt's keys
is summed in float32, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.models import varlen
from groupwise.engine.models.native.weights import Shape


class PackedAttention:
    """A `groupwise.engine.learner.native.attention.RotatedAttention` of all texts, which are concatenated on one axis."""

    def __init__(self, shape: Shape, texts: Sequence[Texts], device: torch.device) -> None:
        self._shape = shape
        keys: list[int] = []
        lengths: list[int] = []
        key_lengths: list[int] = []
        for text_set in texts:
            prompt = (
                []
                if text_set.prompt is None
                else [*range(text_set.prompt[0], sum(text_set.prompt))]
            )
            start = text_set.start
            for length in text_set.lengths:
                keys += prompt
                keys += range(start, start + length)
                start += length
                lengths.append(length)
                key_lengths.append(len(prompt) + length)
        self._longest = max(lengths), max(key_lengths)
        self._ends = (_ends(lengths, device), _ends(key_lengths, device))
        repeated = len(keys) > sum(lengths)
        self._keys_K = torch.tensor(keys, device=device) if repeated else None
        """Index of the token of each key; None if the keys are all tokens in order."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """See `RotatedAttention.forward`."""
        out.copy_(self._attention_output(*self._attention_inputs(queries, keys, values)).flatten(1))

    def backward(
        self, d_out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, d_qkv: Tensor
    ) -> None:
        """See `RotatedAttention.backward`."""
        heads = self._shape.heads
        inputs = [
            tensor.requires_grad_() for tensor in self._attention_inputs(queries, keys, values)
        ]
        with torch.enable_grad():
            output_NHD = self._attention_output(*inputs)
        d_queries, d_keys_KJD, d_values_KJD = torch.autograd.grad(
            output_NHD, inputs, d_out.view(output_NHD.shape)
        )
        d_qkv[:, :heads] = d_queries
        d_both = torch.cat((d_keys_KJD, d_values_KJD), dim=1)
        if self._keys_K is not None:
            # Of each token over all texts that saw it.
            d_NX = varlen.sum_of_copies(d_both.flatten(1), self._keys_K, len(d_qkv))
            d_both = d_NX.view(len(d_qkv), *d_both.shape[1:])
        d_qkv[:, heads:] = d_both

    def _attention_inputs(
        self, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries, and the keys and values that each text sees, in one number format; no result shares memory with the inputs."""
        pair = keys.to(values.dtype), values
        if self._keys_K is None:
            keys, values = (tensor.clone(memory_format=torch.contiguous_format) for tensor in pair)
        else:
            keys, values = (tensor.index_select(0, self._keys_K) for tensor in pair)
        return queries.to(values.dtype, copy=True), keys, values

    def _attention_output(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return varlen.attention(queries, keys, values, self._ends, self._longest)


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
