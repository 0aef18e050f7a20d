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
from groupwise.engine.models.native.facts import LANES, ROTATED, ROWS, multiple

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
    """A, ordered in tiles (`_in_tiles`)."""
    ups: Array
    """B times its scaling, in float32, as [O / 16, R, 16]: what a tile needs is contiguous."""
    ranks_B2: Array
    """For each block of outputs, the first rank that acts on it, and the rank after the last."""


class Packed:
    """`x Wᵀ + bias` for few rows, by `groupwise.engine.models.native.products`; keeps its own copy of the matrix."""

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        cached: Sequence[Tensor] = (),
        *,
        int8: bool = False,
    ) -> None:
        """`cached`: the `tensors` of an earlier object with the same weight."""
        from groupwise.engine.models.native import kernels, products

        # Called some hundred times for each token: not imported and looked up each time.
        self._product, self._narrow = products.product, products.narrow
        self._quantize = kernels.quantize
        self._outputs, inputs = weight_OI.shape
        self._int8_inputs = multiple(inputs, ROTATED) if int8 else None
        self._pairs = weight_OI.dtype == torch.bfloat16 and products.USE_PAIRS
        self._shape = multiple(self._outputs, LANES), inputs + (inputs % 2 if self._pairs else 0)
        bias_O = torch.zeros(self._outputs) if bias_O is None else bias_O.float()
        bias_O = F.pad(bias_O, (0, self._shape[0] - self._outputs))
        self.tensors = tuple(cached) or self._compute(weight_OI)
        """What was computed of the matrix: its tiles; in int8 also, for each output [2, O], what cancels the offset of the inputs (int32,
        as float32) and the scale."""
        if int8:
            constants_3O = torch.stack((*self.tensors[1], bias_O))
            bias_O = constants_3O.unflatten(1, (-1, LANES)).transpose(0, 1).contiguous()
        self._weights, self._constants = array(self.tensors[0]), array(bias_O)
        self._no_adapter = self.low_rank([])

    def _compute(self, weight_OI: Tensor) -> tuple[Tensor, ...]:
        if self._int8_inputs is not None:
            q_OI, scales_O = quantized(F.pad(weight_OI, (0, 0, 0, -self._outputs % LANES)))
            cancelling_O = (-128 * q_OI.sum(1, dtype=torch.int32)).view(torch.float32)
            return _in_tiles(q_OI, self._int8_inputs, 4), torch.stack((cancelling_O, scales_O))
        # Published weights are often bfloat16, even if they are loaded as float32. Testing one row excludes most others quickly.
        if weight_OI.dtype != torch.bfloat16 and _are_halves(weight_OI[0]):
            weight_OI = weight_OI.bfloat16() if _are_halves(weight_OI) else weight_OI
        return (_in_tiles(weight_OI, self._shape[1], 2 if self._pairs else 1),)

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
        down = array(_in_tiles(down_RI, inputs, 2 if self._pairs else 1))
        ups = array(up_RO.unflatten(1, (-1, LANES)).transpose(0, 1).contiguous())
        return PackedLowRank(down, ups, ranks_B2)

    def product(self, x_NI: Tensor, low: PackedLowRank | None) -> Tensor:
        """The product [N, O] in float32, which only quantisation rounds. `low` is a result of `low_rank`."""
        low = self._no_adapter if low is None else low
        x, rows = array(self._pad_rows(x_NI)), x_NI.shape[0]
        y_NO = torch.empty(x.shape[0], self._shape[0])
        into = y_NO.numpy()
        blocks, factors, scales_N = low.ranks_B2.shape[0], x, self._constants
        if self._int8_inputs is not None:
            factors, scales_N = self._quantize(x, self._int8_inputs)
        multithreaded = torch.get_num_threads() > 1
        low_NR = self._narrow(x, low.down) if multithreaded else NOT_YET

        def part(first: int, last: int) -> None:
            self._product(
                x, factors, scales_N, self._weights, self._constants, low.down, low_NR, low.ups, low.ranks_B2, into, first, last
            )  # fmt: skip

        if multithreaded:
            in_parts(part, blocks, least=BLOCKS_OF_A_THREAD)
        else:
            part(0, blocks)
        if rows < x.shape[0]:
            y_NO = y_NO[:rows]
        unpadded = self._outputs == self._shape[0]
        return y_NO if unpadded else y_NO[:, : self._outputs].contiguous()

    def _pad_rows(self, x_NI: Tensor) -> Tensor:
        rows, inputs = x_NI.shape
        if not self._pairs:
            x_NI = x_NI.float()
        if rows % ROWS or inputs < self._shape[1]:
            return F.pad(x_NI, (0, self._shape[1] - inputs, 0, -rows % ROWS))
        return x_NI.contiguous()


def rotated(x_NI: Tensor) -> Tensor:
    """The rows, padded to a multiple of `ROTATED` and multiplied by an orthogonal matrix times √`ROTATED`, which spreads large numbers.

    A few large inputs would otherwise set the scale of a row and leave few steps to the others (QuaRot, arXiv:2404.00456). Rotating both
    weights and rows does not change their product. The matrix: a row is seen as [ROTATED, n], and a Hadamard matrix multiplies its columns.
    """
    x_NI = F.pad(x_NI.float(), (0, -x_NI.shape[1] % ROTATED))
    distance = x_NI.shape[1] // ROTATED
    while distance < x_NI.shape[1]:
        left, right = x_NI.unflatten(1, (-1, 2, distance)).unbind(2)
        x_NI = torch.stack((left + right, left - right), dim=2).flatten(1)
        distance *= 2
    return x_NI


def quantized(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated rows as int8 [O, I], and for each the scale [O] of its products with rotated inputs."""
    rotated_OI = rotated(weight_OI)
    scales_O = rotated_OI.abs().amax(1).clamp_min(1e-30) / 127
    q_OI = (rotated_OI / scales_O[:, None]).round().to(torch.int8)
    return q_OI, scales_O / ROTATED


def _in_tiles(weight_OI: Tensor, inputs: int, together: int) -> Tensor:
    """The matrix as [O / 16, inputs / together, 16, together], padded with zeros."""
    padding = -len(weight_OI) % LANES, inputs - weight_OI.shape[1]
    if any(padding):
        weight_OI = F.pad(weight_OI, (0, padding[1], 0, padding[0]))
    tiles = weight_OI.unflatten(0, (-1, LANES)).unflatten(2, (-1, together)).transpose(1, 2)
    return tiles.contiguous()


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
