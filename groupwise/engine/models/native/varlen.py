"""Causal attention of several concatenated texts in one call: torch's flash attention for packed sequences, for a GPU.

Starting a kernel takes longer than a GPU needs for most texts, so one call per text would be slow. The learner uses this function for a
micro-batch, the sampler for the prompts of a step.
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
"""True if the kernel needs a flag for fewer key heads than query heads; torch 2.11 needs none."""
CAUSAL = (-1, 0)
"""Window sizes that mean causal attention, with the last query aligned to the last key."""


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
    """Attention [N, H, D] of texts. `ends` are the int32 borders of queries and of keys, from 0; `longest` their largest lengths."""
    kernel: Any = varlen_attn  # its signature differs between torch releases
    grouped = queries_NHD.shape[1] != keys_KJD.shape[1]
    options = {"enable_gqa": grouped} if GROUPED else {}
    return kernel(queries_NHD, keys_KJD, values_KJD, *ends, *longest, window_size=CAUSAL, **options)
