"""Products of a few rows with a large matrix in bfloat16, by the processor's own instruction for them (AVX512_BF16).

With few rows, reading the weights takes as long as multiplying. Here they stand in the order in which they are used and are fetched
while the processor multiplies, where oneDNN does one after the other. The narrow products of an adapter and a bias belong to the same
pass, and nothing is rounded.

A tile is 16 outputs of 8 or 16 rows, whose sums stay in registers. The instruction multiplies pairs of numbers, so weights are
ordered as [O / 16, I / 2, 16, 2]. The sums of a row do not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from groupwise.models.native.jit import kernel
from groupwise.models.native.vector_code import FLOATS, LANES, WORDS, VectorCode

Array = NDArray[Any]

ROWS = 8
"""Rows are multiples of it; tiles have once or twice as many."""
LINE = 64
"""Bytes of a pair of inputs for all outputs of a tile."""
AHEAD = 4096
"""Bytes of weights that are fetched before they are needed."""


def usable() -> bool:
    """Whether this processor has the instruction."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16", False))


class _BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _add_pair(
    code: VectorCode, weights: Any, rows: list[Any], pair: Any, sums: list[Any]
) -> list[Any]:
    """One line of weights times a pair of inputs of every row."""
    builder = code.builder
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    multiply = code.function(name, FLOATS, [FLOATS, _PAIRS, _PAIRS])
    offset = builder.mul(pair, code.number(LINE))
    line = builder.bitcast(code.load(weights, offset, WORDS), _PAIRS)
    code.prefetch(weights, builder.add(offset, code.number(AHEAD)))
    offset = builder.mul(pair, code.number(4))
    return [
        builder.call(
            multiply, [total, line, builder.bitcast(code.spread(row, offset, WORDS), _PAIRS)]
        )
        for row, total in zip(rows, sums, strict=True)
    ]


def _add_rank(
    code: VectorCode, up: Any, up_stride: Any, rows: list[Any], rank: Any, sums: list[Any]
) -> list[Any]:
    """One rank of an adapter: a row of B times its number in every row."""
    builder = code.builder
    line = code.load(up, builder.mul(rank, up_stride))
    offset = builder.mul(rank, code.number(4))
    return [
        code.fused(code.spread(row, offset), line, total)
        for row, total in zip(rows, sums, strict=True)
    ]


def _tile(rows: int) -> Any:
    """A tile of so many rows.

    Called with the weights, how many pairs of inputs there are, x and its stride, B and its stride, x Aᵀ and its stride, how many ranks
    there are, 16 sums to begin with, the results and their stride: addresses, and strides in bytes.
    """

    def typed(
        _: Any,
        weights: Any,
        pairs: Any,
        x: Any,
        x_stride: Any,
        up: Any,
        up_stride: Any,
        low: Any,
        low_stride: Any,
        ranks: Any,
        begun: Any,
        into: Any,
        stride: Any,
    ) -> Any:
        def tile(context: Any, builder: Any, __: Any, given: Any) -> Any:
            weights, pairs, x, x_stride, up, up_stride, low, low_stride, ranks = given[:9]
            begun, into, stride = given[9:]
            code = VectorCode(builder)
            x_rows = code.addresses(x, x_stride, rows)
            low_rows = code.addresses(low, low_stride, rows)
            sums = [code.load(begun, code.number(0))] * rows
            sums = code.loop(
                pairs, sums, lambda pair, now: _add_pair(code, weights, x_rows, pair, now)
            )
            sums = code.loop(
                ranks, sums, lambda rank, now: _add_rank(code, up, up_stride, low_rows, rank, now)
            )
            for total, row in zip(sums, code.addresses(into, stride, rows), strict=True):
                code.store(total, row, code.number(0))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), tile

    return intrinsic(typed)


_small, _large = _tile(ROWS), _tile(2 * ROWS)


@kernel()
def _multiply(
    x_NI: Array,
    weights: Array,
    bias_O: Array,
    low_NR: Array,
    up_RO: Array,
    ranks_B2: Array,
    into_NO: Array,
) -> None:
    """`x Wᵀ + low Bᵀ + bias`, tile by tile; see `product`."""
    rows, inputs = x_NI.shape
    outputs, ranks = into_NO.shape[1], low_NR.shape[1]
    for block in range(outputs // LANES):
        line = weights.ctypes.data + block * (inputs // 2) * LINE
        first, last = ranks_B2[block]
        up = up_RO.ctypes.data + 4 * (first * outputs + block * LANES)
        begun = bias_O.ctypes.data + LINE * block
        for n in range(0, rows, 2 * ROWS):
            x, low = x_NI.ctypes.data + 2 * n * inputs, low_NR.ctypes.data + 4 * (n * ranks + first)
            into = into_NO.ctypes.data + 4 * (n * outputs + block * LANES)
            if rows - n > ROWS:
                _large(line, inputs // 2, x, 2 * inputs, up, 4 * outputs, low, 4 * ranks,
                       last - first, begun, into, 4 * outputs)  # fmt: skip
            else:
                _small(line, inputs // 2, x, 2 * inputs, up, 4 * outputs, low, 4 * ranks,
                       last - first, begun, into, 4 * outputs)  # fmt: skip


@kernel(kept=True)
def product(
    x_NI: Array,
    weights: Array,
    bias_O: Array,
    down: Array,
    up_RO: Array,
    ranks_B2: Array,
    into_NO: Array,
) -> None:
    """`x Wᵀ + (x Aᵀ) Bᵀ + bias`, in float32.

    `x_NI` is bfloat16 (as uint16), rows a multiple of `ROWS`; outputs and ranks are multiples of `LANES`. `weights`, which are W, and
    `down`, which is A, stand in the order of the first lines of this file. All else is float32: of block b of 16 outputs, only ranks
    from `ranks_B2[b, 0]` up to `ranks_B2[b, 1]` count.
    """
    rows, ranks = x_NI.shape[0], up_RO.shape[0]
    low_NR, nothing = np.empty((rows, ranks), np.float32), np.empty((rows, 0), np.float32)
    if ranks:
        none = np.zeros((ranks // LANES, 2), np.int64)
        _multiply(x_NI, down, np.zeros(ranks, np.float32), nothing, up_RO, none, low_NR)
    _multiply(x_NI, weights, bias_O, low_NR, up_RO, ranks_B2, into_NO)
