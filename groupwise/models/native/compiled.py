"""Tensors of a processor handed to the kernels of `groupwise.models.native.kernels`, and where these can be used."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

FORMATS = (torch.bfloat16, torch.float32)


def usable(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether the kernels can compute a model: on a processor, in a format they know, where numba is installed."""
    return (
        device.type == "cpu"
        and dtype in FORMATS
        and head_size % 8 == 0
        and importlib.util.find_spec("numba") is not None
    )


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


def gated(gate_up_N2F: Tensor) -> Tensor:
    """`silu(gate) · up`, [N, F], rounded once."""
    from groupwise.models.native import kernels

    rows, both = gate_up_N2F.shape
    into_NF = gate_up_N2F.new_empty(rows, both // 2)
    kernels.swiglu(array(gate_up_N2F), array(into_NF))
    return into_NF
