"""Computes the steps between the matrix products of a decoder, compiled for the CPU by numba: norm, SwiGLU, attention to the keys of a row.

One call replaces five to forty torch operations, whose fixed costs are most of a token's time apart from the products. Every row is
computed independently, so its bits depend on no other row. Sums are float32; stored numbers are rounded once.

bfloat16 is passed as uint16, the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from groupwise.engine.models.native.facts import LANES, ROTATED, STRETCH
from groupwise.engine.models.native.kernel_cache import kernel
from groupwise.engine.models.native.vector_code import FLOATS, VectorCode

Array = NDArray[Any]

CACHE_LINE = 64
"""Bytes that a CPU fetches at once."""

ROUNDING_KEPT = {"contract", "nsz", "arcp"}
"""Fast-math flags that keep the order in which sums are written."""
ANY_ORDER = ROUNDING_KEPT | {"reassoc"}
"""Fast-math flags that let the compiler reorder sums along a row; rows of the same length still get the same order."""


# Numbers


def to_float32(stored: Any) -> Any:
    """Convert a stored number to float32."""
    raise NotImplementedError  # numba compiles one of the two overloads below


@overload(to_float32)
def _number_of(stored: Any) -> Callable[[Any], Any]:
    def upper_half(stored: Any) -> Any:
        return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)

    def as_it_is(stored: Any) -> Any:
        return stored

    return upper_half if stored == types.uint16 else as_it_is


def store(into: Any, index: Any, number: Any) -> None:
    """Round a float32 to the format of an array, half to even, and store it there."""
    raise NotImplementedError


@overload(store)
def _store_into(into: Any, index: Any, number: Any) -> Callable[[Any, Any, Any], None]:
    def upper_half(into: Any, index: Any, number: Any) -> None:
        bits = np.float32(number).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        into[index] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    def as_it_is(into: Any, index: Any, number: Any) -> None:
        into[index] = number

    return upper_half if into.dtype == types.uint16 else as_it_is


def _typed_pointer(_: Any, address: Any, like: Any) -> Any:
    def inttoptr(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), inttoptr


_pointer: Any = intrinsic(_typed_pointer)
"""Called with an address and an array: returns a pointer to numbers of the array's type."""


def _typed_prefetch(_: Any, address: Any) -> Any:
    def prefetch(context: Any, builder: Any, __: Any, args: Any) -> Any:
        code = VectorCode(builder)
        code.prefetch(args[0], code.number(0))
        return context.get_dummy_value()

    return types.void(types.int64), prefetch


_prefetch: Any = intrinsic(_typed_prefetch)
"""Called with an address: starts to fetch the memory there into the cache."""


@kernel(ROUNDING_KEPT)
def prefetch_range(address: Any, size: Any) -> None:
    """Start to fetch `size` bytes into the cache."""
    for line_address in range(address, address + size, CACHE_LINE):
        _prefetch(line_address)


LOWEST, HIGHEST = np.float32(-87.0), np.float32(89.0)
"""Below the first, exp is not a normal float32; above the second, it is infinite."""
BITS_PER_NAT = np.float32(1.44269504)
LOG_2_HIGH = np.float32(0.693359375)
LOG_2_LOW = np.float32(-2.12194440e-4)
EXP_POLYNOMIAL = (
    *(np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)),
    *(np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)),
)


@kernel(ROUNDING_KEPT)
def exp(x: Any) -> Any:
    """e^x with a relative error below 2e-7: 2^k · e^r with |r| ≤ ln 2 / 2 and a polynomial for e^r (Cephes, `expf`). NaN stays NaN."""
    # `min` and `max` are undefined for NaN here.
    x = LOWEST if x < LOWEST else x  # noqa: FURB136
    x = HIGHEST if x > HIGHEST else x  # noqa: FURB136
    k = np.floor(x * BITS_PER_NAT + np.float32(0.5))
    r = x - k * LOG_2_HIGH - k * LOG_2_LOW
    p = EXP_POLYNOMIAL[0]
    p = p * r + EXP_POLYNOMIAL[1]
    p = p * r + EXP_POLYNOMIAL[2]
    p = p * r + EXP_POLYNOMIAL[3]
    p = p * r + EXP_POLYNOMIAL[4]
    p = p * r + EXP_POLYNOMIAL[5]
    power = np.uint32(np.uint32(np.int32(k) + np.int32(127)) << np.uint32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1.0)) * power


# Norm and SwiGLU


@kernel()
def inverse_root(x: Any) -> Any:
    """A separate function: where sums may be reordered, compilers use an estimate on some CPUs, whose last bit is wrong."""
    return np.float32(1.0) / np.sqrt(x)


@kernel(ANY_ORDER)
def _norm_row(x_H: Array, weight_H: Array, epsilon: Any, into_H: Array) -> Any:
    """Write the norm of one row; returns the factor by which the row was multiplied."""
    size = x_H.shape[0]
    squares = np.float32(0.0)
    for h in range(size):
        squares += x_H[h] * x_H[h]
    scale = inverse_root(squares / np.float32(size) + epsilon)
    for h in range(size):
        store(into_H, h, x_H[h] * scale * weight_H[h])
    return scale


@kernel(ANY_ORDER, cached=True)
def norm(x_NH: Array, weight_H: Array, epsilon: Any, into_NH: Array) -> None:
    """Root-mean-square norm of each row of a float32 matrix, multiplied by a float32 weight."""
    for n in range(x_NH.shape[0]):
        _norm_row(x_NH[n], weight_H, epsilon, into_NH[n])


@kernel(ANY_ORDER, cached=True)
def norm_gradient(
    x_NH: Array, weight_H: Array, epsilon: Any, dy_NH: Array, into_NH: Array, y_NH: Array
) -> None:
    """Write the norm into `y_NH` again; if `dy_NH` has rows, add the norm's gradient with respect to x to `into_NH`.

    With g = dy w and s the factor of the row: `dx = s g − s³ x mean(g x)`.
    """
    rows, size = x_NH.shape
    for n in range(rows):
        x_H = x_NH[n]
        scale = _norm_row(x_H, weight_H, epsilon, y_NH[n])
        if dy_NH.shape[0]:
            dy_H, into_H = dy_NH[n], into_NH[n]
            along = np.float32(0.0)
            for h in range(size):
                along += to_float32(dy_H[h]) * weight_H[h] * x_H[h]
            share = scale * scale * scale * along / np.float32(size)
            for h in range(size):
                into_H[h] += scale * to_float32(dy_H[h]) * weight_H[h] - share * x_H[h]


@kernel(ROUNDING_KEPT, cached=True)
def swiglu(gate_up_N2F: Array, into_NF: Array) -> None:
    """`silu(gate) · up`; gate is the left half of each row, up the right one."""
    rows, size = into_NF.shape
    for n in range(rows):
        gate_F, up_F, into_F = gate_up_N2F[n, :size], gate_up_N2F[n, size:], into_NF[n]
        for f in range(size):
            gate = to_float32(gate_F[f])
            store(into_F, f, gate / (np.float32(1.0) + exp(-gate)) * to_float32(up_F[f]))


@kernel(ROUNDING_KEPT, cached=True)
def swiglu_gradient(gate_up_N2F: Array, dy_NF: Array, y_NF: Array, into_N2F: Array) -> None:
    """Write `silu(gate) · up` into `y_NF` again, and the gradient with respect to gate and up into `into_N2F`.

    With σ the logistic function: `d gate = dy up σ(gate) (1 + gate (1 − σ(gate)))` and `d up = dy silu(gate)`.
    """
    rows, size = y_NF.shape
    for n in range(rows):
        gate_F, up_F = gate_up_N2F[n, :size], gate_up_N2F[n, size:]
        dgate_F, dup_F = into_N2F[n, :size], into_N2F[n, size:]
        dy_F, y_F = dy_NF[n], y_NF[n]
        for f in range(size):
            gate, up, dy = to_float32(gate_F[f]), to_float32(up_F[f]), to_float32(dy_F[f])
            one = np.float32(1.0)
            logistic = one / (one + exp(-gate))
            active = gate * logistic
            store(y_F, f, active * up)
            store(dgate_F, f, dy * up * (logistic + active * (one - logistic)))
            store(dup_F, f, dy * active)


# Quantisation


SMALLEST = np.float32(1e-30)
"""The least peak of a row that is quantised, so that a row of zeros has a scale."""


@kernel(cached=True)
def quantize(x_NI: Array, inputs: int) -> Any:
    """Rows as whole numbers of -127 to 127, with 128 added, and the scale of each row; `packed.rotated` says how they are rotated before.

    The result has `inputs` columns; missing ones are 0.
    """
    rows = len(x_NI)
    # An odd number of cache lines: rows whose distance is a power of two would share a few places of the cache.
    q_NI = np.empty((rows, inputs | CACHE_LINE), np.uint8)
    scales_N = np.empty(rows, np.float32)
    rotated_I = np.zeros(inputs, np.float32)
    for n in range(rows):
        scales_N[n] = _quantize_row(x_NI[n], rotated_I, q_NI[n, :inputs])
    return q_NI[:, :inputs], scales_N


@kernel()
def _quantize_row(x_I: Array, rotated_I: Array, into_I: Array) -> Any:
    """Write one row; returns its scale. `rotated_I` is overwritten."""
    inputs = len(rotated_I)
    rotated_I[len(x_I) :] = 0
    for i in range(len(x_I)):
        rotated_I[i] = to_float32(x_I[i])
    distance = inputs // ROTATED
    while distance < inputs:  # two steps of `packed.rotated` at a time
        for start in range(0, inputs, 4 * distance):
            second, third, fourth = start + distance, start + 2 * distance, start + 3 * distance
            a_D, b_D = rotated_I[start:second], rotated_I[second:third]
            c_D, d_D = rotated_I[third:fourth], rotated_I[fourth : fourth + distance]
            for i in range(distance):
                sum_ab, difference_ab = a_D[i] + b_D[i], a_D[i] - b_D[i]
                sum_cd, difference_cd = c_D[i] + d_D[i], c_D[i] - d_D[i]
                a_D[i], b_D[i] = sum_ab + sum_cd, difference_ab + difference_cd
                c_D[i], d_D[i] = sum_ab - sum_cd, difference_ab - difference_cd
        distance *= 4
    largest = np.uint32(0)
    for bits in rotated_I.view(np.uint32):
        # Without their sign, larger numbers have larger bits, and NaN the largest.
        largest = max(largest, np.uint32(bits & np.uint32(0x7FFFFFFF)))
    peak = np.uint32(largest).view(np.float32)
    peak = SMALLEST if peak < SMALLEST else peak  # noqa: FURB136 — NaN stays NaN
    factor = np.float32(127) / peak
    for i in range(inputs):
        into_I[i] = np.uint8(np.int32(np.rint(rotated_I[i] * factor)) + np.int32(128))
    return peak / np.float32(127)


# Attention of one new token for each row


@kernel(ANY_ORDER)
def compute_head(
    stored_D: Array, norm_D: Array, epsilon: Any, turn_C2: Array, scale: Any, into_D: Array
) -> None:
    """Compute one head of a query or key: its norm if the model has one, then the rotation to its position, then the scale."""
    size = into_D.shape[0]
    factor = np.float32(1.0)
    if norm_D.shape[0]:
        squares = np.float32(0.0)
        for d in range(size):
            squares += to_float32(stored_D[d]) * to_float32(stored_D[d])
        factor = inverse_root(squares / np.float32(size) + epsilon)
    for c in range(size // 2):
        x, y = factor * to_float32(stored_D[2 * c]), factor * to_float32(stored_D[2 * c + 1])
        if norm_D.shape[0]:
            x, y = x * norm_D[2 * c], y * norm_D[2 * c + 1]
        cos, sin = turn_C2[c, 0] * scale, turn_C2[c, 1] * scale
        into_D[2 * c] = x * cos - y * sin
        into_D[2 * c + 1] = x * sin + y * cos


def _score_code(queries: int, blocks: int) -> Any:
    """Code for the products of some queries with the keys of some blocks of 16, whose sums do not wait for each other.

    Its arguments are the queries and their stride, keys [blocks, D, 16], D, the scores and their stride: addresses, and strides in bytes.
    """

    def typed(
        _: Any, query: Any, query_stride: Any, keys: Any, size: Any, scores: Any, stride: Any
    ) -> Any:
        def score(context: Any, builder: Any, __: Any, args: Any) -> Any:
            query, query_stride, keys, size, scores, stride = args
            code = VectorCode(builder)
            rows = code.addresses(query, query_stride, queries)
            width = code.number(4 * STRETCH)
            of_blocks = code.addresses(keys, builder.mul(size, width), blocks)

            def add(d: Any, sums: list[Any]) -> list[Any]:
                offset = builder.mul(d, width)
                lines = [code.load(block, offset) for block in of_blocks]
                offset = builder.mul(d, code.number(4))
                numbers = [code.spread(row, offset) for row in rows]
                pairs = product(numbers, lines)
                return [code.fused(*pair, total) for pair, total in zip(pairs, sums, strict=True)]

            begun = [ir.Constant(FLOATS, [0.0] * LANES)] * (queries * blocks)
            into = product(code.addresses(scores, stride, queries), range(blocks))
            for total, (row, block) in zip(code.loop(size, begun, add), into, strict=True):
                code.store(total, row, code.number(block * 4 * STRETCH))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), score

    return intrinsic(typed)


def _values_code(queries: int, blocks: int) -> Any:
    """Code that adds some blocks of 16 numbers of every value, each value multiplied by its weight for each query.

    Its arguments are the weights and their stride, the values and their stride, the number of values, the sums and their stride, and an
    array in the format of the values.
    """

    def typed(
        _: Any,
        weights: Any,
        weights_stride: Any,
        values: Any,
        values_stride: Any,
        count: Any,
        sums: Any,
        stride: Any,
        like: Any,
    ) -> Any:
        halves = like.dtype == types.uint16

        def add_values(context: Any, builder: Any, __: Any, args: Any) -> Any:
            weights, weights_stride, values, values_stride, count, sums, stride, _ = args
            code = VectorCode(builder)
            rows = code.addresses(weights, weights_stride, queries)
            load, width = (code.load_halves, 2 * LANES) if halves else (code.load, 4 * LANES)

            def add(t: Any, now: list[Any]) -> list[Any]:
                first = builder.mul(t, values_stride)
                lines = [
                    load(values, builder.add(first, code.number(width * n))) for n in range(blocks)
                ]
                offset = builder.mul(t, code.number(4))
                numbers = [code.spread(row, offset) for row in rows]
                pairs = product(numbers, lines)
                return [code.fused(*pair, total) for pair, total in zip(pairs, now, strict=True)]

            places = [
                (address, code.number(4 * LANES * block))
                for address, block in product(code.addresses(sums, stride, queries), range(blocks))
            ]
            totals = code.loop(count, [code.load(*place) for place in places], add)
            for total, place in zip(totals, places, strict=True):
                code.store(total, *place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, like), add_values

    return intrinsic(typed)


def _scores_of(blocks: int) -> Any:
    """A kernel that writes the products of up to 4 queries with so many blocks of keys."""
    one, two, three, four = (_score_code(queries, blocks) for queries in (1, 2, 3, 4))

    @kernel(ROUNDING_KEPT)
    def write(
        queries: Any, query: Any, query_stride: Any, keys: Any, size: Any, into: Any, stride: Any
    ) -> None:
        if queries >= 4:
            four(query, query_stride, keys, size, into, stride)
        elif queries == 3:
            three(query, query_stride, keys, size, into, stride)
        elif queries == 2:
            two(query, query_stride, keys, size, into, stride)
        else:
            one(query, query_stride, keys, size, into, stride)

    return write


def _values_of(blocks: int) -> Any:
    """A kernel that adds so many blocks of 16 numbers of values for up to 4 queries."""
    one, two, three, four = (_values_code(queries, blocks) for queries in (1, 2, 3, 4))

    @kernel(ROUNDING_KEPT)
    def add(
        queries: Any,
        weights: Any,
        weights_stride: Any,
        values: Any,
        values_stride: Any,
        count: Any,
        sums: Any,
        stride: Any,
        like: Array,
    ) -> None:
        if queries >= 4:
            four(weights, weights_stride, values, values_stride, count, sums, stride, like)
        elif queries == 3:
            three(weights, weights_stride, values, values_stride, count, sums, stride, like)
        elif queries == 2:
            two(weights, weights_stride, values, values_stride, count, sums, stride, like)
        else:
            one(weights, weights_stride, values, values_stride, count, sums, stride, like)

    return add


_score_one, _score_two = _scores_of(1), _scores_of(2)
_add_one, _add_two = _values_of(1), _values_of(2)


@kernel(ROUNDING_KEPT)
def _score_blocks(
    queries_RD: Array, keys_KDS: Array, blocks: Any, scores_RX: Array, start: Any
) -> None:
    """Write the products of queries with the keys of the first `blocks` blocks into the scores, from column `start` on."""
    repeat, size = queries_RD.shape
    room = 4 * scores_RX.shape[1]
    for r in range(0, repeat, 4):
        query = queries_RD.ctypes.data + 4 * r * size
        for block in range(0, blocks, 2):
            keys = keys_KDS.ctypes.data + 4 * block * size * STRETCH
            into = scores_RX.ctypes.data + 4 * (start + block * STRETCH) + r * room
            if block + 1 < blocks:
                _score_two(repeat - r, query, 4 * size, keys, size, into, room)
            else:
                _score_one(repeat - r, query, 4 * size, keys, size, into, room)


def _typed_highest(_: Any, numbers: Any, address: Any, count: Any) -> Any:
    halves = numbers.dtype == types.uint16

    def highest(context: Any, builder: Any, __: Any, args: Any) -> Any:
        code = VectorCode(builder)
        load, size = (code.load_halves, 2) if halves else (code.load, 4)
        _, address, count = args

        def compare(first: Any, now: Any) -> Any:
            line = load(address, builder.mul(first, code.number(size)))
            return builder.select(builder.fcmp_ordered(">", line, now), line, now)

        lanes = code.number(LANES)
        begun = compare(builder.sub(count, lanes), ir.Constant(FLOATS, [float("-inf")] * LANES))
        (ended,) = code.loop(
            builder.sdiv(count, lanes),
            [begun],
            lambda number, now: [compare(builder.mul(number, lanes), now[0])],
        )
        return code.highest(ended)

    return types.float32(numbers, types.int64, types.int64), highest


_highest_of_vectors: Any = intrinsic(_typed_highest)
"""The highest number of an array, given its address and count. There must be 16 or more, and none may be NaN."""


@kernel(ROUNDING_KEPT)
def highest_score(scores_T: Array) -> Any:
    """The highest score; the result is undefined if one is NaN."""
    if scores_T.shape[0] >= LANES:
        return _highest_of_vectors(scores_T, scores_T.ctypes.data, scores_T.shape[0])
    highest = np.float32(-np.inf)
    for t in range(scores_T.shape[0]):
        score = to_float32(scores_T[t])
        highest = score if score > highest else highest  # noqa: FURB136
    return highest


@kernel(ANY_ORDER)
def _softmax_weights(scores_T: Array, seen: Any, highest: Any) -> Any:
    """Turn scores into weights, `exp(score − highest)`, 0 for all but the first `seen`; returns their sum."""
    for t in range(scores_T.shape[0]):
        scores_T[t] = exp(scores_T[t] - highest)
    scores_T[seen:] = np.float32(0.0)
    total = np.float32(0.0)
    for t in range(scores_T.shape[0]):
        total += scores_T[t]
    return total


@kernel(ROUNDING_KEPT)
def _add_values(
    weights_RX: Array, start: Any, values_TD: Array, count: Any, sums_RD: Array
) -> None:
    """Add the first `count` values, each multiplied by its weight; the weights are in the columns from `start` on."""
    repeat, size = sums_RD.shape
    room, width = 4 * weights_RX.shape[1], values_TD.itemsize * size
    for r in range(0, repeat, 4):
        weights = weights_RX.ctypes.data + r * room + 4 * start
        for d in range(0, size, 2 * LANES):
            values = values_TD.ctypes.data + values_TD.itemsize * d
            sums = sums_RD.ctypes.data + 4 * (r * size + d)
            step = 4 * size
            if d + LANES < size:
                _add_two(repeat - r, weights, room, values, width, count, sums, step, values_TD)
            else:
                _add_one(repeat - r, weights, room, values, width, count, sums, step, values_TD)


@kernel(ROUNDING_KEPT)
def _blocks(seen: Any) -> Any:
    return (seen + STRETCH - 1) // STRETCH


@kernel(ROUNDING_KEPT)
def _attend_heads(
    queries_RD: Array,
    keys_KDS: Array,
    values_TD: Array,
    seen: Any,
    prompt_keys_KDS: Array,
    prompt_values_PD: Array,
    prompt_seen: Any,
    scores_RX: Array,
    sums_RD: Array,
) -> None:
    """Attention of one key head's queries to the keys seen of their row and of its prompt; overwrites `scores_RX`."""
    own_width = STRETCH * _blocks(seen)
    total_width = own_width + STRETCH * _blocks(prompt_seen)
    _score_blocks(queries_RD, keys_KDS, _blocks(seen), scores_RX, 0)
    _score_blocks(queries_RD, prompt_keys_KDS, _blocks(prompt_seen), scores_RX, own_width)
    totals_R = np.empty(queries_RD.shape[0], np.float32)
    for r in range(queries_RD.shape[0]):
        own_T, prompt_P = scores_RX[r, :own_width], scores_RX[r, own_width:total_width]
        highest = max(highest_score(own_T[:seen]), highest_score(prompt_P[:prompt_seen]))
        totals_R[r] = _softmax_weights(own_T, seen, highest) + _softmax_weights(
            prompt_P, prompt_seen, highest
        )
    sums_RD[:] = np.float32(0.0)
    _add_values(scores_RX, 0, values_TD, seen, sums_RD)
    _add_values(scores_RX, own_width, prompt_values_PD, prompt_seen, sums_RD)
    for r in range(queries_RD.shape[0]):
        for d in range(sums_RD.shape[1]):
            sums_RD[r, d] /= totals_R[r]


@kernel(ROUNDING_KEPT, cached=True)
def attend(
    qkv_NO: Array,
    turns_NC2: Array,
    query_norm_D: Array,
    key_norm_D: Array,
    epsilon: Any,
    kv_heads: int,
    keys_BKDS: Array,
    values_BTD: Array,
    written_N: Array,
    prompts_N4: Array,
    output_NO: Array,
) -> None:
    """Attention of one new token of every row, to the row's own tokens and to its prompt, in one layer.

    `qkv_NO` holds queries, keys and values as the product returned them. `turns_NC2` are cosines and sines. Head norms are empty if the
    model has none. The caches hold keys in float32, in blocks of `STRETCH`, and values; B is at least N · kv_heads, and values are padded
    to a multiple of 16 numbers. The new key and value are written after the `written_N` tokens that a row has. `prompts_N4` holds, for each
    row, the addresses of its prompt's keys [kv_heads, K, D, STRETCH] and values [kv_heads, P, D], its length, and K; 0 for rows without a
    prompt.
    """
    rows, size = qkv_NO.shape[0], keys_BKDS.shape[2]
    repeat = output_NO.shape[1] // size // kv_heads
    heads = repeat * kv_heads
    one, scale = np.float32(1.0), inverse_root(np.float32(size))
    width = values_BTD.shape[2]
    room = STRETCH * (keys_BKDS.shape[1] + np.max(prompts_N4[:, 3]))
    scores_RX, sums_RD = np.empty((repeat, room), np.float32), np.empty((repeat, width), np.float32)
    queries_RD, key_D = np.empty((repeat, size), np.float32), np.empty(size, np.float32)
    for j in range(kv_heads):
        for n in range(rows):
            key_address, value_address, length, blocks = prompts_N4[n]
            shape = (kv_heads, blocks, size, STRETCH)
            prompt_keys_JKDS = numba.carray(_pointer(key_address, keys_BKDS), shape)
            shape = (kv_heads, STRETCH * blocks, width)
            prompt_values_JPD = numba.carray(_pointer(value_address, values_BTD), shape)
            keys_KDS, values_TD = keys_BKDS[n * kv_heads + j], values_BTD[n * kv_heads + j]
            at = written_N[n]
            if n + 1 < rows:  # prefetch for the next row while this one is computed
                count, following = _blocks(written_N[n + 1] + 1), (n + 1) * kv_heads + j
                prefetch_range(keys_BKDS[following].ctypes.data, count * size * STRETCH * 4)
                prefetch_range(
                    values_BTD[following].ctypes.data, count * STRETCH * width * values_BTD.itemsize
                )
            offset = (heads + j) * size
            stored_D = qkv_NO[n, offset : offset + size]
            compute_head(stored_D, key_norm_D, epsilon, turns_NC2[n], one, key_D)
            for d in range(size):
                keys_KDS[at // STRETCH, d, at % STRETCH] = key_D[d]
            offset += kv_heads * size
            value_D, stored_D = values_TD[at], qkv_NO[n, offset : offset + size]
            for d in range(size):
                store(value_D, d, to_float32(stored_D[d]))
            start = j * repeat * size
            for r in range(repeat):
                stored_D = qkv_NO[n, start + r * size : start + (r + 1) * size]
                compute_head(stored_D, query_norm_D, epsilon, turns_NC2[n], scale, queries_RD[r])
            _attend_heads(
                queries_RD,
                keys_KDS,
                values_TD,
                at + 1,
                prompt_keys_JKDS[j],
                prompt_values_JPD[j],
                length,
                scores_RX,
                sums_RD,
            )
            output_O = output_NO[n, start : start + repeat * size]
            for r in range(repeat):
                for d in range(size):
                    store(output_O, r * size + d, sums_RD[r, d])
