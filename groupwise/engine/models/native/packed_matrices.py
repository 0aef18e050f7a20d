"""Packed matrices of the learner's attention, and their products.

All products are of two packed matrices, and a tile of the result is 16 × 16. A packed matrix is a sequence of lines of 16 words; a word is
a number, or for bfloat16 a pair that lies along the axis that is summed, as in `groupwise.engine.models.native.products`. `pack_along`
makes lines of 16 rows, for sums over its columns; `pack_across` makes lines of 16 columns, for sums over its rows.

CPUs with tiles (AMX) multiply bfloat16 by instructions that want one of the two matrices in rows of words. For them `pack_for_scores` and
`pack_for_sums` write rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from groupwise.engine.models.native.facts import LANES
from groupwise.engine.models.native.kernel_cache import kernel
from groupwise.engine.models.native.kernels import ROUNDING_KEPT
from groupwise.engine.models.native.products import LARGE, USE_TILES, code_for_line
from groupwise.engine.models.native.tiles import WIDTH, TileCode
from groupwise.engine.models.native.vector_code import FLOATS, VectorCode

Array = NDArray[Any]

TILE = LANES
"""Queries that are computed at once; also the keys of a block."""
GROUP = 64
"""Queries over which a gradient of keys and values is summed at once."""
LINE = 4 * LANES
"""Bytes of a line."""


def numbers_per_word(like: Any) -> Any:
    """How many numbers of the format of `like` one word of 4 bytes holds."""
    raise NotImplementedError  # numba compiles the overload below


@overload(numbers_per_word)
def _numbers_per_word_of(like: Any) -> Callable[[Any], Any]:
    count = 2 if like.dtype == types.uint16 else 1

    def number(like: Any) -> Any:
        return count

    return number


def in_tiles(like: Any) -> Any:
    """True if matrices in the format of `like` are multiplied in the CPU's tiles."""
    raise NotImplementedError  # numba compiles the overload below


@overload(in_tiles)
def _in_tiles_of(like: Any) -> Callable[[Any], Any]:
    answer = USE_TILES and like.dtype == types.uint16

    def boolean(like: Any) -> Any:
        return answer

    return boolean


# Products


def _tile_code(*, adding: bool, of_group: bool) -> Any:
    """Code for `LARGE` rows of a tile.

    Its arguments are an array in the number format, the address of the rows' first words, the distance of their next words, the address of
    the lines, their number, and the address and distance of the rows of the result, to which the products are added if `adding`. Rows
    are words of a line, or with `of_group` `GROUP` numbers each. Distances are in bytes.
    """

    def typed(
        _: Any, like: Any, words: Any, step: Any, lines: Any, count: Any, into: Any, stride: Any
    ) -> Any:
        add_line = code_for_line(like)
        row_bytes = GROUP * like.dtype.bitwidth // 8 if of_group else 4

        def tile(context: Any, builder: Any, __: Any, args: Any) -> Any:
            _, words, step, lines, count, into, stride = args
            code = VectorCode(builder)
            rows = code.addresses(words, code.number(row_bytes), LARGE)
            outputs = code.addresses(into, stride, LARGE)
            zero = code.number(0)

            def add(number: Any, sums: list[Any]) -> list[Any]:
                line = builder.add(lines, builder.mul(number, code.number(LINE)))
                return add_line(code, line, rows, builder.mul(number, step), sums)

            nothing = ir.Constant(FLOATS, [0.0] * LANES)
            begun = [code.load(output, zero) if adding else nothing for output in outputs]
            for total, output in zip(code.loop(count, begun, add), outputs, strict=True):
                code.store(total, output, zero)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 6), tile

    return intrinsic(typed)


_write_part, _add_part = (
    _tile_code(adding=False, of_group=False),
    _tile_code(adding=True, of_group=True),
)


@kernel(ROUNDING_KEPT)
def _write_tile(like: Array, words: Any, lines: Any, count: Any, into: Any, stride: Any) -> None:
    """Write the products of two sequences of lines; the first has the rows of the result, the second its columns."""
    for n in range(0, TILE, LARGE):
        _write_part(like, words + 4 * n, LINE, lines, count, into + n * stride, stride)


@kernel(ROUNDING_KEPT)
def _add_tile(like: Array, words: Any, lines: Any, count: Any, into: Any, stride: Any) -> None:
    """Add the products of 16 rows of `GROUP` numbers with a sequence of lines."""
    row_bytes = 4 * GROUP // numbers_per_word(like)
    for n in range(0, TILE, LARGE):
        _add_part(like, words + n * row_bytes, 4, lines, count, into + n * stride, stride)


def _product_in_tiles(*, adding: bool = False, transposed: bool = False) -> Any:
    """Code for the product of 16 rows of bfloat16 with lines, in the CPU's tiles; nothing if it has none.

    Its arguments are the address of the rows and their distance, the address of the lines, their number, which is a multiple of 8, and the
    address and distance of the rows of the result.
    """

    def typed(_: Any, rows: Any, step: Any, lines: Any, count: Any, into: Any, stride: Any) -> Any:
        def product(context: Any, builder: Any, __: Any, args: Any) -> Any:
            if not USE_TILES:
                return context.get_dummy_value()
            rows, step, lines, count, into, stride = args
            code = VectorCode(builder)
            tiles, zero, width = TileCode(code), code.number(0), code.number(WIDTH)

            def add(number: Any, total: Any, depth: int) -> Any:
                left = tiles.load(rows, builder.mul(number, width), step, width=depth)
                at = builder.mul(number, code.number(LANES * LINE))
                right = tiles.load(lines, at, width, rows=depth // 4)
                return tiles.multiply("tdpbf16ps", total, left, right, depth=depth)

            begun = tiles.load(into, zero, stride) if adding else tiles.zero(LANES)
            whole = builder.lshr(count, code.number(4))
            half = builder.and_(builder.lshr(count, code.number(3)), code.number(1))
            ended = code.loop(whole, [begun], lambda number, now: [add(number, now[0], WIDTH)])
            (total,) = code.loop(half, ended, lambda _, now: [add(whole, now[0], WIDTH // 2)])
            if not transposed:
                tiles.store(total, into, zero, stride)
                return context.get_dummy_value()
            vectors = tiles.vectors(total, LANES, FLOATS)
            outputs = code.addresses(into, stride, LANES)
            for vector, output in zip(code.transposed(vectors), outputs, strict=True):
                code.store(vector, output, zero)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), product

    return intrinsic(typed)


_write_in_tiles = _product_in_tiles()
_add_in_tiles = _product_in_tiles(adding=True)
_write_transposed_in_tiles = _product_in_tiles(transposed=True)


@kernel(ROUNDING_KEPT)
def write_scores(like: Array, keys: Any, rows: Any, count: Any, columns: Any, scores: Any) -> None:
    """Write the products of so many keys, packed by `pack_for_scores` (float32: `pack_along`), with 16 rows, packed by `pack_along`.

    Sums are over `count` words; a line of the result is a key's.
    """
    for c in range(0, columns, LANES):
        key, into = keys + 4 * c * count, scores + c * LINE
        if in_tiles(like):
            _write_in_tiles(key, 4 * count, rows, count, into, LINE)
        else:
            _write_tile(like, key, rows, count, into, LINE)


@kernel(ROUNDING_KEPT)
def write_sums(like: Array, weights: Any, keys: Array, columns: Any, into_QD: Array) -> None:
    """For each of 16 queries, write the sum of so many rows times their weights; `pack_for_sums` packed the rows."""
    count, stride = columns // numbers_per_word(like), 4 * into_QD.shape[1]
    for block in range(keys.shape[0]):
        packed, into = keys[block].ctypes.data, into_QD.ctypes.data + LINE * block
        if in_tiles(like):
            _write_transposed_in_tiles(packed, 4 * keys.shape[2], weights, count, into, stride)
        else:
            _write_tile(like, weights, packed, count, into, stride)


@kernel(ROUNDING_KEPT)
def add_sums(like: Array, rows: Any, lines: Any, count: Any, into: Any, stride: Any) -> None:
    """Add the products of 16 rows of `GROUP` numbers with so many lines."""
    if in_tiles(like):
        _add_in_tiles(rows, 2 * GROUP, lines, count, into, stride)
    else:
        _add_tile(like, rows, lines, count, into, stride)


# Packing


@kernel(ROUNDING_KEPT)
def _bits(number: Any) -> Any:
    return np.float32(number).view(np.uint32)


@kernel(ROUNDING_KEPT)
def _pair(lower: Any, upper: Any) -> Any:
    """Two float32 numbers as bfloat16, rounded half to even, in one word."""
    low, high = _bits(lower), _bits(upper)
    low = np.uint32(low + np.uint32(0x7FFF) + ((low >> np.uint32(16)) & np.uint32(1)))
    high = np.uint32(high + np.uint32(0x7FFF) + ((high >> np.uint32(16)) & np.uint32(1)))
    return np.uint32((high & np.uint32(0xFFFF0000)) | (low >> np.uint32(16)))


@kernel(ROUNDING_KEPT)
def padded_count(count: Any) -> Any:
    """The next multiple of 16."""
    return (count + TILE - 1) // TILE * TILE


@kernel(ROUNDING_KEPT)
def pack_across(rows_ND: Array, count: Any, like: Array, into_BNS: Array, first: Any) -> None:
    """Write float32 rows as lines of 16 columns, [D / 16, N / per_word, 16], from this line on."""
    per_word = numbers_per_word(like)
    for block in range(into_BNS.shape[0]):
        start = block * LANES
        for n in range(0, count, per_word):
            into_S = into_BNS[block, first + n // per_word]
            lower_S = rows_ND[n, start : start + LANES]
            if per_word == 2:
                upper_S = rows_ND[n + 1, start : start + LANES]
                for lane in range(LANES):
                    into_S[lane] = _pair(lower_S[lane], upper_S[lane])
            else:
                for lane in range(LANES):
                    into_S[lane] = _bits(lower_S[lane])


@kernel(ROUNDING_KEPT)
def pack_along(rows_ND: Array, count: Any, like: Array, into_BDS: Array, first: Any) -> None:
    """Write float32 rows as lines of 16 rows, [N / 16, D / per_word, 16], from this block on."""
    per_word = numbers_per_word(like)
    for block in range(count // LANES):
        into_DS = into_BDS[first + block]
        rows_SD = rows_ND[block * LANES : (block + 1) * LANES]
        for d in range(0, rows_ND.shape[1], per_word):
            into_S = into_DS[d // per_word]
            if per_word == 2:
                for lane in range(LANES):
                    into_S[lane] = _pair(rows_SD[lane, d], rows_SD[lane, d + 1])
            else:
                for lane in range(LANES):
                    into_S[lane] = _bits(rows_SD[lane, d])


@kernel(ROUNDING_KEPT)
def empty_for_scores(room: Any, width: Any, like: Array) -> Any:
    """Memory for `pack_for_scores`."""
    words = width // numbers_per_word(like)
    if in_tiles(like):
        return np.empty((room // LANES, LANES, words), np.uint32)
    return np.empty((room // LANES, words, LANES), np.uint32)


@kernel(ROUNDING_KEPT)
def empty_for_sums(room: Any, width: Any, like: Array) -> Any:
    """Memory for `pack_for_sums`. Rows have an odd number of lines: those whose distance is a power of two would share a few places of
    the cache.
    """
    words = room // numbers_per_word(like)
    if in_tiles(like):
        return np.empty((width // LANES, LANES, (words // LANES + 1 | 1) * LANES), np.uint32)
    return np.empty((width // LANES, words, LANES), np.uint32)


@kernel(ROUNDING_KEPT)
def pack_for_scores(rows_ND: Array, count: Any, like: Array, into: Array, first: Any) -> None:
    """Pack rows whose products with others are sums over their columns, from this block on."""
    if not in_tiles(like):
        pack_along(rows_ND, count, like, into, first)
        return
    for n in range(count):
        into_D = into[first + n // LANES, n % LANES]
        for word in range(into_D.shape[0]):
            into_D[word] = _pair(rows_ND[n, 2 * word], rows_ND[n, 2 * word + 1])


@kernel(ROUNDING_KEPT)
def pack_for_sums(rows_ND: Array, count: Any, like: Array, into: Array, first: Any) -> None:
    """Pack rows over which others are summed, from this word on."""
    if not in_tiles(like):
        pack_across(rows_ND, count, like, into, first)
        return
    for n in range(0, count, 2):
        for d in range(rows_ND.shape[1]):
            pair = _pair(rows_ND[n, d], rows_ND[n + 1, d])
            into[d // LANES, d % LANES, first + n // 2] = pair
