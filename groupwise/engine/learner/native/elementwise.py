"""Computes the steps between the matrix products of a layer, with their gradients: norm, SwiGLU, rotary positions.

These functions keep no tensors; the backward pass recomputes them from the tensors that a layer keeps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.models.native import compiled
from groupwise.engine.models.native.fused import kernels_for

ROWS_IN_CACHE = 64
"""Rows of gate and up that a CPU handles at a time: 0.8 MB in float32 for rows of 1,536 numbers."""


def norm_with_gradient(
    x_NH: Tensor,
    weight_H: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    dy_NH: Tensor | None,
    into_NH: Tensor | None,
) -> Tensor:
    """Recompute the norm of the residual stream, in `dtype`; add its gradient to `into_NH` unless it is None."""
    if compiled.suits(x_NH):
        return compiled.norm_with_gradient(x_NH, weight_H, epsilon, dtype, dy_NH, into_NH)
    kernels = kernels_for(x_NH)
    if kernels is not None:
        return kernels.norm_with_gradient(x_NH, weight_H, epsilon, dtype, dy_NH, into_NH)
    scale_N1 = norm_scale(x_NH, epsilon)
    if dy_NH is not None and into_NH is not None:
        add_norm_gradient(into_NH, dy_NH, x_NH, scale_N1, weight_H)
    return (x_NH * scale_N1).mul_(weight_H).to(dtype)


def norm_scale(x_NH: Tensor, epsilon: float) -> Tensor:
    """Factor of a root-mean-square norm for each row, [N, 1]: `1 / sqrt(mean(x²) + epsilon)`."""
    length_N1 = torch.linalg.vector_norm(x_NH, dim=-1, keepdim=True)
    return length_N1.square_().div_(x_NH.shape[-1]).add_(epsilon).rsqrt_()


def add_norm_gradient(
    into_NH: Tensor, dy_NH: Tensor, x_NH: Tensor, scale_N1: Tensor, weight_H: Tensor
) -> None:
    """Add to `into_NH` the gradient with respect to x of `y = s x w`, where s is the `norm_scale` of x.

    With g = dy w: `dx = s g − s³ x mean(g x)`. All but `dy_NH` are in the number format of x; `dy_NH` may be in any.
    """
    g_NH = dy_NH.to(x_NH.dtype, copy=True).mul_(weight_H)
    mean_N1 = torch.linalg.vecdot(g_NH, x_NH)[..., None].div_(x_NH.shape[-1])
    into_NH.addcmul_(g_NH, scale_N1)
    into_NH.addcmul_(x_NH, mean_N1.mul_(scale_N1.pow(3)), value=-1)


def swiglu(gate_up_N2F: Tensor) -> Tensor:
    """`silu(gate) · up`, [N, F], rounded once at the end."""
    if compiled.suits(gate_up_N2F):
        return compiled.swiglu(gate_up_N2F, gate_up_N2F.dtype)
    kernels = kernels_for(gate_up_N2F)
    if kernels is not None:
        return kernels.swiglu(gate_up_N2F, gate_up_N2F.dtype)
    y_NF = gate_up_N2F.new_empty(len(gate_up_N2F), gate_up_N2F.shape[1] // 2)
    for rows in _row_pieces(gate_up_N2F):
        gate, up = _wide(gate_up_N2F[rows]).chunk(2, dim=-1)
        y_NF[rows] = F.silu(gate, inplace=True).mul_(up)
    return y_NF


def swiglu_with_gradient(gate_up_N2F: Tensor, dy_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Recompute `swiglu`, and return it with the gradient [N, 2F] with respect to gate and up.

    With σ the logistic function: `d gate = dy up σ(gate) (1 + gate (1 − σ(gate)))` and `d up = dy silu(gate)`.
    """
    if compiled.suits(gate_up_N2F):
        return compiled.swiglu_with_gradient(gate_up_N2F, dy_NF)
    kernels = kernels_for(gate_up_N2F)
    if kernels is not None:
        return kernels.swiglu_with_gradient(gate_up_N2F, dy_NF)
    y_NF, d_N2F = torch.empty_like(dy_NF), torch.empty_like(gate_up_N2F)
    for rows in _row_pieces(gate_up_N2F):
        gate_up, dy = _wide(gate_up_N2F[rows]), _wide(dy_NF[rows])
        gate, up = gate_up.chunk(2, dim=-1)
        active = F.silu(gate)
        y_NF[rows] = active * up
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=gate)
        torch.mul(dy, active, out=up)
        d_N2F[rows] = gate_up
    return y_NF, d_N2F


def _row_pieces(x_NX: Tensor) -> Iterator[slice]:
    """Slices of a few rows on a CPU, so that their float32 copies fit its cache; one slice of all rows on other devices."""
    rows = ROWS_IN_CACHE if x_NX.device.type == "cpu" else max(1, len(x_NX))
    return (slice(start, start + rows) for start in range(0, len(x_NX), rows))


def _wide(x: Tensor) -> Tensor:
    """A copy in float32, or in the same format if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def rotary_gradient_(
    d_NJD: Tensor,
    heads_NJD: Tensor,
    norm_D: Tensor | None,
    rotations_N1C: Tensor,
    epsilon: float,
) -> None:
    """Turn the gradient of `NativeModel.rotary` into that of its input, the queries or keys `heads_NJD`, in place.

    That is a rotation by the opposite angle, and then, with a norm, its gradient.
    """
    kernels = kernels_for(d_NJD)
    if kernels is not None:
        kernels.rotary_gradient_(d_NJD, heads_NJD, norm_D, rotations_N1C, epsilon)
        return
    torch.view_as_complex(d_NJD.unflatten(-1, (-1, 2))).mul_(rotations_N1C.conj())
    if norm_D is not None:
        x = heads_NJD.to(d_NJD.dtype)
        d = torch.zeros_like(x)
        add_norm_gradient(d, d_NJD, x, norm_scale(x, epsilon), norm_D)
        d_NJD.copy_(d)
