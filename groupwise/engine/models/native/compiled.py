"""Passes CPU tensors to the kernels of `groupwise.engine.models.native.kernels`, and decides whether these can be used."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.engine.models.native.facts import numba_works, without_numba

FORMATS = (torch.bfloat16, torch.float32)

FEW = 64
"""Up to this many rows, one thread is faster than starting others."""


def refusal(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot compute a model of this number format on a CPU; None if they can."""
    if dtype not in FORMATS:
        return f"{dtype} is computed on a GPU only".replace("torch.", "")
    return without_numba()


def computes(tensor: Tensor) -> bool:
    """True if there are kernels for the device and number format of this tensor, and numba runs here."""
    return tensor.device.type == "cpu" and tensor.dtype in FORMATS and numba_works()


def suits(tensor: Tensor) -> bool:
    """True if a kernel, which runs on one thread, is the best choice for these rows."""
    return (len(tensor) <= FEW or torch.get_num_threads() == 1) and computes(tensor)


def array(tensor: Tensor) -> Any:
    """The tensor's memory as a numpy array, without a copy; bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def normed(x_NH: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """The root-mean-square norm of float32 rows, rounded once at the end."""
    from groupwise.engine.models.native import kernels

    into_NH = torch.empty(x_NH.shape, dtype=dtype)
    kernels.norm(array(x_NH), array(weight_H), np.float32(epsilon), array(into_NH))
    return into_NH


def swiglu(gate_up_N2F: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) · up`, [N, F], rounded once at the end."""
    from groupwise.engine.models.native import kernels

    rows, columns = gate_up_N2F.shape
    into_NF = torch.empty(rows, columns // 2, dtype=dtype)
    kernels.swiglu(array(gate_up_N2F), array(into_NF))
    return into_NF


def norm_with_gradient(
    x_NH: Tensor,
    weight_H: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    dy_NH: Tensor | None,
    into_NH: Tensor | None,
) -> Tensor:
    """Recompute the norm; add its gradient to `into_NH` if `dy_NH` and `into_NH` are given."""
    from groupwise.engine.models.native import kernels

    y_NH = torch.empty(x_NH.shape, dtype=dtype)
    none = x_NH.new_empty(0, x_NH.shape[1])
    kernels.norm_gradient(
        array(x_NH),
        array(weight_H),
        np.float32(epsilon),
        array(none if dy_NH is None else dy_NH),
        array(none if into_NH is None else into_NH),
        array(y_NH),
    )
    return y_NH


def swiglu_with_gradient(gate_up_N2F: Tensor, dy_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Recompute `silu(gate) · up`, and return it with the gradient [N, 2F] with respect to gate and up."""
    from groupwise.engine.models.native import kernels

    y_NF, d_N2F = torch.empty_like(dy_NF), torch.empty_like(gate_up_N2F)
    kernels.swiglu_gradient(*map(array, (gate_up_N2F, dy_NF, y_NF, d_N2F)))
    return y_NF, d_N2F


def draw(logits_SV: Tensor, temperatures_S: Tensor, uniforms_S: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [S] drawn from float32 logits at these temperatures, which may be 0, and their log-probabilities [S]."""
    from groupwise.engine.models.native import vocabulary_kernels

    tokens_S = torch.empty(len(logits_SV), dtype=torch.int64)
    logprobs_S = torch.empty(len(logits_SV))
    vocabulary_kernels.draw(
        array(logits_SV.contiguous()),
        array(temperatures_S.float()),
        array(uniforms_S),
        array(tokens_S),
        array(logprobs_S),
    )
    return tokens_S, logprobs_S


def head_numbers(
    logits_CV: Tensor,
    temperatures_C: Tensor,
    targets_C: Tensor | None,
    *,
    gradient: bool,
    entropy_CV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `triton_kernels.head_numbers`."""
    from groupwise.engine.models.native import vocabulary_kernels

    rows = len(logits_CV)
    normalisers_C, entropies_C = torch.empty(rows), torch.empty(rows)
    likeliest_C = torch.empty(rows, dtype=torch.int64)
    vocabulary_kernels.head_numbers(
        array(logits_CV),
        array(temperatures_C),
        array(likeliest_C[:0] if targets_C is None else targets_C),
        gradient,
        array(logits_CV[:0] if entropy_CV is None else entropy_CV),
        array(normalisers_C),
        array(entropies_C),
        array(likeliest_C),
    )
    return normalisers_C, entropies_C, likeliest_C
