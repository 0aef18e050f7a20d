"""A matrix kept in the order in which products with few rows read it fastest, and the factors of an adapter beside it.

`packed` chooses: kernels of our own for bfloat16 where the processor has an instruction for it, else oneDNN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.models.native.compiled import array

ROWS_OF_DECODING = 32
"""For so many rows oneDNN is asked to order weights; the order serves other numbers as well."""

Placed = Sequence[tuple[int, int, Tensor, Tensor]]
"""Of parts of a product: first column, the one behind the last, A [R, I], and B times its scaling [columns, R], as W is rounded."""


class Packed(Protocol):
    """`x Wᵀ + bias` of few rows, and what an adapter adds, before rounding."""

    def low_rank(self, placed: Placed) -> Any:
        """The factors of an adapter, as `product` wants them."""
        ...

    def product(self, x_NI: Tensor, low: Any) -> Tensor:
        """[N, O], in the format of W or float32; `low` is one of `low_rank`, or None."""
        ...


def packed(weight_OI: Tensor, bias_O: Tensor | None) -> Packed:
    """A copy of a matrix, in the order that is best for it here."""
    from groupwise.models.native import bfloat16_products

    outputs, inputs = weight_OI.shape
    fits = outputs % bfloat16_products.LANES == 0 and inputs % 2 == 0
    if weight_OI.dtype == torch.bfloat16 and fits and bfloat16_products.usable():
        return Bfloat16Packed(weight_OI, bias_O)
    return OrderedPacked(weight_OI, bias_O)


class Bfloat16Packed:
    """Multiplied by `groupwise.models.native.bfloat16_products`."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._outputs, self._inputs = weight_OI.shape
        self._weights = _in_tiles(weight_OI)
        bias_O = torch.zeros(self._outputs) if bias_O is None else bias_O.float()
        self._bias_O = array(bias_O)
        self._no_adapter = _Bfloat16LowRank([], *weight_OI.shape)

    def low_rank(self, placed: Placed) -> Any:
        """See `Packed.low_rank`."""
        return _Bfloat16LowRank(placed, self._outputs, self._inputs)

    def product(self, x_NI: Tensor, low: Any) -> Tensor:
        """See `Packed.product`."""
        from groupwise.models.native import bfloat16_products

        low = self._no_adapter if low is None else low
        rows = len(x_NI)
        more = -rows % bfloat16_products.ROWS
        x_NI = F.pad(x_NI, (0, 0, 0, more)) if more else x_NI
        into_NO = torch.empty(rows + more, self._outputs)
        bfloat16_products.product(
            array(x_NI),
            self._weights,
            self._bias_O,
            low.down,
            low.up_RO,
            low.ranks_B2,
            array(into_NO),
        )
        return into_NO[:rows]


class _Bfloat16LowRank:
    """Factors of the parts of a product: A in tiles, B in float32, and which ranks act on which tile."""

    def __init__(self, placed: Placed, outputs: int, inputs: int) -> None:
        from groupwise.models.native.bfloat16_products import LANES

        ranks = sum(len(down_RI) for _, _, down_RI, _ in placed)
        all_ranks = -(-ranks // LANES) * LANES
        down_RI = torch.zeros(all_ranks, inputs, dtype=torch.bfloat16)
        up_RO = torch.zeros(all_ranks, outputs)
        self.ranks_B2 = np.zeros((outputs // LANES, 2), np.int64)
        first = 0
        for start, end, down, up in placed:
            last = first + len(down)
            down_RI[first:last] = down
            up_RO[first:last, start:end] = up.t()
            blocks = self.ranks_B2[start // LANES : -(-end // LANES)]
            blocks[blocks[:, 1] == 0, 0] = first
            blocks[:, 1] = last
            first = last
        self.down, self.up_RO = _in_tiles(down_RI), array(up_RO)


class OrderedPacked:
    """Multiplied by oneDNN, which adds what the adapter gives before it rounds."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._outputs, self._bias_O = weight_OI.shape[0], bias_O
        self._weights = torch.ops.mkldnn._reorder_linear_weight(
            weight_OI.contiguous(), ROWS_OF_DECODING
        )

    def low_rank(self, placed: Placed) -> Any:
        """See `Packed.low_rank`."""
        return _OrderedLowRank(placed, self._outputs)

    def product(self, x_NI: Tensor, low: Any) -> Tensor:
        """See `Packed.product`."""
        operation = torch.ops.mkldnn._linear_pointwise
        if low is None:
            return operation(x_NI, self._weights, self._bias_O, "none", [], "")
        return operation.binary(x_NI, low.added(x_NI), self._weights, self._bias_O, "add")


class _OrderedLowRank:
    """Factors of the parts of a product, each with as many ranks as the kernel takes at once, or a multiple."""

    def __init__(self, placed: Placed, outputs: int) -> None:
        from groupwise.models.native.kernels import STEP

        ranks = [-(-len(down_RI) // STEP) * STEP for _, _, down_RI, _ in placed]
        down_RI = torch.zeros(sum(ranks), placed[0][2].shape[1])
        up_RO = torch.zeros(sum(ranks), outputs)
        spans: list[tuple[int, int, int, int]] = []
        first = 0
        for rank, (start, end, down, up) in zip(ranks, placed, strict=True):
            down_RI[first : first + len(down)] = down
            up_RO[first : first + len(down), start:end] = up.t()
            spans.append((start, end, first, first + rank))
            first += rank
        self._down_RI, self._up_RO, self._spans_S4 = array(down_RI), array(up_RO), np.array(spans)

    def added(self, x_NI: Tensor) -> Tensor:
        """`(x Aᵀ) Bᵀ` [N, O], in the format of x."""
        from groupwise.models.native import kernels

        added_NO = x_NI.new_empty(len(x_NI), self._up_RO.shape[1])
        kernels.low_rank(array(x_NI), self._down_RI, self._up_RO, self._spans_S4, array(added_NO))
        return added_NO


def _in_tiles(weight_OI: Tensor) -> Any:
    """[O / 16, I / 2, 16, 2], as `bfloat16_products` reads it."""
    from groupwise.models.native.bfloat16_products import LANES

    outputs, inputs = weight_OI.shape
    tiles = weight_OI.reshape(outputs // LANES, LANES, inputs // 2, 2).transpose(1, 2)
    return array(tiles.contiguous())
