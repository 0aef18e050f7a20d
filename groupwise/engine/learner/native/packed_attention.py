"""Attention of texts of any lengths at once, by torch's flash attention for packed sequences, for a GPU.

Each text's keys are those of its prompt, gathered again for it, and its own. There is one call for a micro-batch, not one for each
group: starting a kernel takes longer than a GPU needs for most groups. Rounding is that of
`groupwise.engine.learner.native.fused_attention`, and the gradient is torch's, for which the forward pass is computed again; that of a
prompt's keys is summed in float32, in the same order each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.models.native.weights import Shape

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

FORMATS = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
GROUPED = varlen_attn is not None and "enable_gqa" in signature(varlen_attn).parameters
"""True if the kernel needs a flag for fewer heads of keys than of queries; torch 2.11 takes them as they are."""
CAUSAL = (-1, 0)
"""A window that ends with the query itself, the last query at the last key."""


def suits(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the kernel computes a model of this shape and number format on this device."""
    return (
        varlen_attn is not None
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and dtype in FORMATS
        and shape.head_size % 8 == 0
        and shape.head_size <= LARGEST_HEAD
    )


class PackedAttention:
    """A `groupwise.engine.learner.native.attention.Attention` of all texts, which stand behind each other on one axis."""

    query_scale = 1.0

    def __init__(self, shape: Shape, texts: Sequence[Texts], device: torch.device) -> None:
        self._shape = shape
        keys: list[int] = []
        lengths: list[int] = []
        key_lengths: list[int] = []
        for each in texts:
            prompt = [] if each.prompt is None else [*range(each.prompt[0], sum(each.prompt))]
            start = each.start
            for length in each.lengths:
                keys += prompt
                keys += range(start, start + length)
                start += length
                lengths.append(length)
                key_lengths.append(len(prompt) + length)
        self._longest = max(lengths), max(key_lengths)
        self._ends = tuple(
            torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device)
            for each in (lengths, key_lengths)
        )
        repeated = len(keys) > sum(lengths)
        self._keys_K = torch.tensor(keys, device=device) if repeated else None
        """The token of each key; None if it is all tokens in order."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """See `Attention.forward`."""
        out.copy_(self._attention_output(*self._inputs(queries, keys, values)).flatten(1))

    def backward(
        self, d_out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, d_qkv: Tensor
    ) -> None:
        """See `Attention.backward`."""
        heads = self._shape.heads
        inputs = [each.requires_grad_() for each in self._inputs(queries, keys, values)]
        with torch.enable_grad():
            found_NHD = self._attention_output(*inputs)
        d_queries, d_keys_KJD, d_values_KJD = torch.autograd.grad(
            found_NHD, inputs, d_out.view(found_NHD.shape)
        )
        d_qkv[:, :heads] = d_queries
        d_both = torch.cat((d_keys_KJD, d_values_KJD), dim=1)
        if self._keys_K is not None:
            # The sum, for each token, over all texts that saw it. A plain index adds in the order in which threads come; the gradient of
            # an embedding in that of the indices.
            tokens, each = len(d_qkv), d_both.shape[1:]
            d_KX = d_both.to(torch.promote_types(d_both.dtype, torch.float32)).flatten(1)
            d_NX = torch.ops.aten.embedding_dense_backward(d_KX, self._keys_K, tokens, -1, False)
            d_both = d_NX.view(tokens, *each)
        d_qkv[:, heads:] = d_both

    def _inputs(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Queries and the keys and values that each text sees, in one number format; none shares memory with the inputs."""
        both = keys.to(values.dtype), values
        if self._keys_K is None:
            keys, values = (each.clone(memory_format=torch.contiguous_format) for each in both)
        else:
            keys, values = (each.index_select(0, self._keys_K) for each in both)
        return queries.to(values.dtype, copy=True), keys, values

    def _attention_output(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attention: Any = varlen_attn  # its releases take different arguments
        grouped = self._shape.heads != self._shape.kv_heads
        options = {"enable_gqa": grouped} if GROUPED else {}
        return attention(
            queries, keys, values, *self._ends, *self._longest, window_size=CAUSAL, **options
        )
