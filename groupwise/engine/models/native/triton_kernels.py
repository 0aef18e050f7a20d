"""Computes the steps between the matrix products of a decoder on a GPU: each step is one kernel, written in Triton.

Torch's own operations would be five to ten kernels for each of these, and starting a kernel takes a GPU longer than a step of a small
model. All compute in float32 and round once, as torch's do; sums of a row may differ from torch's in their last bits. A row's result does
not depend on the other rows. Formulas: `groupwise.engine.learner.native.elementwise`.
"""

# Triton comes with torch's CUDA build alone, and its language has no types.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPAN = 1024
"""Numbers of a row that one program of an elementwise kernel computes."""


@triton.jit
def _norm(x, weight, y, dy, into, hidden, epsilon, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    value = tl.load(x + row + at, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + epsilon)
    factor = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(y + row + at, value * scale * factor, mask=inside)
    if GRADIENT:
        g = tl.load(dy + row + at, mask=inside, other=0.0).to(tl.float32) * factor
        mean = tl.sum(g * value, 0) / hidden
        before = tl.load(into + row + at, mask=inside, other=0.0)
        gradient = scale * g - scale * scale * scale * mean * value
        tl.store(into + row + at, before + gradient, mask=inside)


@triton.jit
def _gated(both, y, width, SPAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = at < width
    gate = tl.load(both + 2 * row * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + (2 * row + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _gated_gradient(both, dy, y, d_both, width, SPAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = at < width
    gate = tl.load(both + 2 * row * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + (2 * row + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * width + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    active = gate * sigmoid
    tl.store(y + row * width + at, active * up, mask=inside)
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(d_both + 2 * row * width + at, d_gate, mask=inside)
    tl.store(d_both + (2 * row + 1) * width + at, d * active, mask=inside)


@triton.jit
def _turned(x, weight, rotations, y, stride, epsilon, NORMED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
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


def normed(x_NH: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """The root-mean-square norm of float32 rows."""
    return norm_with_gradient(x_NH, weight_H, epsilon, dtype, None, None)


def norm_with_gradient(
    x_NH: Tensor,
    weight_H: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    dy_NH: Tensor | None,
    into_NH: Tensor | None,
) -> Tensor:
    """The norm again; its gradient is added to `into_NH`, if there is one."""
    rows, hidden = x_NH.shape
    y_NH = torch.empty_like(x_NH, dtype=dtype)
    gradient = None if dy_NH is None or into_NH is None else (dy_NH.contiguous(), into_NH)
    dy_NH, into_NH = gradient or (x_NH, x_NH)  # without a gradient the kernel reads neither
    if rows:
        _norm[(rows,)](
            x_NH, weight_H, y_NH, dy_NH, into_NH, hidden, epsilon,
            GRADIENT=gradient is not None, **_row(hidden),
        )  # fmt: skip
    return y_NH


def gated(gate_up_N2F: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) · up`, [N, F]."""
    rows, both = gate_up_N2F.shape
    y_NF = gate_up_N2F.new_empty(rows, both // 2, dtype=dtype)
    _gated[_spans(y_NF)](gate_up_N2F, y_NF, both // 2, SPAN=SPAN)
    return y_NF


def gated_with_gradient(gate_up_N2F: Tensor, dy_NF: Tensor) -> tuple[Tensor, Tensor]:
    """`silu(gate) · up` again, and the gradient [N, 2F] with respect to both halves."""
    y_NF, d_N2F = torch.empty_like(dy_NF), torch.empty_like(gate_up_N2F)
    _gated_gradient[_spans(y_NF)](gate_up_N2F, dy_NF, y_NF, d_N2F, dy_NF.shape[1], SPAN=SPAN)
    return y_NF, d_N2F


def turned(
    heads_NJD: Tensor,
    norm_D: Tensor | None,
    rotations_N1C: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> Tensor:
    """Queries or keys after their norm and at their positions; the rows of `heads_NJD` may be part of wider ones."""
    rows, heads, size = heads_NJD.shape
    y_NJD = heads_NJD.new_empty(heads_NJD.shape, dtype=dtype)
    normed = norm_D is not None
    weight = norm_D if norm_D is not None else heads_NJD
    real = torch.view_as_real(rotations_N1C)
    _turned[(rows, heads)](
        heads_NJD, weight, real, y_NJD, heads_NJD.stride(0), epsilon,
        NORMED=normed, SIZE=size, **_row(size // 2),
    )  # fmt: skip
    return y_NJD


def _row(size: int) -> dict[str, int]:
    """A program for each row: its block, and so many warps that each thread has about 8 numbers of it."""
    block = int(triton.next_power_of_2(size))
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def _spans(y_NF: Tensor) -> tuple[int, int]:
    rows, width = y_NF.shape
    return max(rows, 1), -(-width // SPAN)
