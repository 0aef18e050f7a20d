"""Products of a few rows with a large matrix.

With few rows, reading the weights takes as long as multiplying. Here the weights are stored in the order of their use and are fetched while
the CPU multiplies; libraries do one after the other. The same pass adds the narrow products of an adapter and a bias; sums are float32, and
nothing is rounded but what is quantised.

A tile is 16 outputs of some rows; its sums stay in registers. Weights are ordered as [O / 16, I, 16]. There are four kinds of code:

- `_FLOATS`: float32 weights and rows.
- `_HALVES`: weights in bfloat16, widened when they are read, and float32 rows. The same result as `_FLOATS` with half the memory.
- `_PAIRS`: weights and rows in bfloat16, two inputs at a time, by the CPU's own instruction for it (AVX512_BF16); weights are ordered as
  [O / 16, I / 2, 16, 2].
- `_BYTES`: weights and rows in int8, four inputs at a time, by the CPU's own instruction for it (VNNI); weights are ordered as
  [O / 16, I / 4, 16, 4]. `kernels.quantize` makes such rows. Sums are int32, so they are exact, and become float32 at the end.

CPUs with tiles (AMX) read the same two orders, 16 lines at a time; what is left of the lines is multiplied as above.

The sums of a row do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from groupwise.engine.models.native.facts import LANES
from groupwise.engine.models.native.kernel_cache import kernel
from groupwise.engine.models.native.tiles import WIDTH, TileCode, has_tiles
from groupwise.engine.models.native.vector_code import FLOATS, WORDS, NamedType, VectorCode

Array = NDArray[Any]

_FEATURES = llvmlite.binding.get_host_cpu_features()
_HAS_INSTRUCTION = bool(_FEATURES.get("avx512bf16", False))
USE_PAIRS = _HAS_INSTRUCTION
"""True if `_PAIRS` is best for bfloat16; without the instruction it works as well, but slowly."""
HAS_VNNI = bool(_FEATURES.get("avx512vnni", False))
"""True if the CPU has the instruction of `_BYTES`."""
LARGE, SMALL = (16, 8) if _FEATURES.get("avx512f", False) else (4, 4)
"""Rows of a tile: as many as there are registers for, and fewer for the remaining rows."""
ONE_SIZE = LARGE == SMALL
USE_TILES = has_tiles()
"""True if `_PAIRS` and `_BYTES` are multiplied in tiles of the CPU (AMX)."""
IN_TURNS = 2
"""Tiles of sums that a loop adds to in turns: an instruction that adds to the same tile would wait for the one before."""
LINES = IN_TURNS * LANES
"""Lines of weights that one turn of this loop multiplies."""
AHEAD = 8192
"""How many bytes ahead weights are fetched if only one tile needs them."""


_TWOS = ir.VectorType(NamedType("bfloat"), 2 * LANES)
_PAIRS_OF_INSTRUCTION = _TWOS if llvmlite.binding.llvm_version_info >= (16, 0, 0) else WORDS
"""LLVM's type of 16 pairs of bfloat16, where the instruction multiplies them; before LLVM 16, which numba has from 0.62, it was words."""

Sums = list[Any]
Begin = Callable[[VectorCode, Any, int], Sums]
"""Called with the code, the address of a block's constants, and the number of rows; returns the initial sums."""
Add = Callable[[VectorCode, Any, list[Any], Any, Sums], Sums]
"""Called with the code, the address of a line of weights, the addresses of all rows, the offset of their inputs, and the sums; returns new
sums."""
Finish = Callable[[VectorCode, Any, list[Any], Sums], Sums]
"""Called with the code, the address of a block's constants, the addresses of the rows' scales, and the sums; returns float32 sums."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Order of the weights, and the code that multiplies them."""

    line: int
    """Bytes of one line: the adjacent weights for the 16 outputs of a tile."""
    inputs: int
    """Number of inputs in a line."""
    add: Add
    begin: Begin
    finish: Finish
    constants: int = 4 * LANES
    """Bytes of a block's constants."""
    numbers: Any = FLOATS
    """LLVM's type of 16 sums."""
    in_tiles: str | None = None
    """The instruction that multiplies tiles."""


def _begin_with_bias(code: VectorCode, constants: Any, rows: int) -> Sums:
    return [code.load(constants, code.number(0))] * rows


def _keep_sums(_: VectorCode, __: Any, ___: list[Any], sums: Sums) -> Sums:
    return sums


def _add_floats(code: VectorCode, line: Any, rows: list[Any], offset: Any, sums: Sums) -> Sums:
    return _add_fused(code, code.load(line, code.number(0)), rows, offset, sums)


def _add_halves(code: VectorCode, line: Any, rows: list[Any], offset: Any, sums: Sums) -> Sums:
    return _add_fused(code, code.load_halves(line, code.number(0)), rows, offset, sums)


def _add_fused(code: VectorCode, weights: Any, rows: list[Any], offset: Any, sums: Sums) -> Sums:
    return [
        code.fused(code.spread(row, offset), weights, total)
        for row, total in zip(rows, sums, strict=True)
    ]


def _add_pairs(code: VectorCode, line: Any, rows: list[Any], offset: Any, sums: Sums) -> Sums:
    weights = code.load(line, code.number(0), WORDS)
    return [
        _add_pair(code, total, weights, code.spread(row, offset, WORDS))
        for row, total in zip(rows, sums, strict=True)
    ]


def _add_pair(code: VectorCode, total: Any, left: Any, right: Any) -> Any:
    if _HAS_INSTRUCTION:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        kind = _PAIRS_OF_INSTRUCTION
        multiply = code.function(name, FLOATS, [FLOATS, kind, kind])
        return code.builder.call(
            multiply, [total, *(code.builder.bitcast(operand, kind) for operand in (left, right))]
        )
    for part in (code.lower_halves, code.upper_halves):
        total = code.fused(part(left), part(right), total)
    return total


def _begin_bytes(code: VectorCode, constants: Any, rows: int) -> Sums:
    """The first constant of each output cancels the 128 that is added to the rows' numbers."""
    return [code.load(constants, code.number(0), WORDS)] * rows


def _add_bytes(code: VectorCode, line: Any, rows: list[Any], offset: Any, sums: Sums) -> Sums:
    weights = code.load(line, code.number(0), WORDS)
    multiply = code.function("llvm.x86.avx512.vpdpbusd.512", WORDS, [WORDS] * 3)
    return [
        code.builder.call(multiply, [total, code.spread(row, offset, WORDS), weights])
        for row, total in zip(rows, sums, strict=True)
    ]


def _scale_bytes(code: VectorCode, constants: Any, scales: list[Any], sums: Sums) -> Sums:
    """The second constant of each output is its scale, the third its bias."""
    builder = code.builder
    scale, bias = (code.load(constants, code.number(4 * LANES * place)) for place in (1, 2))
    return [
        builder.fadd(
            builder.fmul(
                builder.fmul(builder.sitofp(total, FLOATS), code.spread(row, code.number(0))), scale
            ),
            bias,
        )
        for row, total in zip(scales, sums, strict=True)
    ]


_FLOATS = _Kind(64, 1, _add_floats, _begin_with_bias, _keep_sums)
_HALVES = _Kind(32, 1, _add_halves, _begin_with_bias, _keep_sums)
_PAIRS = _Kind(64, 2, _add_pairs, _begin_with_bias, _keep_sums, in_tiles="tdpbf16ps")
_BYTES = _Kind(
    *(64, 4, _add_bytes, _begin_bytes, _scale_bytes),
    constants=3 * 4 * LANES,
    numbers=WORDS,
    in_tiles="tdpbusd",
)


def code_for_line(like: Any) -> Add:
    """The code for rows and weights in the format of an array, by its numba type: float32 or pairs of bfloat16."""
    return _add_pairs if like.dtype == types.uint16 else _add_floats


def _kind_of_product(x_NI: Any, weights: Any) -> _Kind:
    """The kind of a product, chosen by the numba types of its arrays."""
    if x_NI.dtype == types.uint8:
        return _BYTES
    if x_NI.dtype == types.uint16:
        return _PAIRS
    return _HALVES if weights.dtype == types.uint16 else _FLOATS


def _sizes(x_NI: Any, weights: Any) -> Any:
    """`line`, `inputs` and `constants` of the product's kind."""
    raise NotImplementedError  # numba compiles the overload below


@overload(_sizes)
def _sizes_of(x_NI: Any, weights: Any) -> Callable[[Any, Any], Any]:
    kind = _kind_of_product(x_NI, weights)
    line, inputs, constants = kind.line, kind.inputs, kind.constants

    def numbers(x_NI: Any, weights: Any) -> Any:
        return line, inputs, constants

    return numbers


def _add_rank(
    code: VectorCode, up: Any, up_stride: Any, rows: list[Any], rank: Any, sums: Sums
) -> Sums:
    """Add one rank of an adapter: a row of B, multiplied by the rank's number in every row."""
    line = code.load(up, code.builder.mul(rank, up_stride))
    return _add_fused(code, line, rows, code.builder.mul(rank, code.number(4)), sums)


def _add_tiles(
    code: VectorCode,
    kind: _Kind,
    weights: Any,
    x: Any,
    x_stride: Any,
    count: Any,
    fetch: Callable[[Any], None],
    sums: Sums,
) -> Sums:
    """Add the products with `count` times `LINES` lines of weights, for each of which `fetch` is called."""
    builder, rows = code.builder, len(sums)
    tiles, width = TileCode(code), code.number(WIDTH)

    def add(turn: Any, now: list[Any]) -> list[Any]:
        first = builder.mul(turn, code.number(LINES))
        for line in range(LINES):
            fetch(builder.add(first, code.number(line)))
        added: list[Any] = []
        for place, total in enumerate(now):
            number = builder.add(builder.mul(turn, code.number(IN_TURNS)), code.number(place))
            left = tiles.load(x, builder.mul(number, width), x_stride, rows)
            at = builder.mul(number, code.number(LANES * WIDTH))
            right = tiles.load(weights, at, width)
            added.append(tiles.multiply(str(kind.in_tiles), total, left, right, rows))
        return added

    plus = builder.add if kind.numbers is WORDS else builder.fadd
    for total in code.loop(count, [tiles.zero(rows)] * IN_TURNS, add):
        vectors = tiles.vectors(total, rows, kind.numbers)
        sums = [plus(*pair) for pair in zip(sums, vectors, strict=True)]
    return sums


def _tile_code(rows: int) -> Any:
    """Code for a tile of `rows` rows.

    Its arguments are x and the weights, for their types; then the address of the first line, the number of lines, the address to fetch
    ahead and its step per line, x and its stride, B and its stride, x Aᵀ and its stride, the number of ranks, the block's constants (the
    bias), the rows' scales, the results and their stride: addresses, and strides in bytes.
    """

    def typed(
        _: Any,
        x_NI: Any,
        weights: Any,
        first_line: Any,
        lines: Any,
        fetched: Any,
        fetched_stride: Any,
        x: Any,
        x_stride: Any,
        up: Any,
        up_stride: Any,
        low: Any,
        low_stride: Any,
        ranks: Any,
        constants: Any,
        scales: Any,
        into: Any,
        stride: Any,
    ) -> Any:
        kind = _kind_of_product(x_NI, weights)

        def tile(context: Any, builder: Any, __: Any, args: Any) -> Any:
            first_line, lines, fetched, fetched_stride, x, x_stride, up, up_stride = args[2:10]
            low, low_stride, ranks, constants, scales, into, stride = args[10:]
            code = VectorCode(builder)
            x_rows = code.addresses(x, x_stride, rows)
            low_rows = code.addresses(low, low_stride, rows)

            def fetch(number: Any) -> None:
                code.prefetch(fetched, builder.mul(number, fetched_stride), first_cache=False)

            def add(number: Any, sums: Sums) -> Sums:
                fetch(number)
                line = builder.add(first_line, builder.mul(number, code.number(kind.line)))
                offset = builder.mul(number, code.number(4))
                return kind.add(code, line, x_rows, offset, sums)

            sums, done = kind.begin(code, constants, rows), code.number(0)
            if kind.in_tiles is not None and USE_TILES:
                count = builder.sdiv(lines, code.number(LINES))
                done = builder.mul(count, code.number(LINES))
                sums = _add_tiles(code, kind, first_line, x, x_stride, count, fetch, sums)
            left = builder.sub(lines, done)
            sums = code.loop(left, sums, lambda line, now: add(builder.add(done, line), now))
            sums = kind.finish(code, constants, code.addresses(scales, code.number(4), rows), sums)
            sums = code.loop(
                ranks, sums, lambda rank, now: _add_rank(code, up, up_stride, low_rows, rank, now)
            )
            for total, row in zip(sums, code.addresses(into, stride, rows), strict=True):
                code.store(total, row, code.number(0))
            return context.get_dummy_value()

        return types.void(x_NI, weights, *[types.int64] * 15), tile

    return intrinsic(typed)


_small, _large = _tile_code(SMALL), _tile_code(LARGE)


@kernel()
def _multiply(
    x_NI: Array,
    weights: Array,
    constants: Array,
    scales_N: Array,
    low_NR: Array,
    ups: Array,
    ranks_B2: Array,
    into_NO: Array,
    first_block: int,
    last_block: int,
) -> None:
    """`x Wᵀ + low Bᵀ + bias`, tile by tile; see `product`."""
    rows, inputs = x_NI.shape
    outputs, ranks = into_NO.shape[1], low_NR.shape[1]
    line, together, constants_size = _sizes(x_NI, weights)
    lines = inputs // together
    tiles = (rows + LARGE - 1) // LARGE
    # Before the loop, because in numba it takes time to look up an address.
    x_begin, x_stride, scales_begin = x_NI.ctypes.data, x_NI.strides[0], scales_N.ctypes.data
    weights_begin, constants_begin = weights.ctypes.data, constants.ctypes.data
    low_begin, up_begin, into_begin = low_NR.ctypes.data, ups.ctypes.data, into_NO.ctypes.data
    for block in range(first_block, last_block):
        at = weights_begin + block * lines * line
        first, last = ranks_B2[block, 0], ranks_B2[block, 1]
        up = up_begin + 4 * LANES * (block * ranks + first)
        begun = constants_begin + constants_size * block
        for tile in range(tiles):
            # Weights that several tiles need stay in the cache; meanwhile each tile fetches a part of the next block.
            fetched = at + AHEAD if tiles == 1 else at + (tiles + tile) * (lines * line // tiles)
            n = tile * LARGE
            x, low = x_begin + n * x_stride, low_begin + 4 * (n * ranks + first)
            into = into_begin + 4 * (n * outputs + block * LANES)
            scales = scales_begin + 4 * n
            large = rows - n > SMALL
            if ONE_SIZE or large:  # if ONE_SIZE, numba does not compile the other branch
                _large(x_NI, weights, at, lines, fetched, line // tiles, x, x_stride, up, 4 * LANES,
                       low, 4 * ranks, last - first, begun, scales, into, 4 * outputs)  # fmt: skip
            else:
                _small(x_NI, weights, at, lines, fetched, line // tiles, x, x_stride, up, 4 * LANES,
                       low, 4 * ranks, last - first, begun, scales, into, 4 * outputs)  # fmt: skip


@kernel()
def _narrow(x_NI: Array, down: Array) -> Any:
    rows, ranks = x_NI.shape[0], down.shape[0] * LANES
    low_NR, nothing_NR = np.empty((rows, ranks), np.float32), np.empty((rows, 0), np.float32)
    no_ups, none_B2 = np.empty((0, 0, LANES), np.float32), np.zeros((ranks // LANES, 2), np.int64)
    zeros_R = np.zeros(ranks, np.float32)
    _multiply(x_NI, down, zeros_R, zeros_R, nothing_NR, no_ups, none_B2, low_NR, 0, ranks // LANES)
    return low_NR


@kernel(cached=True)
def narrow(x_NI: Array, down: Array) -> Any:
    """`x Aᵀ` [N, R], in float32; see `product`."""
    return _narrow(x_NI, down)


@kernel(cached=True)
def product(
    x_NI: Array,
    factors_NI: Array,
    scales_N: Array,
    weights: Array,
    constants: Array,
    down: Array,
    low_NR: Array,
    ups: Array,
    ranks_B2: Array,
    into_NO: Array,
    first: int,
    last: int,
) -> None:
    """`x Wᵀ + (x Aᵀ) Bᵀ + bias`, in float32, for the blocks of 16 outputs from `first` up to `last`.

    `x_NI` is float32, or bfloat16 (as uint16) for `_PAIRS`; rows are a multiple of `ROWS`, outputs and ranks of `LANES`. `weights` (W) and
    `down` (A) have the order described in the module's docstring, `ups` (B) is [O / 16, R, 16]. All else is float32. For block b, only
    ranks from `ranks_B2[b, 0]` up to `ranks_B2[b, 1]` count. `low_NR` is the result of `narrow`, or has no rows.

    `factors_NI` are the rows that W is multiplied with: x itself, or for `_BYTES` the quantised x, whose scales are `scales_N`. `constants`
    is the bias; for `_BYTES` it is [O / 16, 3, 16]: what cancels the 128 in `factors_NI` (int32), the scales of W, and the bias.
    """
    if len(low_NR) == 0:
        low_NR = _narrow(x_NI, down)
    _multiply(factors_NI, weights, constants, scales_N, low_NR, ups, ranks_B2, into_NO, first, last)
