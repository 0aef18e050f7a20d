"""Determines whether the GPU kernels of `groupwise.engine.models.native.triton_kernels` can be used on this machine.

Triton comes with torch's CUDA build, and compiles with the machine's C compiler. If either is missing, or results differ from torch's,
torch's own operations compute the same in more and slower steps.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

FORMATS = (torch.bfloat16, torch.float16, torch.float32)
CLOSE = 1e-4
"""Largest accepted difference between a kernel's result and torch's, on test rows with numbers up to 4."""


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """The kernels for tensors like this one; None if torch's own operations are used."""
    if tensor.device.type != "cuda" or tensor.dtype not in FORMATS:
        return None
    return _try_kernels(tensor.device)


@cache
def _try_kernels(device: torch.device) -> ModuleType | None:
    """The kernels, if one of them, compiled and run on this device, agreed with torch."""
    try:
        from groupwise.engine.models.native import triton_kernels

        rows, weight = (torch.linspace(-2, 2, size, device=device) for size in (288, 72))
        rows = rows.view(4, 72)
        normed = triton_kernels.normed(rows, weight, 1e-5, torch.float32)
        error = float((normed - F.rms_norm(rows, (72,), weight, 1e-5)).abs().max())
    except Exception as reason:  # noqa: BLE001 — after any compiler error torch can do without it
        logger.warning(
            "Triton's kernels cannot be used here, so steps take longer: %s: %s",
            type(reason).__name__,
            reason,
        )
        return None
    if not error <= CLOSE:
        logger.warning("Triton's kernels give other results than torch here, so they are not used.")
        return None
    return triton_kernels
