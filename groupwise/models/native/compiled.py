"""Tensors of a processor handed to the kernels of `groupwise.models.native.kernels`, and where these can be used."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

FORMATS = (torch.bfloat16, torch.float32)


STRETCH = 16
"""Keys that stand beside each other, in the order [D, STRETCH]; those that are not there weigh 0."""


def refusal(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot compute a model of this format on a processor; None where they can."""
    if dtype not in FORMATS:
        return f"{dtype} is computed on a GPU only".replace("torch.", "")
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    return None


def array(tensor: Tensor) -> Any:
    """The tensor's memory for numpy; bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def normed(x_NH: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """The root-mean-square norm of float32 rows, rounded once."""
    from groupwise.models.native import kernels

    into_NH = torch.empty(x_NH.shape, dtype=dtype)
    kernels.norm(array(x_NH), array(weight_H), np.float32(epsilon), array(into_NH))
    return into_NH


def gated(gate_up_N2F: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) · up`, [N, F], rounded once."""
    from groupwise.models.native import kernels

    rows, both = gate_up_N2F.shape
    into_NF = torch.empty(rows, both // 2, dtype=dtype)
    kernels.swiglu(array(gate_up_N2F), array(into_NF))
    return into_NF
