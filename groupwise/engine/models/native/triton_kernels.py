"""Computes the steps between the matrix products of a decoder on a GPU: each step is one kernel, written in Triton.

Torch's own operations would take five to ten kernels for each step, and starting a kernel takes a GPU longer than a step of a small model.
All compute in float32 and round once, as torch does; sums of a row may differ from torch's in their last bits. A row's result does not
depend on the other rows. Formulas: `groupwise.engine.learner.native.elementwise`.
"""

# Triton comes only with torch's CUDA build, and its language has no types.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.engine.models.native.facts import VOCABULARY_BLOCK

SPAN = 1024
"""Numbers of a row that one program of an elementwise kernel computes."""
TILE = 16
"""Rows that one program of a kernel with products computes."""
NORM_PROGRAMS = 512
"""Programs that share the rows of a norm whose weight has a gradient: enough for all multiprocessors, few enough for a short last sum."""
PARTS = 16
"""Parts of a row's attention that are joined at a time."""
VOCABULARY = 4096
"""Logits of a row that a program of the head reads at a time."""
COLUMNS = 128
"""Columns that such a program computes."""


@triton.jit
def _norm_kernel(
    x, weight, y, dy, into, hidden, epsilon, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + epsilon)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row + at, value * scale * factor, mask=inside)
    if GRADIENT:
        g = tl.load(dy + row + at, mask=inside, other=0.0).to(tl.float32) * factor
        mean = tl.sum(g * value, 0) / hidden
        previous = tl.load(into + row + at, mask=inside, other=0.0)
        gradient = scale * g - scale * scale * scale * mean * value
        tl.store(into + row + at, previous + gradient, mask=inside)


@triton.jit
def _norm_gradients(
    x, weight, dy, dx, of_weight, rows, hidden, epsilon, WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(program, rows, programs):
        row = tl.cast(number, tl.int64) * hidden
        value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + epsilon)
        d = tl.load(dy + row + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            total += d * value * scale
        g = d * factor
        mean = tl.sum(g * value, 0) / hidden
        gradient = scale * g - scale * scale * scale * mean * value
        tl.store(dx + row + at, gradient, mask=inside)
    if WEIGHT:
        tl.store(of_weight + program.to(tl.int64) * hidden + at, total, mask=inside)


@triton.jit
def _swiglu_kernel(gate, up, y, stride, width, SPAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = at < width
    g = tl.load(gate + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _swiglu_low_rank_kernel(
    gate_up, low, up, y, rows, width, ranks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANKS)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    cells = row[:, None].to(tl.int64) * 2 * width + at[None, :]
    factor = tl.load(
        low + row[:, None] * ranks + rank[None, :],
        mask=(row < rows)[:, None] & (rank < ranks)[None, :], other=0.0,
    )  # fmt: skip
    valid = (at < width)[:, None] & (rank < ranks)[None, :]
    of_gate = at[:, None] * ranks + rank[None, :]
    gate = tl.load(gate_up + cells, mask=inside, other=0.0)
    weight = tl.load(up + of_gate, mask=valid, other=0.0)
    gate += tl.dot(factor, tl.trans(weight), input_precision="ieee")
    value = tl.load(gate_up + width + cells, mask=inside, other=0.0)
    weight = tl.load(up + width * ranks + of_gate, mask=valid, other=0.0)
    value += tl.dot(factor, tl.trans(weight), input_precision="ieee")
    to = row[:, None].to(tl.int64) * width + at[None, :]
    tl.store(y + to, gate * tl.sigmoid(gate) * value, mask=inside)


@triton.jit
def _swiglu_gradient_kernel(
    gate, up, dy, y, d_gate, d_up, stride, width, OUTPUT: tl.constexpr, SPAN: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = at < width
    g = tl.load(gate + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * width + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    active = g * sigmoid
    if OUTPUT:
        tl.store(y + row * width + at, active * u, mask=inside)
    tl.store(d_gate + row * stride + at, d * u * sigmoid * (1 + g * (1 - sigmoid)), mask=inside)
    tl.store(d_up + row * stride + at, d * active, mask=inside)


@triton.jit
def _rotary_halves_kernel(
    x, cosines, sines, y, length, x_batch, x_head, x_token, y_batch, y_head, y_token, of_batch,
    GRADIENT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, place, head = token // length, token % length, tl.program_id(1)
    at = tl.arange(0, BLOCK)
    half: tl.constexpr = SIZE // 2
    inside = at < half
    of_head = x + batch * x_batch + head * x_head + place * x_token + at
    first = tl.load(of_head, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(of_head + half, mask=inside, other=0.0).to(tl.float32)
    turn = batch * of_batch + place * SIZE + at
    cosine = tl.load(cosines + turn, mask=inside, other=0.0).to(tl.float32)
    of_second = tl.load(cosines + turn + half, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + turn, mask=inside, other=0.0).to(tl.float32)
    sine_of_second = tl.load(sines + turn + half, mask=inside, other=0.0).to(tl.float32)
    to = y + batch * y_batch + head * y_head + place * y_token + at
    if GRADIENT:
        tl.store(to, first * cosine + second * sine_of_second, mask=inside)
        tl.store(to + half, second * of_second - first * sine, mask=inside)
    else:
        tl.store(to, first * cosine - second * sine, mask=inside)
        tl.store(to + half, second * of_second + first * sine_of_second, mask=inside)


@triton.jit
def _rotation_kernel(x, weight, rotations, y, stride, epsilon, NORMED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE // 2
    of_head = x + row * stride + head * SIZE
    first = tl.load(of_head + 2 * at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(of_head + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 0) / SIZE + epsilon)
        first = first * scale * tl.load(weight + 2 * at, mask=inside, other=0.0)
        second = second * scale * tl.load(weight + 2 * at + 1, mask=inside, other=0.0)
    cosine = tl.load(rotations + row * SIZE + 2 * at, mask=inside, other=0.0)
    sine = tl.load(rotations + row * SIZE + 2 * at + 1, mask=inside, other=0.0)
    to = y + (row * tl.num_programs(1) + head) * SIZE
    tl.store(to + 2 * at, first * cosine - second * sine, mask=inside)
    tl.store(to + 2 * at + 1, first * sine + second * cosine, mask=inside)


@triton.jit
def _rotation_gradient(
    d, x, weight, rotations, d_stride, x_stride, epsilon,
    NORMED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE // 2
    of_head = d + row * d_stride + head * SIZE
    d_first = tl.load(of_head + 2 * at, mask=inside, other=0.0)
    d_second = tl.load(of_head + 2 * at + 1, mask=inside, other=0.0)
    cosine = tl.load(rotations + row * SIZE + 2 * at, mask=inside, other=0.0)
    sine = tl.load(rotations + row * SIZE + 2 * at + 1, mask=inside, other=0.0)
    first = d_first * cosine + d_second * sine
    second = d_second * cosine - d_first * sine
    if NORMED:
        raw = x + row * x_stride + head * SIZE
        x_first = tl.load(raw + 2 * at, mask=inside, other=0.0).to(tl.float32)
        x_second = tl.load(raw + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_first * x_first + x_second * x_second, 0) / SIZE + epsilon)
        first = first * tl.load(weight + 2 * at, mask=inside, other=0.0)
        second = second * tl.load(weight + 2 * at + 1, mask=inside, other=0.0)
        mean = tl.sum(first * x_first + second * x_second, 0) / SIZE
        first = scale * first - scale * scale * scale * mean * x_first
        second = scale * second - scale * scale * scale * mean * x_second
    tl.store(of_head + 2 * at, first, mask=inside)
    tl.store(of_head + 2 * at + 1, second, mask=inside)


@triton.jit
def _cache_kernel(
    qkv, query_norm, key_norm, rotations, queries, keys, values, pages, positions, prompts, width, epsilon,
    NORMED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, MOST: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE // 2
    of_head = qkv + row * width + head * SIZE
    first = tl.load(of_head + 2 * at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(of_head + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMED:
            scale = tl.rsqrt(tl.sum(first * first + second * second, 0) / SIZE + epsilon)
            query = inside & (head < HEADS)
            key = inside & (head >= HEADS)
            of_first = tl.load(query_norm + 2 * at, mask=query, other=0.0)
            of_first += tl.load(key_norm + 2 * at, mask=key, other=0.0)
            of_second = tl.load(query_norm + 2 * at + 1, mask=query, other=0.0)
            of_second += tl.load(key_norm + 2 * at + 1, mask=key, other=0.0)
            first = first * scale * of_first
            second = second * scale * of_second
        cosine = tl.load(rotations + row * SIZE + 2 * at, mask=inside, other=0.0)
        sine = tl.load(rotations + row * SIZE + 2 * at + 1, mask=inside, other=0.0)
        rotated = first * cosine - second * sine
        second = first * sine + second * cosine
        first = rotated
    if head < HEADS:
        to = queries + (row * HEADS + head) * SIZE
        tl.store(to + 2 * at, first, mask=inside)
        tl.store(to + 2 * at + 1, second, mask=inside)
    else:
        prompt = tl.load(prompts + row)
        index = tl.load(positions + row) - prompt
        page = tl.load(pages + row * MOST + tl.cdiv(prompt, PAGE) + index // PAGE).to(tl.int64)
        cell = ((page * KV_HEADS + (head - HEADS) % KV_HEADS) * PAGE + index % PAGE) * SIZE
        if head < HEADS + KV_HEADS:
            tl.store(keys + cell + 2 * at, first, mask=inside)
            tl.store(keys + cell + 2 * at + 1, second, mask=inside)
        else:
            tl.store(values + cell + 2 * at, first, mask=inside)
            tl.store(values + cell + 2 * at + 1, second, mask=inside)


@triton.jit
def _attention_kernel(
    queries, keys, values, out, stats, pages, positions, prompts, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, MOST: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position, prompt = tl.load(positions + row), tl.load(prompts + row)
    of_prompt = tl.cdiv(prompt, PAGE)
    own_length = position + 1 - prompt
    start = part * SPAN
    end = tl.minimum(start + SPAN, of_prompt + tl.cdiv(own_length, PAGE))
    if start < end:
        query, size, key = tl.arange(0, QUERIES), tl.arange(0, BLOCK), tl.arange(0, PAGE)
        SHARED: tl.constexpr = HEADS // KV_HEADS
        head = row * HEADS + kv_head * SHARED + query
        of_queries = head[:, None] * SIZE + size[None, :]
        valid = (query < SHARED)[:, None] & (size < SIZE)[None, :]
        q = tl.load(queries + of_queries, mask=valid, other=0.0)
        highest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        output = tl.zeros([QUERIES, BLOCK], tl.float32)
        for number in range(start, end):
            page = tl.load(pages + row * MOST + number).to(tl.int64)
            keys_left = tl.where(
                number < of_prompt, prompt - number * PAGE, own_length - (number - of_prompt) * PAGE
            )
            inside = key < keys_left
            of_page = (page * KV_HEADS + kv_head) * PAGE * SIZE
            cells = of_page + key[:, None] * SIZE + size[None, :]
            valid_keys = inside[:, None] & (size < SIZE)[None, :]
            k = tl.load(keys + cells, mask=valid_keys, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, -float("inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            fading = tl.exp(highest - higher)
            total = total * fading + tl.sum(weights, 1)
            v = tl.load(values + cells, mask=valid_keys, other=0.0)
            output = output * fading[:, None]
            output += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher
        if SPLIT:
            partial = head * tl.num_programs(2) + part
            tl.store(out + partial[:, None] * SIZE + size[None, :], output, mask=valid)
            tl.store(stats + 2 * partial, highest, mask=query < SHARED)
            tl.store(stats + 2 * partial + 1, total, mask=query < SHARED)
        else:
            tl.store(out + of_queries, output / total[:, None], mask=valid)


@triton.jit
def _join_kernel(
    partials, stats, out, positions, prompts, parts,
    HEADS: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = row * HEADS + tl.program_id(1)
    position, prompt = tl.load(positions + row), tl.load(prompts + row)
    filled = tl.cdiv(tl.cdiv(prompt, PAGE) + tl.cdiv(position + 1 - prompt, PAGE), SPAN)
    size = tl.arange(0, BLOCK)
    highest = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    output = tl.zeros([BLOCK], tl.float32)
    for start in range(0, filled, TILE):
        part = start + tl.arange(0, TILE)
        inside = part < filled
        of_part = head * parts + part
        peaks = tl.load(stats + 2 * of_part, mask=inside, other=-float("inf"))
        totals = tl.load(stats + 2 * of_part + 1, mask=inside, other=0.0)
        some = tl.load(
            partials + of_part[:, None] * SIZE + size[None, :],
            mask=inside[:, None] & (size < SIZE)[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(peaks, 0))
        weights = tl.exp(peaks - higher)
        fading = tl.exp(highest - higher)
        total = total * fading + tl.sum(weights * totals, 0)
        output = output * fading + tl.sum(weights[:, None] * some, 0)
        highest = higher
    tl.store(out + head * SIZE + size, output / total, mask=size < SIZE)


@triton.jit
def _peaks_kernel(logits, temperatures, peaks, vocabulary, SPAN: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * SPAN + tl.arange(0, SPAN)
    value = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=-float("inf"))
    peak = tl.max(value.to(tl.float32) / tl.load(temperatures + row), 0)
    tl.store(peaks + row * tl.num_programs(1) + chunk, peak)


@triton.jit
def _sums_kernel(
    logits, temperatures, peaks, sums, vocabulary, blocks,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    chunk_ids = tl.arange(0, CHUNKS)
    chunk_peaks = tl.load(
        peaks + row * chunks + chunk_ids, mask=chunk_ids < chunks, other=-float("inf")
    )
    at = chunk * SPAN + tl.arange(0, SPAN)
    value = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=-float("inf"))
    weight = tl.exp(value.to(tl.float32) / tl.load(temperatures + row) - tl.max(chunk_peaks, 0))
    weight = tl.where(at < vocabulary, weight, 0.0)
    block = chunk * (SPAN // BLOCK) + tl.arange(0, SPAN // BLOCK)
    total = tl.sum(tl.reshape(weight, [SPAN // BLOCK, BLOCK]), 1)
    tl.store(sums + row * blocks + block, total, mask=block < blocks)


@triton.jit
def _search_kernel(
    logits, temperatures, uniforms, peaks, sums, tokens, logprobs, vocabulary, blocks, chunks,
    SMALL: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk_ids = tl.arange(0, CHUNKS)
    chunk_peaks = tl.load(
        peaks + row * chunks + chunk_ids, mask=chunk_ids < chunks, other=-float("inf")
    )
    peak, temperature = tl.max(chunk_peaks, 0), tl.load(temperatures + row)
    at = tl.arange(0, BLOCKS)
    cumulative = tl.load(sums + row * blocks + at, mask=at < blocks, other=0.0).to(tl.float64)
    cumulative = tl.cumsum(cumulative, 0)
    total = tl.max(cumulative, 0)
    # Rounding may raise it to the total, beyond the last token that has weight.
    target = tl.minimum(tl.load(uniforms + row) * total, total - total * SMALL)
    block = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), blocks - 1)
    remaining = target - tl.max(tl.where(at < block, cumulative, 0.0), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=-float("inf"))
    weight = tl.exp(value.to(tl.float32) / temperature - peak)
    inside = tl.cumsum(tl.where(token < vocabulary, weight, 0.0).to(tl.float64), 0)
    block_total = tl.max(inside, 0)
    remaining = tl.minimum(remaining, block_total - block_total * SMALL)
    offset = tl.sum((inside <= remaining).to(tl.int32), 0)
    chosen = tl.minimum(block * BLOCK + offset, vocabulary - 1)
    logit = tl.load(logits + row * vocabulary + chosen).to(tl.float32) / temperature
    # Make a NaN or infinite sum visible in the log-probability, for any chosen token.
    sound = tl.sum(tl.load(sums + row * blocks + at, mask=at < blocks, other=0.0), 0)
    tl.store(tokens + row, chosen)
    tl.store(logprobs + row, logit - peak - tl.log(total.to(tl.float32)) + (sound - sound))


@triton.jit
def _head_kernel(
    logits, temperatures, targets, normalisers, entropies, likeliest, entropy_factors, vocabulary,
    GRADIENT: tl.constexpr, SINGLE: tl.constexpr, ENTROPY: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    of_row, temperature = row * vocabulary, tl.load(temperatures + row)
    highest = tl.full([], -3.0e38, tl.float32)  # finite, as all of a span's logits may be -inf
    total, weighted = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, SPAN):
        at = start + tl.arange(0, SPAN)
        value = tl.load(logits + of_row + at, mask=at < vocabulary, other=-float("inf"))
        value = value.to(tl.float32) / temperature
        peak = tl.max(value, 0)
        first = tl.min(tl.where(value == peak, at, vocabulary), 0)
        token = tl.where(peak > highest, first, token)
        higher = tl.maximum(highest, peak)
        fading = tl.exp(highest - higher)
        weight = tl.exp(value - higher)
        total = total * fading + tl.sum(weight, 0)
        weighted = weighted * fading + tl.sum(weight * tl.where(weight > 0, value, 0.0), 0)
        highest = higher
    normaliser = highest + tl.log(total)
    entropy = normaliser - weighted / total
    tl.store(normalisers + row, normaliser)
    tl.store(entropies + row, entropy)
    tl.store(likeliest + row, token)
    if GRADIENT:
        target = tl.load(targets + row)
        for start in range(0, vocabulary, SPAN):
            at = start + tl.arange(0, SPAN)
            inside = at < vocabulary
            value = tl.load(logits + of_row + at, mask=inside, other=-float("inf"))
            value = value.to(tl.float32) / temperature
            probability = tl.exp(value - normaliser)
            if ENTROPY:
                logprob = tl.where(probability > 0, value - normaliser, 0.0)
                slope = probability * (logprob + entropy)
                tl.store(entropy_factors + of_row + at, slope, mask=inside)
            if SINGLE:
                probability -= tl.where(at == target, 1.0, 0.0)
            tl.store(logits + of_row + at, probability, mask=inside)


def head_numbers(
    logits_CV: Tensor,
    temperatures_C: Tensor,
    targets_C: Tensor | None,
    *,
    gradient: bool,
    entropy_CV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of logits at its temperature: the logarithm of the sum of exponentials, the entropy and the most likely token.

    With `gradient`, probabilities p overwrite the logits, less 1 at the target (if there are `targets_C`); `entropy_CV` gets p (log p + H).
    The vocabulary is read piece by piece, so no logits are held in float32.
    """
    rows, vocabulary = logits_CV.shape
    normalisers_C, entropies_C = (logits_CV.new_empty(rows, dtype=torch.float32) for _ in range(2))
    likeliest_C = torch.empty(rows, dtype=torch.long, device=logits_CV.device)
    _head_kernel[(rows,)](
        logits_CV, temperatures_C, likeliest_C if targets_C is None else targets_C, normalisers_C, entropies_C,
        likeliest_C, logits_CV if entropy_CV is None else entropy_CV, vocabulary,
        GRADIENT=gradient, SINGLE=targets_C is not None, ENTROPY=entropy_CV is not None, SPAN=VOCABULARY, num_warps=8,
    )  # fmt: skip
    return normalisers_C, entropies_C, likeliest_C


def draw(logits_SV: Tensor, temperatures_S: Tensor, uniforms_S: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [S] and their log-probabilities [S]: `groupwise.engine.sampler.draw` at temperatures above 0."""
    rows, vocabulary = logits_SV.shape
    blocks, chunks = -(-vocabulary // VOCABULARY_BLOCK), -(-vocabulary // SPAN)
    peaks_SC = logits_SV.new_empty(rows, chunks, dtype=torch.float32)
    sums_SK = logits_SV.new_empty(rows, blocks, dtype=torch.float32)
    tokens_S = torch.empty(rows, dtype=torch.long, device=logits_SV.device)
    logprobs_S = peaks_SC.new_empty(rows)
    most = int(triton.next_power_of_2(chunks))
    _peaks_kernel[(rows, chunks)](logits_SV, temperatures_S, peaks_SC, vocabulary, SPAN=SPAN)
    _sums_kernel[(rows, chunks)](
        logits_SV, temperatures_S, peaks_SC, sums_SK, vocabulary, blocks,
        SPAN=SPAN, BLOCK=VOCABULARY_BLOCK, CHUNKS=most,
    )  # fmt: skip
    _search_kernel[(rows,)](
        logits_SV, temperatures_S, uniforms_S, peaks_SC, sums_SK, tokens_S, logprobs_S, vocabulary, blocks, chunks,
        SMALL=2**-40, BLOCK=VOCABULARY_BLOCK, BLOCKS=int(triton.next_power_of_2(blocks)), CHUNKS=most,
    )  # fmt: skip
    return tokens_S, logprobs_S


def normed(x_NH: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """The root-mean-square norm of rows."""
    return norm_with_gradient(x_NH, weight_H, epsilon, dtype, None, None)


def norm_with_gradient(
    x_NH: Tensor,
    weight_H: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    dy_NH: Tensor | None,
    into_NH: Tensor | None,
) -> Tensor:
    """Recompute the norm; add its gradient to `into_NH` if `dy_NH` and `into_NH` are given."""
    rows, hidden = x_NH.shape
    y_NH = torch.empty_like(x_NH, dtype=dtype)
    gradient = None if dy_NH is None or into_NH is None else (dy_NH.contiguous(), into_NH)
    dy_NH, into_NH = gradient or (x_NH, x_NH)  # without a gradient the kernel reads neither
    if rows:
        _norm_kernel[(rows,)](
            x_NH, weight_H, y_NH, dy_NH, into_NH, hidden, epsilon,
            GRADIENT=gradient is not None, **_row_options(hidden),
        )  # fmt: skip
    return y_NH


def swiglu(gate_up_N2F: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) · up`, [N, F]."""
    rows, columns = gate_up_N2F.shape
    y_NF = gate_up_N2F.new_empty(rows, columns // 2, dtype=dtype)
    _swiglu_kernel[_spans(y_NF)](
        *gate_up_N2F.chunk(2, dim=1), y_NF, gate_up_N2F.stride(0), columns // 2, SPAN=SPAN
    )
    return y_NF


def swiglu_with_low_rank(
    gate_up_N2F: Tensor, low_NR: Tensor, up_2FR: Tensor, dtype: torch.dtype
) -> Tensor:
    """`swiglu` of `gate_up_N2F`, in float32, plus `low_NR up_2FRᵀ`, [N, F]."""
    rows, columns = gate_up_N2F.shape
    ranks = low_NR.shape[1]
    y_NF = gate_up_N2F.new_empty(rows, columns // 2, dtype=dtype)
    _swiglu_low_rank_kernel[(-(-rows // TILE), -(-columns // 2 // COLUMNS))](
        gate_up_N2F, low_NR, up_2FR, y_NF, rows, columns // 2, ranks,
        ROWS=TILE, COLUMNS=COLUMNS, RANKS=max(16, int(triton.next_power_of_2(ranks))),
    )  # fmt: skip
    return y_NF


def swiglu_with_gradient(gate_up_N2F: Tensor, dy_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Recompute `silu(gate) · up`, and return it with the gradient [N, 2F] with respect to gate and up."""
    y_NF, d_N2F = torch.empty_like(dy_NF), torch.empty_like(gate_up_N2F)
    _swiglu_gradient_kernel[_spans(y_NF)](
        *gate_up_N2F.chunk(2, dim=1), dy_NF, y_NF, *d_N2F.chunk(2, dim=1), gate_up_N2F.stride(0), dy_NF.shape[1],
        OUTPUT=True, SPAN=SPAN,
    )  # fmt: skip
    return y_NF, d_N2F


def swiglu_pair(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """`silu(gate) · up`, [N, F], of two tensors with equal strides, whose rows may be halves of wider ones."""
    y_NF = gate_NF.new_empty(gate_NF.shape)
    _swiglu_kernel[_spans(y_NF)](
        gate_NF, up_NF, y_NF, gate_NF.stride(0), gate_NF.shape[1], SPAN=SPAN
    )
    return y_NF


def swiglu_pair_gradient(
    gate_NF: Tensor, up_NF: Tensor, dy_NF: Tensor, d_gate_NF: Tensor, d_up_NF: Tensor
) -> None:
    """Write the gradients of gate and up to two tensors with the strides of `gate_NF`."""
    _swiglu_gradient_kernel[_spans(gate_NF)](
        gate_NF, up_NF, dy_NF, dy_NF, d_gate_NF, d_up_NF, gate_NF.stride(0), gate_NF.shape[1],
        OUTPUT=False, SPAN=SPAN,
    )  # fmt: skip


def norm_gradients(
    x_NH: Tensor, weight_H: Tensor, epsilon: float, dy_NH: Tensor, *, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `normed` with respect to rows, in their number format, and to its weight, in float32. The sum over rows has a fixed
    order."""
    rows, hidden = x_NH.shape
    dx_NH = torch.empty_like(x_NH)
    programs = max(min(rows, NORM_PROGRAMS), 1)
    parts_PH = x_NH.new_empty(programs if of_weight else 0, hidden, dtype=torch.float32)
    _norm_gradients[(programs,)](
        x_NH, weight_H, dy_NH, dx_NH, parts_PH, rows, hidden, epsilon, WEIGHT=of_weight, **_row_options(hidden)
    )  # fmt: skip
    return dx_NH, parts_PH.sum(0) if of_weight else None


def rotary_halves(
    x_BJTD: Tensor, cosines_BTD: Tensor, sines_BTD: Tensor, *, gradient: bool = False
) -> Tensor:
    """Queries or keys after their rotation as transformers defines it, where each number turns with the one half a head after it.

    With `gradient`, `x_BJTD` is the gradient of the output, and the result is that of the input. Cosines and sines are contiguous, and
    [1, T, D] if all rows of the batch have the same.
    """
    batches, heads, length, size = x_BJTD.shape
    y_BJTD = torch.empty_like(x_BJTD)
    of_batch = 0 if len(cosines_BTD) == 1 else cosines_BTD.stride(0)
    _rotary_halves_kernel[(batches * length, heads)](
        x_BJTD, cosines_BTD, sines_BTD, y_BJTD, length, *x_BJTD.stride()[:3], *y_BJTD.stride()[:3], of_batch,
        GRADIENT=gradient, SIZE=size, **_row_options(size // 2),
    )  # fmt: skip
    return y_BJTD


def rotary(
    heads_NJD: Tensor,
    norm_D: Tensor | None,
    rotations_N1C: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> Tensor:
    """Queries or keys after their norm and rotation; the rows of `heads_NJD` may be part of wider ones."""
    rows, heads, size = heads_NJD.shape
    y_NJD = heads_NJD.new_empty(heads_NJD.shape, dtype=dtype)
    normed = norm_D is not None
    weight = norm_D if norm_D is not None else heads_NJD
    real = torch.view_as_real(rotations_N1C)
    _rotation_kernel[(rows, heads)](
        heads_NJD, weight, real, y_NJD, heads_NJD.stride(0), epsilon,
        NORMED=normed, SIZE=size, **_row_options(size // 2),
    )  # fmt: skip
    return y_NJD


def rotary_gradient_(
    d_NJD: Tensor,
    heads_NJD: Tensor,
    norm_D: Tensor | None,
    rotations_N1C: Tensor,
    epsilon: float,
) -> None:
    """Turn the gradient of `rotary`, in float32, into that of `heads_NJD`, in place; rows of both may be part of wider ones."""
    rows, heads, size = heads_NJD.shape
    weight = norm_D if norm_D is not None else heads_NJD
    _rotation_gradient[(rows, heads)](
        d_NJD, heads_NJD, weight, torch.view_as_real(rotations_N1C), d_NJD.stride(0), heads_NJD.stride(0), epsilon,
        NORMED=norm_D is not None, SIZE=size, **_row_options(size // 2),
    )  # fmt: skip


def paged_attention(
    qkv_SO: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    rotations_S1C: Tensor,
    keys_GJTD: Tensor,
    values_GJTD: Tensor,
    pages_SM: Tensor,
    positions_S: Tensor,
    prompts_S: Tensor,
    epsilon: float,
    span: int | None,
) -> Tensor:
    """Write one new token of each row to the cache, and attend to all its row's tokens: [S, heads · D] in the cache's number format.

    `qkv_SO` holds queries, keys and values before the norms of queries and keys (None: no norm) and before rotation. A row's tokens are in
    the pages that `pages_SM` lists: the first `prompts_S` tokens fill as many pages as they need, and later tokens start on the next page.

    One program attends to all pages of a row and a head of keys. With `span`, one attends to that many pages, and another joins these
    parts as flash-decoding does (https://pytorch.org/blog/flash-decoding/): each is a sum of values with the highest score taken off.
    """
    rows, width = qkv_SO.shape
    _, kv_heads, page, size = keys_GJTD.shape
    heads, most = width // size - 2 * kv_heads, pages_SM.shape[1]
    queries_SHD = keys_GJTD.new_empty(rows, heads, size)
    out_SX = keys_GJTD.new_empty(rows, heads * size)
    query_norm, key_norm = (qkv_SO if norm is None else norm for norm in norms)
    cells = {"HEADS": heads, "KV_HEADS": kv_heads, "MOST": most, "PAGE": page}
    _cache_kernel[(rows, heads + 2 * kv_heads)](
        qkv_SO, query_norm, key_norm, torch.view_as_real(rotations_S1C), queries_SHD, keys_GJTD, values_GJTD,
        pages_SM, positions_S, prompts_S, width, epsilon,
        NORMED=norms[0] is not None, SIZE=size, **cells, **_row_options(size // 2),
    )  # fmt: skip
    split = span is not None and span < most
    span = span if span is not None and split else most
    parts = -(-most // span)
    partials_SHND = (
        out_SX.new_empty(rows, heads, parts, size, dtype=torch.float32) if split else out_SX
    )
    stats_SHN2 = out_SX.new_empty(rows, heads, parts, 2, dtype=torch.float32) if split else out_SX
    block = max(16, int(triton.next_power_of_2(size)))
    _attention_kernel[(rows, kv_heads, parts)](
        queries_SHD, keys_GJTD, values_GJTD, partials_SHND, stats_SHN2, pages_SM, positions_S, prompts_S, size**-0.5,
        SIZE=size, BLOCK=block, QUERIES=max(16, int(triton.next_power_of_2(heads // kv_heads))),
        SPAN=span, SPLIT=split, **cells, **_tile_options(keys_GJTD),
    )  # fmt: skip
    if split:
        _join_kernel[(rows, heads)](
            partials_SHND, stats_SHN2, out_SX, positions_S, prompts_S, parts,
            HEADS=heads, PAGE=page, SIZE=size, BLOCK=block, SPAN=span, TILE=PARTS,
        )  # fmt: skip
    return out_SX


def _tile_options(keys_GJTD: Tensor) -> dict[str, int]:
    """Warps of a program, and the number of tiles loaded ahead: as many as a small GPU's shared memory holds."""
    tile = keys_GJTD.shape[2] * keys_GJTD.shape[3] * keys_GJTD.element_size()
    return {"num_warps": 4, "num_stages": 3 if tile <= 1 << 14 else 1}


def _row_options(size: int) -> dict[str, int]:
    """Launch options for one program per row: its block size, and enough warps that each thread has about 8 numbers."""
    block = int(triton.next_power_of_2(size))
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def _spans(y_NF: Tensor) -> tuple[int, int]:
    rows, width = y_NF.shape
    return max(rows, 1), -(-width // SPAN)
