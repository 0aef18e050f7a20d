"""Matrix products of a decoder, with the low-rank product of an adapter added before the result is rounded.

Layers that read the same input are one product: queries, keys and values; gate and up. On a processor the weights are also kept in
the order in which oneDNN wants them, which saves a third to a half of a product with few rows, as decoding has.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

ROWS_OF_DECODING = 32
"""For so many rows oneDNN is asked to order weights; the order serves other numbers as well."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the model's own linear layers within a product."""

    path: str
    """Its name in the model, as adapters know it."""
    start: int
    end: int
    """Its rows of the product's weight."""
    order: Tensor | None = None
    """How its rows are permuted: row i is the model's row order[i]. None: as they are."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter adds to one linear layer: `scaling · (x Aᵀ) Bᵀ`."""

    down_RI: Tensor
    up_OR: Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class LowRank:
    """The factors of all parts of a product, in the number format of its weight."""

    down_RI: Tensor
    """The A factors of the parts, above each other."""
    up_OR: Tensor
    """Their B factors times their scaling, each in its own rows and columns; 0 elsewhere."""


class Linear:
    """`x Wᵀ + bias`, of one or several of the model's layers."""

    def __init__(
        self, parts: Sequence[Part], weight_OI: Tensor, bias_O: Tensor | None = None
    ) -> None:
        self.parts = tuple(parts)
        self.weight_OI = weight_OI
        self.bias_O = bias_O
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Order the weights for decoding; they are kept in their own order, too."""
        self._packed = _ordered(self.weight_OI)

    def few(self, x_NI: Tensor, low: LowRank | None = None) -> Tensor:
        """The product [N, O] of a few rows, as decoding has them; the adapter is one that `packed_low_rank` ordered."""
        if self._packed is None:
            return self.many(x_NI, low)
        if low is None:
            return _product(x_NI, self._packed, self.bias_O)
        added_NO = _product(_product(x_NI, low.down_RI), low.up_OR)
        return torch.ops.mkldnn._linear_pointwise.binary(
            x_NI, added_NO, self._packed, self.bias_O, "add"
        )

    def many(self, x_NI: Tensor, low: LowRank | None = None) -> Tensor:
        """The product [N, O] of many rows; the adapter is in its own order."""
        if low is None:
            if self.bias_O is None:
                return x_NI @ self.weight_OI.t()
            return torch.addmm(self.bias_O, x_NI, self.weight_OI.t())
        added_NO = (x_NI @ low.down_RI.t()) @ low.up_OR.t()
        found_NO = torch.addmm(added_NO, x_NI, self.weight_OI.t())
        # Not added to `added_NO`: a sum with a bias would be rounded to the bias where the adapter adds little.
        return found_NO if self.bias_O is None else found_NO.add_(self.bias_O)

    def low_rank(self, factors: Mapping[str, Factors]) -> LowRank | None:
        """What an adapter adds, given its factors by the names of layers; None where it leaves this product alone."""
        found = [(part, factors[part.path]) for part in self.parts if part.path in factors]
        if not found:
            return None
        weight = self.weight_OI
        down_RI = torch.cat([each.down_RI for _, each in found]).to(weight.dtype)
        up_OR = weight.new_zeros(weight.shape[0], down_RI.shape[0])
        start = 0
        for part, each in found:
            end = start + each.down_RI.shape[0]
            up = each.up_OR * each.scaling
            up_OR[part.start : part.end, start:end] = up if part.order is None else up[part.order]
            start = end
        return LowRank(down_RI, up_OR)

    def packed_low_rank(self, factors: Mapping[str, Factors]) -> LowRank | None:
        """The same in the order that `few` takes."""
        low = self.low_rank(factors)
        if low is None or self._packed is None:
            return low
        return LowRank(_ordered(low.down_RI), _ordered(low.up_OR))


@contextmanager
def quick_float32(wanted: bool) -> Generator[None]:
    """Let oneDNN compute float32 products, which is right where rounding to bfloat16 would do no harm, as in a model of bfloat16.

    It computes them in float32 all the same, on processors that we know of, but on AMD's twice as fast as MKL does. Torch gives
    products of up to 4,096 multiplications to MKL all the same, which may round otherwise.
    """
    products = cast("Any", torch.backends.mkldnn).matmul
    before = products.fp32_precision
    if wanted:
        products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


def _ordered(weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), ROWS_OF_DECODING)


def _product(x_NI: Tensor, packed: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, packed, bias_O, "none", [], "")
