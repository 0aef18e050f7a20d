"""A copy of a matrix in the order that products with few rows read fastest, and the factors of an adapter in a matching order.

A kernel runs on one thread; `in_parts` runs it on as many threads as torch uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.models.native.compiled import array
from groupwise.engine.models.native.facts import LANES, ROWS, multiple

Array = NDArray[Any]

NOT_YET = np.empty((0, 0), np.float32)
"""Passed to `products.product` in place of x Aᵀ if it should compute x Aᵀ itself."""
BLOCKS_OF_A_THREAD = 8
"""Fewest tiles per thread: fewer are not worth another thread."""

Placed = Sequence[tuple[int, int, Tensor, Tensor]]
"""Parts of a product: first column, column after the last, A [R, I], and B times its scaling [columns, R], rounded like W."""


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """The adapter's factors for all parts of a product."""

    down: Array
    """A, ordered in tiles (`Packed._in_tiles`)."""
    up_RO: Array
    """B times its scaling, in float32."""
    ranks_B2: Array
    """For each block of outputs, the first rank that acts on it, and the rank after the last."""


class Packed:
    """`x Wᵀ + bias` for few rows, by `groupwise.engine.models.native.products`; keeps its own copy of the matrix."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, tiles: Tensor | None = None
    ) -> None:
        """`tiles`: the property of that name of an earlier object with the same weight."""
        from groupwise.engine.models.native import products

        self._outputs, inputs = weight_OI.shape
        self._pairs = weight_OI.dtype == torch.bfloat16 and products.USE_PAIRS
        self._shape = multiple(self._outputs, LANES), inputs + (inputs % 2 if self._pairs else 0)
        self._weights = self._tiles_of(weight_OI) if tiles is None else array(tiles)
        bias_O = torch.zeros(self._outputs) if bias_O is None else bias_O.float()
        self._bias_O = array(F.pad(bias_O, (0, self._shape[0] - self._outputs)))
        self._no_adapter = self.low_rank([])

    @property
    def tiles(self) -> Tensor:
        """The matrix as it is kept here."""
        return torch.from_numpy(self._weights)

    def _tiles_of(self, weight_OI: Tensor) -> Array:
        # Published weights are often bfloat16, even if they are loaded as float32. Testing one row excludes most others quickly.
        if weight_OI.dtype != torch.bfloat16 and _are_halves(weight_OI[0]):
            weight_OI = weight_OI.bfloat16() if _are_halves(weight_OI) else weight_OI
        return self._in_tiles(weight_OI)

    def low_rank(self, placed: Placed) -> PackedLowRank:
        """The factors of an adapter, in the form that `product` takes."""
        outputs, inputs = self._shape
        ranks = sum(len(down_RI) for _, _, down_RI, _ in placed)
        down_RI = torch.zeros(multiple(ranks, LANES), inputs)
        up_RO = torch.zeros(len(down_RI), outputs)
        ranks_B2 = np.zeros((outputs // LANES, 2), np.int64)
        first = 0
        for start, end, down, up in placed:
            last = first + len(down)
            down_RI[first:last, : down.shape[1]] = down
            up_RO[first:last, start:end] = up.t()
            blocks = ranks_B2[start // LANES : -(-end // LANES)]
            blocks[blocks[:, 1] == 0, 0] = first
            blocks[:, 1] = last
            first = last
        if self._pairs:
            down_RI = down_RI.bfloat16()
        return PackedLowRank(self._in_tiles(down_RI), array(up_RO), ranks_B2)

    def product(self, x_NI: Tensor, low: PackedLowRank | None) -> Tensor:
        """The product [N, O] in float32, with no rounding in between; `low` is a result of `low_rank`."""
        from groupwise.engine.models.native import products

        low = self._no_adapter if low is None else low
        x = array(self._pad_rows(x_NI))
        into_NO = torch.empty(len(x), self._shape[0])
        into, blocks = array(into_NO), len(low.ranks_B2)
        multithreaded = torch.get_num_threads() > 1
        low_NR = products.narrow(x, low.down) if multithreaded else NOT_YET

        def part(first: int, last: int) -> None:
            products.product(
                x, self._weights, self._bias_O, low.down, low_NR, low.up_RO, low.ranks_B2, into, first, last
            )  # fmt: skip

        if multithreaded:
            in_parts(part, blocks, least=BLOCKS_OF_A_THREAD)
        else:
            part(0, blocks)
        y_NO = into_NO[: len(x_NI)]
        unpadded = self._outputs == self._shape[0]
        return y_NO if unpadded else y_NO[:, : self._outputs].contiguous()

    def _pad_rows(self, x_NI: Tensor) -> Tensor:
        rows, inputs = x_NI.shape
        if not self._pairs:
            x_NI = x_NI.float()
        if rows % ROWS or inputs < self._shape[1]:
            return F.pad(x_NI, (0, self._shape[1] - inputs, 0, -rows % ROWS))
        return x_NI.contiguous()

    def _in_tiles(self, weight_OI: Tensor) -> Array:
        """The matrix as [O / 16, I, 16], or [O / 16, I / 2, 16, 2] for pairs, padded with zeros."""
        outputs, inputs = weight_OI.shape
        padding = -outputs % LANES, self._shape[1] - inputs
        if any(padding):
            weight_OI = F.pad(weight_OI, (0, padding[1], 0, padding[0]))
        together = 2 if self._pairs else 1
        tiles = weight_OI.unflatten(0, (-1, LANES)).unflatten(2, (-1, together)).transpose(1, 2)
        return array(tiles.contiguous())


def _are_halves(numbers: Tensor) -> bool:
    """True if converting the numbers to bfloat16 does not change them."""
    return torch.equal(numbers.bfloat16().float(), numbers)


_pools: dict[int, ThreadPoolExecutor] = {}
"""One pool for each number of threads; empty in a forked process, because threads do not survive a fork."""

os.register_at_fork(after_in_child=_pools.clear)


def in_parts(work: Callable[[int, int], object], count: int, *, least: int) -> None:
    """Call `work(first, last)` in parallel for parts of the range 0 to `count`, each with at least `least` elements."""
    threads = max(1, min(torch.get_num_threads(), count // least))
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, "groupwise-kernels")
    borders = [count * number // threads for number in range(threads + 1)]
    futures = [_pools[threads].submit(work, first, last) for first, last in pairwise(borders[1:])]
    work(borders[0], borders[1])
    for future in futures:
        future.result()
