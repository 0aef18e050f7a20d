"""Products of a few rows with a large matrix in bfloat16, by the processor's own instruction for them (AVX512_BF16).

With few rows, reading the weights takes as long as multiplying. Here they stand in the order in which they are used and are fetched
while the processor multiplies, where oneDNN does one after the other. The narrow products of an adapter, a bias and the one rounding
at the end belong to the same pass.

A tile is 16 outputs of 8 or 16 rows, whose sums stay in registers. The instruction multiplies pairs of numbers, so weights are
ordered as [O / 16, I / 2, 16, 2]. The sums of a row do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Array = NDArray[Any]

LANES = 16
"""Outputs of a tile."""
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


_BYTE, _INT, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(_INT, LANES)
_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
_ROUNDED = ir.VectorType(_BFloat(), LANES)


class _Tile:
    """Writes the code of one tile; addresses and strides are numbers of bytes."""

    def __init__(self, builder: Any, rows: int) -> None:
        self._builder = builder
        self._rows = rows

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        kind = ir.FunctionType(result, arguments)
        return cgutils.get_or_insert_function(self._builder.module, kind, name)

    def _at(self, address: Any, offset: Any, kind: Any) -> Any:
        return self._builder.inttoptr(self._builder.add(address, offset), kind.as_pointer())

    def _spread(self, number: Any, kind: Any) -> Any:
        """A vector of one number throughout."""
        nothing, zero = ir.Constant(kind, ir.Undefined), ir.Constant(_INT, 0)
        first = self._builder.insert_element(nothing, number, zero)
        return self._builder.shuffle_vector(first, nothing, ir.Constant(_WORDS, [0] * LANES))

    def row_addresses(self, address: Any, stride: Any) -> list[Any]:
        """Where each row begins."""
        builder = self._builder
        return [
            builder.add(address, builder.mul(stride, ir.Constant(_LONG, row)))
            for row in range(self._rows)
        ]

    def loop(self, count: Any, sums: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> Any:
        """The sums after `count` times `body`, which may be none."""
        builder = self._builder
        before = builder.block
        check, inside, after = map(builder.append_basic_block, ("check", "inside", "after"))
        builder.branch(check)
        builder.position_at_end(check)
        index = builder.phi(_LONG)
        index.add_incoming(ir.Constant(_LONG, 0), before)
        now = [builder.phi(_SUMS) for _ in sums]
        for each, begun in zip(now, sums, strict=True):
            each.add_incoming(begun, before)
        builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
        builder.position_at_end(inside)
        later = body(index, cast("list[Any]", now))
        for each, found in zip(now, later, strict=True):
            each.add_incoming(found, builder.block)
        index.add_incoming(builder.add(index, ir.Constant(_LONG, 1)), builder.block)
        builder.branch(check)
        builder.position_at_end(after)
        return now

    def add_pair(self, weights: Any, rows: list[Any], pair: Any, sums: list[Any]) -> list[Any]:
        """One line of weights times a pair of inputs of every row."""
        builder = self._builder
        multiply = self._function(
            "llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, [_SUMS, _PAIRS, _PAIRS]
        )
        fetch = self._function(
            "llvm.prefetch.p0", ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT]
        )
        offset = builder.shl(pair, ir.Constant(_LONG, 6))
        line = builder.load(self._at(weights, offset, _WORDS), align=4)
        later = builder.add(offset, ir.Constant(_LONG, AHEAD))
        reading, into_all_caches, data = (ir.Constant(_INT, number) for number in (0, 3, 1))
        builder.call(fetch, [self._at(weights, later, _BYTE), reading, into_all_caches, data])
        line = builder.bitcast(line, _PAIRS)
        offset = builder.shl(pair, ir.Constant(_LONG, 2))
        found: list[Any] = []
        for row, total in zip(rows, sums, strict=True):
            word = builder.load(self._at(row, offset, _INT), align=4)
            pairs = builder.bitcast(self._spread(word, _WORDS), _PAIRS)
            found.append(builder.call(multiply, [total, line, pairs]))
        return found

    def add_rank(
        self, up: Any, up_stride: Any, rows: list[Any], rank: Any, sums: list[Any]
    ) -> list[Any]:
        """One rank of an adapter: a row of B times its number in every row."""
        builder = self._builder
        fused = self._function("llvm.fma.v16f32", _SUMS, [_SUMS, _SUMS, _SUMS])
        line = builder.load(self._at(up, builder.mul(rank, up_stride), _SUMS), align=4)
        offset = builder.shl(rank, ir.Constant(_LONG, 2))
        found: list[Any] = []
        for row, total in zip(rows, sums, strict=True):
            number = builder.load(self._at(row, offset, ir.FloatType()), align=4)
            found.append(builder.call(fused, [self._spread(number, _SUMS), line, total]))
        return found

    def store(self, sums: list[Any], rows: list[Any], *, rounded: bool) -> None:
        """Sums to their places."""
        nothing = ir.Constant(_LONG, 0)
        for total, row in zip(sums, rows, strict=True):
            if rounded:
                total = self._builder.fptrunc(total, _ROUNDED)
            self._builder.store(total, self._at(row, nothing, total.type), align=4)


def _tile(rows: int, *, rounded: bool) -> Any:
    """A tile of so many rows, its sums stored in bfloat16 where `rounded`, else in float32.

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
        def code(context: Any, builder: Any, __: Any, given: Any) -> Any:
            weights, pairs, x, x_stride, up, up_stride, low, low_stride, ranks = given[:9]
            begun, into, stride = given[9:]
            tile = _Tile(builder, rows)
            x_rows = tile.row_addresses(x, x_stride)
            low_rows = tile.row_addresses(low, low_stride)
            first = builder.load(builder.inttoptr(begun, _SUMS.as_pointer()), align=4)
            sums = tile.loop(
                pairs, [first] * rows, lambda pair, now: tile.add_pair(weights, x_rows, pair, now)
            )
            sums = tile.loop(
                ranks, sums, lambda rank, now: tile.add_rank(up, up_stride, low_rows, rank, now)
            )
            tile.store(sums, tile.row_addresses(into, stride), rounded=rounded)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), code

    return intrinsic(typed)


_small, _large = _tile(ROWS, rounded=True), _tile(2 * ROWS, rounded=True)
_small_exact, _large_exact = _tile(ROWS, rounded=False), _tile(2 * ROWS, rounded=False)


def _compiled(function: Any) -> Any:
    return numba.njit(error_model="numpy", cache=True, nogil=True)(function)


@_compiled
def narrow_product(x_NI: Array, weights: Array, into_NO: Array) -> None:
    """`x Wᵀ` in float32; 16 outputs, or a multiple of it. Weights as `product` takes them."""
    rows, inputs = x_NI.shape
    stride = 4 * into_NO.shape[1]
    begun = np.zeros(LANES, np.float32).ctypes.data
    for block in range(into_NO.shape[1] // LANES):
        line = weights.ctypes.data + block * (inputs // 2) * LINE
        for n in range(0, rows, 2 * ROWS):
            x, into = x_NI.ctypes.data + 2 * n * inputs, into_NO.ctypes.data + n * stride
            into += LINE * block
            if rows - n > ROWS:
                _large_exact(line, inputs // 2, x, 2 * inputs, 0, 0, 0, 0, 0, begun, into, stride)
            else:
                _small_exact(line, inputs // 2, x, 2 * inputs, 0, 0, 0, 0, 0, begun, into, stride)


@_compiled
def product(
    x_NI: Array,
    weights: Array,
    bias_O: Array,
    low_NR: Array,
    up_RO: Array,
    ranks_B2: Array,
    into_NO: Array,
) -> None:
    """`x Wᵀ + low Bᵀ + bias`, rounded once.

    `x_NI` and `into_NO` are bfloat16 (as uint16), rows a multiple of `ROWS`, outputs of `LANES`. `weights` stand in the order of the
    first lines of this file. All else is float32: of block b of 16 outputs, only ranks from `ranks_B2[b, 0]` up to
    `ranks_B2[b, 1]` count.
    """
    rows, inputs = x_NI.shape
    outputs, ranks = into_NO.shape[1], low_NR.shape[1]
    for block in range(outputs // LANES):
        line = weights.ctypes.data + block * (inputs // 2) * LINE
        first, last = ranks_B2[block]
        up = up_RO.ctypes.data + 4 * (first * outputs + block * LANES)
        begun = bias_O.ctypes.data + LINE * block
        for n in range(0, rows, 2 * ROWS):
            x, low = x_NI.ctypes.data + 2 * n * inputs, low_NR.ctypes.data + 4 * (n * ranks + first)
            into = into_NO.ctypes.data + 2 * (n * outputs + block * LANES)
            if rows - n > ROWS:
                _large(line, inputs // 2, x, 2 * inputs, up, 4 * outputs, low, 4 * ranks,
                       last - first, begun, into, 2 * outputs)  # fmt: skip
            else:
                _small(line, inputs // 2, x, 2 * inputs, up, 4 * outputs, low, 4 * ranks,
                       last - first, begun, into, 2 * outputs)  # fmt: skip
