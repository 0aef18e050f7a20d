"""Attention of a micro-batch's texts on a CPU, by the kernels of `groupwise.engine.models.native.text_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.models.native.compiled import array
from groupwise.engine.models.native.linear import Layer
from groupwise.engine.models.native.packed import in_parts
from groupwise.engine.models.native.weights import NativeModel


class CompiledAttention:
    """A `groupwise.engine.learner.native.attention.Attention`."""

    def __init__(self, model: NativeModel, rotations_N1C: Tensor, texts: Sequence[Texts]) -> None:
        self._shape = model.shape
        self._turns = array(torch.view_as_real(rotations_N1C[:, 0]).contiguous())
        rows: list[tuple[int, ...]] = []
        chains: list[list[int]] = []
        self._alone = 0
        """Number of chains that see no prompt; they come first."""
        for text_set in texts:
            start, prompt = text_set.start, text_set.prompt or (0, 0)
            for length in text_set.lengths:
                if not prompt[1] or not rows or rows[-1][2:] != prompt:
                    chains.append([len(rows), len(rows)])
                rows.append((start, length, *prompt))
                chains[-1][1] = len(rows)
                start += length
            self._alone = self._alone if prompt[1] else len(chains)
        self._texts_M4, self._chains_K2 = np.array(rows), np.array(chains)

    def forward(self, layer: Layer, qkv_NO: Tensor) -> Tensor:
        """See `Attention.forward`."""
        from groupwise.engine.models.native import text_attention

        out_NO = qkv_NO.new_empty(len(qkv_NO), self._shape.heads * self._shape.head_size)
        given, out = self._arguments(layer, qkv_NO), array(out_NO)
        forward: Any = text_attention.forward
        self._in_units(
            lambda first, last: forward(*given, out, first, last),
            0,
            len(self._chains_K2),
        )
        return out_NO

    def backward(self, layer: Layer, qkv_NO: Tensor, d_out: Tensor) -> Tensor:
        """See `Attention.backward`."""
        from groupwise.engine.models.native import text_attention

        shape, d_qkv_NO = self._shape, torch.empty_like(qkv_NO)
        given = self._arguments(layer, qkv_NO)
        backward: Any = text_attention.backward
        d_kv = np.empty((2 * shape.kv_heads, len(qkv_NO), shape.head_size), np.float32)
        d_out, d_qkv = array(d_out), array(d_qkv_NO)
        # The gradients of prompts are written first, and then added to.
        for first, last in ((0, self._alone), (self._alone, len(self._chains_K2))):
            self._in_units(
                lambda first, last: backward(*given, d_out, d_kv, d_qkv, first, last),
                first,
                last,
            )
        qkv, turns, _, key_norm_D, epsilon = given[:5]
        text_attention.finish(qkv, turns, key_norm_D, epsilon, d_kv, d_qkv)
        return d_qkv_NO

    def _arguments(self, layer: Layer, qkv_NO: Tensor) -> tuple[Any, ...]:
        shape = self._shape
        return (
            array(qkv_NO),
            self._turns,
            _norm(layer.query_norm_D),
            _norm(layer.key_norm_D),
            np.float32(shape.epsilon),
            shape.kv_heads,
            self._texts_M4,
            self._chains_K2,
        )

    def _in_units(self, work: Callable[[int, int], object], first: int, last: int) -> None:
        """Call `work` for the units of these chains, on as many threads as torch uses."""
        heads = self._shape.kv_heads
        first, count = first * heads, (last - first) * heads
        if torch.get_num_threads() == 1:
            work(first, first + count)
        elif count:
            in_parts(lambda start, end: work(first + start, first + end), count, least=1)


def _norm(norm_D: Tensor | None) -> NDArray[Any]:
    return np.empty(0, np.float32) if norm_D is None else array(norm_D)
