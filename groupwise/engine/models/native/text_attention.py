"""The learner's attention on a CPU, compiled by numba: of whole texts to themselves and to a shared prompt, forward and backward.

With scores `S = Q Kᵀ`, masked, `P = softmax(S)` and `O = P V`, the gradients are `dV = Pᵀ dO`, `dP = dO Vᵀ`,
`dS = P (dP − rowsum(dP P))`, `dQ = dS K` and `dK = dSᵀ Q`. P is recomputed in the backward pass.

Work is done for 16 queries of a head at a time, with the blocks of 16 keys that one of them sees and no others, so scores never leave the
cache. A vector of scores is one key's, with the 16 queries. Scores are products of float32, as in the sampler; P and dS are rounded to the
number format of the values, and sums are float32.

All products are of two matrices that are packed as `groupwise.engine.models.native.packed_matrices` says. A prompt is packed once for
the texts that see it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from groupwise.engine.models.native.facts import LANES
from groupwise.engine.models.native.kernel_cache import kernel
from groupwise.engine.models.native.kernels import (
    ANY_ORDER,
    BITS_PER_NAT,
    EXP_POLYNOMIAL,
    LOG_2_HIGH,
    LOG_2_LOW,
    LOWEST,
    ROUNDING_KEPT,
    compute_head,
    inverse_root,
    prefetch_range,
    store,
    to_float32,
)
from groupwise.engine.models.native.packed_matrices import (
    GROUP,
    LINE,
    TILE,
    add_sums,
    empty_for_scores,
    empty_for_sums,
    numbers_per_word,
    pack_across,
    pack_along,
    pack_for_scores,
    pack_for_sums,
    padded_count,
    write_scores,
    write_sums,
)
from groupwise.engine.models.native.vector_code import FLOATS, HALVES, WORDS, VectorCode

Array = NDArray[Any]

AHEAD = 8
"""How many rows ahead memory is prefetched. The rows of a head lie too far apart for the processor to do it by itself."""


@kernel(ROUNDING_KEPT)
def _prefetch_columns(rows_NO: Array, row: Any, column: Any, size: Any) -> None:
    """Start to fetch a part of a row, which need not exist."""
    width = rows_NO.itemsize
    prefetch_range(rows_NO.ctypes.data + row * rows_NO.strides[0] + width * column, width * size)


@kernel(ROUNDING_KEPT)
def _widen(rows_NO: Array, column: Any, size: Any, first: Any, count: Any, into_ND: Array) -> None:
    """Copy some columns of rows as float32; missing rows up to a multiple of 16, and missing columns, become 0."""
    for n in range(count):
        _prefetch_columns(rows_NO, first + n + AHEAD, column, size)
        row_D, into_D = rows_NO[first + n, column : column + size], into_ND[n]
        for d in range(size):
            into_D[d] = to_float32(row_D[d])
        into_D[size:] = np.float32(0.0)
    into_ND[count : padded_count(count)] = np.float32(0.0)


class Heads(NamedTuple):
    """The queries or the keys of all rows, and how `kernels.compute_head` computes them."""

    qkv_NO: Array
    turns_NC2: Array
    norm_D: Array
    epsilon: Any
    scale: Any


@kernel(ROUNDING_KEPT)
def _rotate(heads: Heads, column: Any, first: Any, count: Any, into_ND: Array) -> None:
    """Compute the heads of rows that begin at a column; the rest as in `_widen`."""
    size = 2 * heads.turns_NC2.shape[1]
    for n in range(count):
        _prefetch_columns(heads.qkv_NO, first + n + AHEAD, column, size)
        row_D, into_D = heads.qkv_NO[first + n, column : column + size], into_ND[n]
        turn_C2 = heads.turns_NC2[first + n]
        compute_head(row_D, heads.norm_D, heads.epsilon, turn_C2, heads.scale, into_D[:size])
        into_D[size:] = np.float32(0.0)
    into_ND[count : padded_count(count)] = np.float32(0.0)


@kernel(ANY_ORDER)
def _store_head_gradient(
    d_D: Array, row_D: Array, norm_D: Array, epsilon: Any, turn_C2: Array, scale: Any, into_D: Array
) -> None:
    """Store the gradient of the input of `kernels.compute_head`, from that of its result, which is overwritten."""
    size = into_D.shape[0]
    for c in range(size // 2):
        x, y = d_D[2 * c], d_D[2 * c + 1]
        cos, sin = turn_C2[c, 0] * scale, turn_C2[c, 1] * scale
        d_D[2 * c] = x * cos + y * sin
        d_D[2 * c + 1] = y * cos - x * sin
    if norm_D.shape[0]:
        squares, along = np.float32(0.0), np.float32(0.0)
        for d in range(size):
            x = to_float32(row_D[d])
            squares += x * x
            along += d_D[d] * norm_D[d] * x
        factor = inverse_root(squares / np.float32(size) + epsilon)
        share = factor * factor * factor * along / np.float32(size)
        for d in range(size):
            d_D[d] = factor * d_D[d] * norm_D[d] - share * to_float32(row_D[d])
    for d in range(size):
        store(into_D, d, d_D[d])


@kernel(ROUNDING_KEPT)
def _store_gradient(
    d_ND: Array, heads: Heads, column: Any, first: Any, count: Any, d_qkv_NO: Array
) -> None:
    """Store the gradient of what `_rotate` reads, from that of its result, which is overwritten."""
    size = 2 * heads.turns_NC2.shape[1]
    for i in range(count):
        n, columns_D = first + i, slice(column, column + size)
        row_D, into_D = heads.qkv_NO[n, columns_D], d_qkv_NO[n, columns_D]
        turn_C2, scale = heads.turns_NC2[n], heads.scale
        _store_head_gradient(d_ND[i], row_D, heads.norm_D, heads.epsilon, turn_C2, scale, into_D)


# Softmax


def _exp(code: VectorCode, x: Any) -> Any:
    """What `kernels.exp` computes, and 0 where that is not a normal float32."""
    builder = code.builder

    def spread(number: Any) -> Any:
        return ir.Constant(FLOATS, [float(number)] * LANES)

    def fused(left: Any, right: Any, more: Any) -> Any:
        return code.fused(left, right, spread(more))

    floor = code.function("llvm.floor.v16f32", FLOATS, [FLOATS])
    k = builder.call(floor, [fused(x, spread(BITS_PER_NAT), 0.5)])
    r = code.fused(k, spread(-LOG_2_HIGH), x)
    r = code.fused(k, spread(-LOG_2_LOW), r)
    p = spread(EXP_POLYNOMIAL[0])
    for factor in EXP_POLYNOMIAL[1:]:
        p = fused(p, r, factor)
    p = builder.fadd(code.fused(builder.fmul(p, r), r, r), spread(1.0))
    exponent = builder.add(builder.fptosi(k, WORDS), ir.Constant(WORDS, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(WORDS, [23] * LANES)), FLOATS)
    low = builder.fcmp_ordered("<", x, spread(LOWEST))
    return builder.select(low, spread(0.0), builder.fmul(p, power))


def _rounded(code: VectorCode, numbers: Any) -> Any:
    """Words whose upper halves are the numbers as bfloat16, rounded half to even."""
    builder = code.builder
    bits, sixteen = builder.bitcast(numbers, WORDS), ir.Constant(WORDS, [16] * LANES)
    odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(WORDS, [1] * LANES))
    return builder.add(builder.add(bits, ir.Constant(WORDS, [0x7FFF] * LANES)), odd)


def _store_numbers(code: VectorCode, numbers: Any, address: Any, *, halves: bool) -> None:
    if halves:
        upper = code.builder.lshr(_rounded(code, numbers), ir.Constant(WORDS, [16] * LANES))
        numbers = code.builder.trunc(upper, HALVES)
    code.store(numbers, address, code.number(0))


def _store_lines(code: VectorCode, vectors: Any, first: Any, address: Any, *, halves: bool) -> None:
    """Store two vectors, the number of the first of which is `first`, as one line of pairs or two lines of numbers."""
    builder = code.builder
    if halves:
        low, high = (_rounded(code, vector) for vector in vectors)
        upper = builder.and_(high, ir.Constant(WORDS, [0xFFFF0000] * LANES))
        low = builder.lshr(low, ir.Constant(WORDS, [16] * LANES))
        offset = builder.mul(first, code.number(LINE // 2))
        code.store(builder.or_(upper, low), address, offset)
        return
    for number, vector in enumerate(vectors):
        code.store(
            vector, address, builder.mul(builder.add(first, code.number(number)), code.number(LINE))
        )


def _highest(code: VectorCode, scores: Any, count: Any) -> Any:
    """The highest of each column of lines of scores."""

    def compare(number: Any, now: list[Any]) -> list[Any]:
        line = code.load(scores, code.builder.mul(number, code.number(LINE)))
        return [code.builder.select(code.builder.fcmp_ordered(">", line, now[0]), line, now[0])]

    return code.loop(count, [ir.Constant(FLOATS, [float("-inf")] * LANES)], compare)[0]


def _typed_softmax(_: Any, like: Any, scores: Any, count: Any, weights: Any, totals: Any) -> Any:
    halves = like.dtype == types.uint16

    def softmax(context: Any, builder: Any, __: Any, args: Any) -> Any:
        _, scores, count, weights, totals = args
        code = VectorCode(builder)
        highest = _highest(code, scores, count)

        def weigh(pair: Any, now: list[Any]) -> list[Any]:
            first = builder.mul(pair, code.number(2))
            start = builder.mul(first, code.number(LINE))
            vectors = [
                _exp(code, builder.fsub(code.load(scores, offset), highest))
                for offset in (start, builder.add(start, code.number(LINE)))
            ]
            _store_lines(code, vectors, first, weights, halves=halves)
            return [builder.fadd(total, vector) for total, vector in zip(now, vectors, strict=True)]

        nothing = ir.Constant(FLOATS, [0.0] * LANES)
        both = code.loop(builder.sdiv(count, code.number(2)), [nothing, nothing], weigh)
        code.store(builder.fadd(*both), totals, code.number(0))
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 4), softmax


_softmax: Any = intrinsic(_typed_softmax)
"""Called with an array in the number format, the address and number of lines of scores, the address for their weights
`exp(score − highest)` as lines for a sum over keys, and the address for 16 sums of weights."""


def _typed_gradient(
    _: Any, like: Any, scores: Any, d_p: Any, count: Any, p: Any, d: Any, lines: Any
) -> Any:
    halves = like.dtype == types.uint16
    row_bytes = GROUP * like.dtype.bitwidth // 8

    def gradient(context: Any, builder: Any, __: Any, args: Any) -> Any:
        _, scores, d_p, count, p, d, lines = args
        code = VectorCode(builder)
        highest = _highest(code, scores, count)

        def weigh(number: Any, now: list[Any]) -> list[Any]:
            offset = builder.mul(number, code.number(LINE))
            weight = _exp(code, builder.fsub(code.load(scores, offset), highest))
            code.store(weight, scores, offset)
            return [
                builder.fadd(now[0], weight),
                code.fused(weight, code.load(d_p, offset), now[1]),
            ]

        nothing = ir.Constant(FLOATS, [0.0] * LANES)
        total, along = code.loop(count, [nothing, nothing], weigh)
        inverse = builder.fdiv(ir.Constant(FLOATS, [1.0] * LANES), total)
        along = builder.fmul(along, inverse)

        def write(pair: Any, _: list[Any]) -> list[Any]:
            first = builder.mul(pair, code.number(2))
            gradients: list[Any] = []
            for number in (first, builder.add(first, code.number(1))):
                offset = builder.mul(number, code.number(LINE))
                probability = builder.fmul(code.load(scores, offset), inverse)
                difference = builder.fsub(code.load(d_p, offset), along)
                gradients.append(builder.fmul(probability, difference))
                row = builder.mul(number, code.number(row_bytes))
                for vector, address in ((probability, p), (gradients[-1], d)):
                    _store_numbers(code, vector, builder.add(address, row), halves=halves)
            _store_lines(code, gradients, first, lines, halves=halves)
            return []

        code.loop(builder.sdiv(count, code.number(2)), [], write)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 6), gradient


_softmax_gradient: Any = intrinsic(_typed_gradient)
"""Called with an array in the number format, the addresses of lines of scores and of dP, their number, and the addresses for P and for dS
with a row of `GROUP` numbers for each key, and for dS as lines for a sum over keys. Overwrites the scores."""


@kernel(ROUNDING_KEPT)
def _hide(scores_CQ: Array, prompt: Any, own: Any) -> None:
    """Give the score -inf to the keys that pad the prompt, and in the last block to those after a query."""
    scores_CQ[prompt:own] = -np.inf
    for c in range(1, TILE):
        scores_CQ[len(scores_CQ) - TILE + c, :c] = -np.inf


# Both passes


@kernel(ROUNDING_KEPT, cached=True)
def forward(
    qkv_NO: Array,
    turns_NC2: Array,
    query_norm_D: Array,
    key_norm_D: Array,
    epsilon: Any,
    kv_heads: int,
    texts_M4: Array,
    chains_K2: Array,
    out_NO: Array,
    first_unit: int,
    last_unit: int,
) -> None:
    """Write the outputs for some units: unit u is key head u % J of chain u // J.

    `qkv_NO` holds queries, keys and values as the product returned them; `turns_NC2` are cosines and sines; norms of heads are empty if the
    model has none. Each text has its start, its length, and the start and length of the prompt that it sees; each chain has
    its first text and the one after its last, which all see the same prompt.
    """
    size = 2 * turns_NC2.shape[1]
    heads, width = qkv_NO.shape[1] // size - 2 * kv_heads, padded_count(size)
    repeat = heads // kv_heads
    of_queries = Heads(qkv_NO, turns_NC2, query_norm_D, epsilon, inverse_root(np.float32(size)))
    of_keys = Heads(qkv_NO, turns_NC2, key_norm_D, epsilon, np.float32(1.0))
    longest, room = _room(texts_M4)
    rows_LD = np.empty((longest, width), np.float32)
    queries_BDS = np.empty((longest // TILE, width, LANES), np.uint32)
    keys_BDS = np.empty((room // LANES, width, LANES), np.uint32)
    values = empty_for_sums(room, width, qkv_NO)
    # Numba frees an array after its last use by name, so what is used by its address alone is a part of another.
    scores_2CQ = np.empty((2, room, TILE), np.float32)
    sums_QD, totals_Q = np.empty((TILE, width), np.float32), np.empty(TILE, np.float32)
    queries, keys, totals = queries_BDS.ctypes.data, keys_BDS.ctypes.data, totals_Q.ctypes.data
    scores = scores_2CQ.ctypes.data
    weights = scores + room * LINE
    for unit in range(first_unit, last_unit):
        chain, j = unit // kv_heads, unit % kv_heads
        first, last = chains_K2[chain]
        prompt_start, prompt = texts_M4[first, 2], texts_M4[first, 3]
        own, key = padded_count(prompt), (heads + j) * size
        value = key + kv_heads * size
        if prompt:
            _pack_for_output(
                of_keys, key, value, prompt_start, prompt, rows_LD, keys_BDS, values, 0
            )
        for m in range(first, last):
            start, length = texts_M4[m, 0], texts_M4[m, 1]
            _pack_for_output(of_keys, key, value, start, length, rows_LD, keys_BDS, values, own)
            for h in range(j * repeat, (j + 1) * repeat):
                _rotate(of_queries, h * size, start, length, rows_LD)
                pack_along(rows_LD, padded_count(length), rows_LD, queries_BDS, 0)
                for q in range(0, length, TILE):
                    columns, query = own + q + TILE, queries + 4 * q * width
                    write_scores(rows_LD, keys, query, width, columns, scores)
                    _hide(scores_2CQ[0, :columns], prompt, own)
                    _softmax(qkv_NO, scores, columns, weights, totals)
                    write_sums(qkv_NO, weights, values, columns, sums_QD)
                    for i in range(min(TILE, length - q)):
                        out_D, sums_D = out_NO[start + q + i, h * size : (h + 1) * size], sums_QD[i]
                        inverse = np.float32(1.0) / totals_Q[i]
                        for d in range(size):
                            store(out_D, d, sums_D[d] * inverse)


@kernel(ROUNDING_KEPT)
def _pack_for_output(
    of_keys: Heads,
    key: Any,
    value: Any,
    start: Any,
    length: Any,
    rows_LD: Array,
    keys_BDS: Array,
    values: Array,
    at: Any,
) -> None:
    """Pack the keys and values of a text or prompt, beginning at these columns, for the forward pass; the first becomes key `at`."""
    qkv_NO, size = of_keys.qkv_NO, 2 * of_keys.turns_NC2.shape[1]
    _rotate(of_keys, key, start, length, rows_LD)
    pack_along(rows_LD, padded_count(length), rows_LD, keys_BDS, at // LANES)
    _widen(qkv_NO, value, size, start, length, rows_LD)
    pack_for_sums(rows_LD, padded_count(length), qkv_NO, values, at // numbers_per_word(qkv_NO))


@kernel(ROUNDING_KEPT)
def _room(texts_M4: Array) -> Any:
    """The most tokens of a text or prompt, and the most keys that a text sees, both with padding."""
    longest, room = 0, 0
    for m in range(len(texts_M4)):
        length, prompt = padded_count(texts_M4[m, 1]), padded_count(texts_M4[m, 3])
        longest, room = max(longest, length, prompt), max(room, length + prompt)
    return longest, room


@kernel(ROUNDING_KEPT, cached=True)
def backward(
    qkv_NO: Array,
    turns_NC2: Array,
    query_norm_D: Array,
    key_norm_D: Array,
    epsilon: Any,
    kv_heads: int,
    texts_M4: Array,
    chains_K2: Array,
    d_out_NO: Array,
    d_kv_XND: Array,
    d_qkv_NO: Array,
    first_unit: int,
    last_unit: int,
) -> None:
    """Write the gradients of the texts' queries into `d_qkv_NO`; see `forward`.

    Those of rotated keys, and after them of values, are written into `d_kv_XND`, and added for the prompts, whose own must have been
    written before. When all units are done, `finish` takes them from there.
    """
    size = 2 * turns_NC2.shape[1]
    heads = qkv_NO.shape[1] // size - 2 * kv_heads
    repeat = heads // kv_heads
    of_queries = Heads(qkv_NO, turns_NC2, query_norm_D, epsilon, inverse_root(np.float32(size)))
    of_keys = Heads(qkv_NO, turns_NC2, key_norm_D, epsilon, np.float32(1.0))
    memory = _memory_of_backward(qkv_NO, texts_M4, padded_count(size))
    d_keys_CD, d_values_CD = memory.d_keys_CD, memory.d_values_CD
    for unit in range(first_unit, last_unit):
        chain, j = unit // kv_heads, unit % kv_heads
        first, last = chains_K2[chain]
        prompt_start, prompt = texts_M4[first, 2], texts_M4[first, 3]
        own, key = padded_count(prompt), (heads + j) * size
        value = key + kv_heads * size
        if prompt:
            _pack_for_gradient(of_keys, key, value, prompt_start, prompt, memory, 0)
        for m in range(first, last):
            start, length = texts_M4[m, 0], texts_M4[m, 1]
            _pack_for_gradient(of_keys, key, value, start, length, memory, own)
            for h in range(j * repeat, (j + 1) * repeat):
                _backward_head(
                    of_queries, h * size, start, length, prompt, d_out_NO, memory, d_qkv_NO
                )
            d_kv_XND[j, start : start + length] = d_keys_CD[own : own + length, :size]
            d_kv_XND[kv_heads + j, start : start + length] = d_values_CD[own : own + length, :size]
        d_kv_XND[j, prompt_start : prompt_start + prompt] += d_keys_CD[:prompt, :size]
        d_kv_XND[kv_heads + j, prompt_start : prompt_start + prompt] += d_values_CD[:prompt, :size]


class Memory(NamedTuple):
    """What `backward` computes with: rows in float32, packed matrices, weights and gradients."""

    rows_LD: Array
    d_out_LD: Array
    queries_BDS: Array
    d_out_BDS: Array
    keys_BDS: Array
    values_of_scores: Array
    keys_of_sums: Array
    queries_BGS: Array
    d_out_BGS: Array
    scores_3CQ: Array
    """Scores, dP, and dS in lines."""
    p_CG: Array
    d_CG: Array
    d_queries_QD: Array
    d_keys_CD: Array
    d_values_CD: Array


@kernel(ROUNDING_KEPT)
def _memory_of_backward(like: Array, texts_M4: Array, width: Any) -> Any:
    """Memory for the longest text, and for one that sees the most keys."""
    (longest, room), per_word = _room(texts_M4), numbers_per_word(like)
    tiles, blocks = longest // TILE, width // LANES
    return Memory(
        np.empty((longest, width), np.float32),
        np.empty((longest, width), np.float32),
        np.empty((tiles, width, LANES), np.uint32),
        np.empty((tiles, width // per_word, LANES), np.uint32),
        np.empty((room // LANES, width, LANES), np.uint32),
        empty_for_scores(room, width, like),
        empty_for_sums(room, width, like),
        np.empty((blocks, GROUP // per_word, LANES), np.uint32),
        np.empty((blocks, GROUP // per_word, LANES), np.uint32),
        np.empty((3, room, TILE), np.float32),
        np.empty((room, GROUP), like.dtype),
        np.empty((room, GROUP), like.dtype),
        np.empty((TILE, width), np.float32),
        np.empty((room, width), np.float32),
        np.empty((room, width), np.float32),
    )


@kernel(ROUNDING_KEPT)
def _pack_for_gradient(
    of_keys: Heads, key: Any, value: Any, start: Any, length: Any, memory: Memory, at: Any
) -> None:
    """As `_pack_for_output`, for the backward pass; the gradients of these keys and values become 0."""
    qkv_NO, size, rows_LD = of_keys.qkv_NO, 2 * of_keys.turns_NC2.shape[1], memory.rows_LD
    padded = padded_count(length)
    _rotate(of_keys, key, start, length, rows_LD)
    pack_along(rows_LD, padded, rows_LD, memory.keys_BDS, at // LANES)
    pack_for_sums(rows_LD, padded, qkv_NO, memory.keys_of_sums, at // numbers_per_word(qkv_NO))
    _widen(qkv_NO, value, size, start, length, rows_LD)
    pack_for_scores(rows_LD, padded, qkv_NO, memory.values_of_scores, at // LANES)
    memory.d_keys_CD[at : at + padded] = np.float32(0.0)
    memory.d_values_CD[at : at + padded] = np.float32(0.0)


@kernel(ROUNDING_KEPT)
def _backward_head(
    of_queries: Heads,
    column: Any,
    start: Any,
    length: Any,
    prompt: Any,
    d_out_NO: Array,
    memory: Memory,
    d_qkv_NO: Array,
) -> None:
    """Write the gradients of the queries of a text in the head at this column, and add those of the keys and values that they see."""
    qkv_NO, size = of_queries.qkv_NO, 2 * of_queries.turns_NC2.shape[1]
    rows_LD, d_out_LD, padded = memory.rows_LD, memory.d_out_LD, padded_count(length)
    _rotate(of_queries, column, start, length, rows_LD)
    pack_along(rows_LD, padded, rows_LD, memory.queries_BDS, 0)
    _widen(d_out_NO, column, size, start, length, d_out_LD)
    pack_along(d_out_LD, padded, qkv_NO, memory.d_out_BDS, 0)
    for group in range(0, padded, GROUP):
        end, own = min(padded, group + GROUP), padded_count(prompt)
        pack_across(rows_LD[group:end], end - group, qkv_NO, memory.queries_BGS, 0)
        pack_across(d_out_LD[group:end], end - group, qkv_NO, memory.d_out_BGS, 0)
        for q in range(group, end, TILE):
            _backward_tile(qkv_NO, prompt, q, q - group, memory)
            count = min(TILE, length - q)
            _store_gradient(memory.d_queries_QD, of_queries, column, start + q, count, d_qkv_NO)
        _add_key_gradients(
            qkv_NO, group, end, own, memory.p_CG, memory.d_out_BGS, memory.d_values_CD
        )
        _add_key_gradients(
            qkv_NO, group, end, own, memory.d_CG, memory.queries_BGS, memory.d_keys_CD
        )


@kernel(ROUNDING_KEPT)
def _backward_tile(like: Array, prompt: Any, q: Any, within: Any, memory: Memory) -> None:
    """Write the gradients of 16 rotated queries, and P and dS of their group from column `within` on."""
    own, width, room = padded_count(prompt), memory.rows_LD.shape[1], memory.scores_3CQ.shape[1]
    columns, words = own + q + TILE, width // numbers_per_word(like)
    scores = memory.scores_3CQ.ctypes.data
    d_p, d_scores = scores + room * LINE, scores + 2 * room * LINE
    query = memory.queries_BDS.ctypes.data + 4 * q * width
    d_output = memory.d_out_BDS.ctypes.data + 4 * q * words
    write_scores(memory.rows_LD, memory.keys_BDS.ctypes.data, query, width, columns, scores)
    write_scores(like, memory.values_of_scores.ctypes.data, d_output, words, columns, d_p)
    _hide(memory.scores_3CQ[0, :columns], prompt, own)
    p = memory.p_CG.ctypes.data + within * like.itemsize
    d = memory.d_CG.ctypes.data + within * like.itemsize
    _softmax_gradient(like, scores, d_p, columns, p, d, d_scores)
    write_sums(like, d_scores, memory.keys_of_sums, columns, memory.d_queries_QD)


@kernel(ROUNDING_KEPT)
def _add_key_gradients(
    like: Array, group: Any, end: Any, own: Any, weights_CG: Array, lines_BGS: Array, into_CD: Array
) -> None:
    """Add the products of keys' weights for the queries of a group, with the lines of these queries."""
    per_word, width = numbers_per_word(like), into_CD.shape[1]
    weights, lines, into = weights_CG.ctypes.data, lines_BGS.ctypes.data, into_CD.ctypes.data
    for c in range(0, own + end, LANES):
        # The group's queries before these keys do not see them.
        before = max(0, c - own - group)
        words = weights + (c * GROUP + before) * weights_CG.itemsize
        for block in range(width // LANES):
            line = lines + LINE * (block * (GROUP // per_word) + before // per_word)
            at, count = into + 4 * c * width + LINE * block, (end - group - before) // per_word
            add_sums(like, words, line, count, at, 4 * width)


@kernel(ROUNDING_KEPT, cached=True)
def finish(
    qkv_NO: Array,
    turns_NC2: Array,
    key_norm_D: Array,
    epsilon: Any,
    d_kv_XND: Array,
    d_qkv_NO: Array,
) -> None:
    """Write the gradients of keys and values, from those in `d_kv_XND`, which is overwritten; see `backward`."""
    kv_heads, rows, size = d_kv_XND.shape[0] // 2, d_kv_XND.shape[1], d_kv_XND.shape[2]
    of_keys = Heads(qkv_NO, turns_NC2, key_norm_D, epsilon, np.float32(1.0))
    first = qkv_NO.shape[1] - 2 * kv_heads * size
    for j in range(kv_heads):
        _store_gradient(d_kv_XND[j], of_keys, first + j * size, 0, rows, d_qkv_NO)
    for x in range(kv_heads, 2 * kv_heads):
        for n in range(rows):
            into_D = d_qkv_NO[n, first + x * size : first + (x + 1) * size]
            for d in range(size):
                store(into_D, d, d_kv_XND[x, n, d])
