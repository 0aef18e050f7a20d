"""What stands between the matrix products of a decoder, compiled for the processor by numba: norm, SwiGLU, attention to the keys of
a row, and the narrow products of an adapter.

One call does what takes torch five to forty operations, whose fixed costs are most of a token's time beside the products. Every row is
computed by itself, so its bits depend on no other row. Sums are float32; what is stored is rounded once.

bfloat16 is handed over as uint16, the upper half of a float32. All kernels are in this one file, because numba compiles anew only
what is in a file that changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

Array = NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])

STRETCH = 16
"""Keys are looked at in multiples of so many; those that are not there weigh 0."""
STEP = 8
"""Inner loops take so many terms of a sum at once: heads and ranks are multiples of it."""
ROWS = 4
"""Rows that go through an adapter's A together."""

ROUNDING_KEPT = {"contract", "nsz", "arcp"}
"""Sums are computed in the order in which they are written."""
ANY_ORDER = ROUNDING_KEPT | {"reassoc"}
"""Sums along a row, in as many parts as the processor likes: always the same for rows of the same length."""


def _compiled(order: set[str], *, kept: bool = False) -> Callable[[Function], Function]:
    """Compile when first called, and keep the result on disk if it is `kept`, which those need that are called from outside."""
    return cast(
        "Callable[[Function], Function]",
        numba.njit(fastmath=order, error_model="numpy", cache=kept, nogil=True),
    )


# Numbers


def _number(stored: Any) -> Any:
    """What is stored, as float32."""
    raise NotImplementedError  # numba takes one of the two below


@overload(_number)
def _number_of(stored: Any) -> Callable[[Any], Any]:
    def upper_half(stored: Any) -> Any:
        return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)

    def as_it_is(stored: Any) -> Any:
        return stored

    return upper_half if stored == types.uint16 else as_it_is


def _store(into: Any, place: Any, number: Any) -> None:
    """Round a float32 to the format of an array, half to even, and put it there."""
    raise NotImplementedError


@overload(_store)
def _store_into(into: Any, place: Any, number: Any) -> Callable[[Any, Any, Any], None]:
    def upper_half(into: Any, place: Any, number: Any) -> None:
        bits = np.float32(number).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        into[place] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    def as_it_is(into: Any, place: Any, number: Any) -> None:
        into[place] = number

    return upper_half if into.dtype == types.uint16 else as_it_is


def _typed_pointer(_: Any, address: Any, like: Any) -> Any:
    def inttoptr(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), inttoptr


_pointer: Any = intrinsic(_typed_pointer)
"""Called with an address and an array: a pointer to numbers like those of the array."""


LOWEST, HIGHEST = np.float32(-87.0), np.float32(89.0)
"""Below, exp is no normal float32; above, infinite."""
BITS_PER_NAT = np.float32(1.44269504)
LOG_2_HIGH = np.float32(0.693359375)
LOG_2_LOW = np.float32(-2.12194440e-4)


@_compiled(ROUNDING_KEPT)
def _exp(x: Any) -> Any:
    """e^x within 2e-7 of it: 2^k · e^r with |r| ≤ ln 2 / 2 and a polynomial for e^r (Cephes, `expf`). NaN stays NaN."""
    # No min and max, which say nothing of NaN.
    x = LOWEST if x < LOWEST else x  # noqa: FURB136
    x = HIGHEST if x > HIGHEST else x  # noqa: FURB136
    k = np.floor(x * BITS_PER_NAT + np.float32(0.5))
    r = x - k * LOG_2_HIGH - k * LOG_2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.uint32(np.uint32(np.int32(k) + np.int32(127)) << np.uint32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1.0)) * power


# Norm and SwiGLU


@_compiled(ANY_ORDER, kept=True)
def norm(x_NH: Array, weight_H: Array, epsilon: Any, into_NH: Array) -> None:
    """Root-mean-square norm of each row of a float32 matrix, times a float32 weight."""
    rows, size = x_NH.shape
    for n in range(rows):
        x_H, into_H = x_NH[n], into_NH[n]
        squares = np.float32(0.0)
        for h in range(size):
            squares += x_H[h] * x_H[h]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + epsilon)
        for h in range(size):
            _store(into_H, h, x_H[h] * scale * weight_H[h])


@_compiled(ROUNDING_KEPT, kept=True)
def swiglu(gate_up_N2F: Array, into_NF: Array) -> None:
    """`silu(gate) · up`: the left half of each row and the right one."""
    rows, size = into_NF.shape
    for n in range(rows):
        gate_F, up_F, into_F = gate_up_N2F[n, :size], gate_up_N2F[n, size:], into_NF[n]
        for f in range(size):
            gate = _number(gate_F[f])
            _store(into_F, f, gate / (np.float32(1.0) + _exp(-gate)) * _number(up_F[f]))


# An adapter


@_compiled(ANY_ORDER)
def _down(x_NI: Array, down_RI: Array, low_NR: Array) -> None:
    """`x Aᵀ`, some rows at a time; rows beyond the last are the last one again."""
    rows, inputs = x_NI.shape
    numbers = np.empty((ROWS, inputs), np.float32)
    for start in range(0, rows, ROWS):
        for m in range(ROWS):
            x_I, number_I = x_NI[min(start + m, rows - 1)], numbers[m]
            for i in range(inputs):
                number_I[i] = _number(x_I[i])
        x0, x1, x2, x3 = numbers[0], numbers[1], numbers[2], numbers[3]
        for r in range(down_RI.shape[0]):
            a_I = down_RI[r]
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for i in range(inputs):
                s0 += x0[i] * a_I[i]
                s1 += x1[i] * a_I[i]
                s2 += x2[i] * a_I[i]
                s3 += x3[i] * a_I[i]
            sums = (s0, s1, s2, s3)
            for m in range(min(ROWS, rows - start)):
                low_NR[start + m, r] = sums[m]


@_compiled(ROUNDING_KEPT)
def _up(low_R: Array, up_RO: Array, span_4: Array, sums_O: Array) -> None:
    """Add `low Bᵀ` of one row, as far as a span goes."""
    start, end, first, last = span_4
    sums_O = sums_O[start:end]
    for r in range(first, last, STEP):
        b0, b1 = up_RO[r, start:end], up_RO[r + 1, start:end]
        b2, b3 = up_RO[r + 2, start:end], up_RO[r + 3, start:end]
        b4, b5 = up_RO[r + 4, start:end], up_RO[r + 5, start:end]
        b6, b7 = up_RO[r + 6, start:end], up_RO[r + 7, start:end]
        l0, l1, l2, l3 = low_R[r], low_R[r + 1], low_R[r + 2], low_R[r + 3]
        l4, l5, l6, l7 = low_R[r + 4], low_R[r + 5], low_R[r + 6], low_R[r + 7]
        for o in range(end - start):
            total = sums_O[o] + l0 * b0[o] + l1 * b1[o] + l2 * b2[o] + l3 * b3[o]
            sums_O[o] = total + l4 * b4[o] + l5 * b5[o] + l6 * b6[o] + l7 * b7[o]


@_compiled(ROUNDING_KEPT, kept=True)
def low_rank(x_NI: Array, down_RI: Array, up_RO: Array, spans_S4: Array, added_NO: Array) -> None:
    """`(x Aᵀ) Bᵀ`. Each span is (first column, column behind the last, first rank, rank behind the last): what acts on these columns."""
    rows, outputs = added_NO.shape
    low_NR = np.empty((rows, down_RI.shape[0]), np.float32)
    _down(x_NI, down_RI, low_NR)
    sums_O = np.empty(outputs, np.float32)
    for n in range(rows):
        sums_O[:] = np.float32(0.0)
        for s in range(spans_S4.shape[0]):
            _up(low_NR[n], up_RO, spans_S4[s], sums_O)
        added_O = added_NO[n]
        for o in range(outputs):
            _store(added_O, o, sums_O[o])


# Attention of one new token for each row


@_compiled(ANY_ORDER)
def _head(
    stored_D: Array, norm_D: Array, epsilon: Any, turn_C2: Array, scale: Any, into_D: Array
) -> None:
    """One head of a query or key, after its norm if it has one, turned to its position and scaled."""
    size = into_D.shape[0]
    factor = np.float32(1.0)
    if norm_D.shape[0]:
        squares = np.float32(0.0)
        for d in range(size):
            squares += _number(stored_D[d]) * _number(stored_D[d])
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(size) + epsilon)
    for c in range(size // 2):
        x, y = factor * _number(stored_D[2 * c]), factor * _number(stored_D[2 * c + 1])
        if norm_D.shape[0]:
            x, y = x * norm_D[2 * c], y * norm_D[2 * c + 1]
        cos, sin = turn_C2[c, 0] * scale, turn_C2[c, 1] * scale
        into_D[2 * c] = x * cos - y * sin
        into_D[2 * c + 1] = x * sin + y * cos


@_compiled(ROUNDING_KEPT)
def _score(queries_RD: Array, keys_DT: Array, scores_RX: Array, start: int, end: int) -> None:
    """The products of queries with keys, into some columns of the scores."""
    repeat, size = queries_RD.shape
    scores_RX[:, start:end] = np.float32(0.0)
    for d in range(0, size, STEP):
        k0, k1, k2, k3 = keys_DT[d], keys_DT[d + 1], keys_DT[d + 2], keys_DT[d + 3]
        k4, k5, k6, k7 = keys_DT[d + 4], keys_DT[d + 5], keys_DT[d + 6], keys_DT[d + 7]
        for r in range(repeat):
            q = queries_RD[r]
            q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
            q4, q5, q6, q7 = q[d + 4], q[d + 5], q[d + 6], q[d + 7]
            scores_T = scores_RX[r, start:end]
            for t in range(end - start):
                total = scores_T[t] + q0 * k0[t] + q1 * k1[t] + q2 * k2[t] + q3 * k3[t]
                scores_T[t] = total + (q4 * k4[t] + q5 * k5[t] + q6 * k6[t] + q7 * k7[t])


@_compiled(ANY_ORDER | {"nnan"})
def _highest(scores_T: Array) -> Any:
    """The highest; of what is no number it may say anything."""
    highest = np.float32(-np.inf)
    for t in range(scores_T.shape[0]):
        highest = scores_T[t] if scores_T[t] > highest else highest  # noqa: FURB136
    return highest


@_compiled(ANY_ORDER)
def _weigh(scores_T: Array, seen: Any, highest: Any) -> Any:
    """Turn scores into weights, `exp(score − highest)`, 0 for all but the first `seen`; their sum."""
    for t in range(scores_T.shape[0]):
        scores_T[t] = _exp(scores_T[t] - highest)
    scores_T[seen:] = np.float32(0.0)
    total = np.float32(0.0)
    for t in range(scores_T.shape[0]):
        total += scores_T[t]
    return total


@_compiled(ROUNDING_KEPT)
def _numbers(stored_TD: Array, into_TD: Array) -> None:
    """What is stored, as float32, as many rows as there is room for."""
    rows, size = into_TD.shape
    for t in range(rows):
        stored_D, into_D = stored_TD[t], into_TD[t]
        for d in range(size):
            into_D[d] = _number(stored_D[d])


@_compiled(ROUNDING_KEPT)
def _add_values(weights_RX: Array, start: int, end: int, values_TD: Array, sums_RD: Array) -> None:
    """Add values, each times its weight, which stands in one of these columns."""
    repeat, size = sums_RD.shape
    for t in range(0, end - start, STEP):
        v0, v1, v2, v3 = values_TD[t], values_TD[t + 1], values_TD[t + 2], values_TD[t + 3]
        v4, v5, v6, v7 = values_TD[t + 4], values_TD[t + 5], values_TD[t + 6], values_TD[t + 7]
        for r in range(repeat):
            w = weights_RX[r, start + t : end]
            w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
            sums_D = sums_RD[r]
            for d in range(size):
                total = sums_D[d] + w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
                sums_D[d] = total + (w4 * v4[d] + w5 * v5[d] + w6 * v6[d] + w7 * v7[d])


@_compiled(ROUNDING_KEPT)
def _stretched(seen: Any) -> Any:
    return (seen + STRETCH - 1) // STRETCH * STRETCH


@_compiled(ROUNDING_KEPT)
def _attend_heads(
    queries_RD: Array,
    keys_DT: Array,
    values_TD: Array,
    seen: Any,
    prompt_keys_DP: Array,
    prompt_values_PD: Array,
    prompt_seen: Any,
    scores_RX: Array,
    sums_RD: Array,
) -> None:
    """What the queries of one key head find among the first keys of their row and of its prompt; `scores_RX` is overwritten."""
    own = _stretched(seen)
    both = own + prompt_keys_DP.shape[1]
    _score(queries_RD, keys_DT, scores_RX, 0, own)
    _score(queries_RD, prompt_keys_DP, scores_RX, own, both)
    sums_RD[:] = np.float32(0.0)
    totals_R = np.empty(queries_RD.shape[0], np.float32)
    for r in range(queries_RD.shape[0]):
        own_T, prompt_P = scores_RX[r, :own], scores_RX[r, own:both]
        highest = max(_highest(own_T[:seen]), _highest(prompt_P[:prompt_seen]))
        totals_R[r] = _weigh(own_T, seen, highest) + _weigh(prompt_P, prompt_seen, highest)
    _add_values(scores_RX, 0, own, values_TD, sums_RD)
    _add_values(scores_RX, own, both, prompt_values_PD, sums_RD)
    for r in range(queries_RD.shape[0]):
        for d in range(queries_RD.shape[1]):
            sums_RD[r, d] /= totals_R[r]


@_compiled(ROUNDING_KEPT, kept=True)
def attend(
    qkv_NO: Array,
    turns_NC2: Array,
    query_norm_D: Array,
    key_norm_D: Array,
    epsilon: Any,
    kv_heads: int,
    keys_BDT: Array,
    values_BTD: Array,
    written_N: Array,
    prompts_N4: Array,
    found_NO: Array,
) -> None:
    """Attention of a new token of every row, to the row's own tokens and to its prompt, in one layer.

    `qkv_NO` holds queries, keys and values as the product gave them. The new key and value are written behind the `written_N` that
    the row has in the caches, whose rows are at least N · kv_heads. `turns_NC2` are cosines and sines. `prompts_N4` are, for each row,
    the addresses of its prompt's keys [kv_heads, D, P] in float32 and values [kv_heads, P, D], its length, and P, a
    multiple of `STRETCH`; 0 for rows without one. Norms of heads are empty where the model has none.
    """
    rows = qkv_NO.shape[0]
    size = keys_BDT.shape[1]
    repeat = found_NO.shape[1] // size // kv_heads
    heads = repeat * kv_heads
    one, scale = np.float32(1.0), np.float32(1.0) / np.sqrt(np.float32(size))
    longest = np.max(prompts_N4[:, 3])
    scores_RX = np.empty((repeat, keys_BDT.shape[2] + longest), np.float32)
    own_TD = np.empty((keys_BDT.shape[2], size), np.float32)
    shared_PD = np.empty((longest, size), np.float32)
    key_D = np.empty(size, np.float32)
    queries_RD, sums_RD = np.empty((repeat, size), np.float32), np.empty((repeat, size), np.float32)
    for j in range(kv_heads):
        for n in range(rows):
            key_address, value_address, length, room = prompts_N4[n]
            if n == 0 or value_address != prompts_N4[n - 1, 1]:
                shape = (kv_heads, room, size)
                values_JPD = numba.carray(_pointer(value_address, values_BTD), shape)
                _numbers(values_JPD[j], shared_PD[:room])
            shape = (kv_heads, size, room)
            shared_keys_JDP = numba.carray(_pointer(key_address, keys_BDT), shape)
            keys_DT, values_TD = keys_BDT[n * kv_heads + j], values_BTD[n * kv_heads + j]
            at = written_N[n]
            place = (heads + j) * size
            stored_D = qkv_NO[n, place : place + size]
            _head(stored_D, key_norm_D, epsilon, turns_NC2[n], one, key_D)
            for d in range(size):
                keys_DT[d, at] = key_D[d]
            place += kv_heads * size
            values_TD[at] = qkv_NO[n, place : place + size]
            _numbers(values_TD, own_TD[: _stretched(at + 1)])
            start = j * repeat * size
            for r in range(repeat):
                stored_D = qkv_NO[n, start + r * size : start + (r + 1) * size]
                _head(stored_D, query_norm_D, epsilon, turns_NC2[n], scale, queries_RD[r])
            _attend_heads(
                queries_RD,
                keys_DT,
                own_TD,
                at + 1,
                shared_keys_JDP[j],
                shared_PD,
                length,
                scores_RX,
                sums_RD,
            )
            found_O = found_NO[n, start : start + repeat * size]
            for r in range(repeat):
                for d in range(size):
                    _store(found_O, r * size + d, sums_RD[r, d])
