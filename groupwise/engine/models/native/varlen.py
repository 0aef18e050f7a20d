"""Causal attention of several texts behind each other in one call: torch's flash attention for packed sequences, for a GPU.

Starting a kernel takes longer than a GPU needs for most texts, so that one call for each of them would be slow. Learning uses it for a
micro-batch, sampling for the prompts of a step.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from groupwise.engine.models.native.weights import Shape

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

FORMATS = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
GROUPED = varlen_attn is not None and "enable_gqa" in signature(varlen_attn).parameters
"""True if the kernel needs a flag for fewer heads of keys than of queries; torch 2.11 takes them as they are."""
CAUSAL = (-1, 0)
"""A window that ends with the query itself, the last query at the last key."""


def suits(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the kernel computes a model of this shape and number format on this device."""
    return (
        varlen_attn is not None
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and dtype in FORMATS
        and shape.head_size % 8 == 0
        and shape.head_size <= LARGEST_HEAD
    )


def attention(
    queries_NHD: Tensor,
    keys_KJD: Tensor,
    values_KJD: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
) -> Tensor:
    """Attention [N, H, D] of texts whose queries and keys begin and end at `ends`, 0 first, int32; none has more of them than `longest`."""
    kernel: Any = varlen_attn  # its releases take different arguments
    grouped = queries_NHD.shape[1] != keys_KJD.shape[1]
    options = {"enable_gqa": grouped} if GROUPED else {}
    return kernel(queries_NHD, keys_KJD, values_KJD, *ends, *longest, window_size=CAUSAL, **options)
