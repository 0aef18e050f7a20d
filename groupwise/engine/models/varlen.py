"""Causal attention of several concatenated texts in one call: torch's flash attention for packed sequences, for a GPU.

Starting a kernel takes longer than a GPU needs for most texts, so one call per text would be slow. The learner uses this function for a
micro-batch, the sampler for the prompts of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from groupwise.engine.models.attention_kernels import with_deterministic_gradient

FORMATS = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Torch's function; None if this release has none. Its module takes a second to import."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return varlen_attn


@cache
def _needs_flag(kernel: Callable[..., Any]) -> bool:
    """True if the kernel needs a flag for fewer key heads than query heads; torch 2.11 needs none."""
    return "enable_gqa" in signature(kernel).parameters


def suits(head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the kernel computes heads of this size and number format on this device."""
    return (
        device.type == "cuda"
        and varlen_kernel() is not None
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and dtype in FORMATS
        and head_size % 8 == 0
        and head_size <= LARGEST_HEAD
    )


def attention(
    queries_NHD: Tensor,
    keys_KJD: Tensor,
    values_KJD: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention [N, H, D] of texts, whose gradient is the same to the bit each time. `ends` are the int32 borders of queries and of keys,
    from 0; `longest` their largest lengths.

    `scale` and `window` as in `groupwise.engine.models.text_mask.causal_attention`.
    """
    kernel = varlen_kernel()
    assert kernel is not None, "the caller asks `suits` before"
    grouped = queries_NHD.shape[1] != keys_KJD.shape[1]
    options: dict[str, Any] = {"enable_gqa": grouped} if _needs_flag(kernel) else {}
    # Tokens seen before and after a query, whose last is aligned to the last key; -1 means all.
    options["window_size"] = (-1 if window is None else window - 1, 0)
    output_NHD = kernel(queries_NHD, keys_KJD, values_KJD, *ends, *longest, scale=scale, **options)
    return with_deterministic_gradient(output_NHD)


def sum_of_copies(gradient_KX: Tensor, copied_K: Tensor, count: int) -> Tensor:
    """The gradient [N, X] of `count` keys, of which `copied_K` says which were copied, from that of the copies; summed in float32 or finer.

    Plain indexing and `index_add_` would add in the order in which a GPU's threads finish; the gradient of an embedding adds in the order
    of the indices.
    """
    precise_KX = gradient_KX.to(torch.promote_types(gradient_KX.dtype, torch.float32))
    return torch.ops.aten.embedding_dense_backward(precise_KX, copied_K, count, -1, False)
