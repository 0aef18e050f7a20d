"""Chooses the kernel with which torch computes attention (`scaled_dot_product_attention`) on a GPU.

Left alone, torch chooses for each call, differently on each kind of GPU and in each release. Sampler, learner and transformers' models wrap
their calls in `pinned_kernels`, so all take the same kernel. Torch's switches belong to the whole process; they are restored after each
call, so that other code of the process keeps torch's choice unless another of its threads calls at that moment.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def pinned_kernels(
    device: torch.device, *, one_key_head: bool = False
) -> AbstractContextManager[object]:
    """Context manager for calls of attention on this device, and for backward passes that may recompute them. On a CPU it does nothing.

    Flash attention comes first, then the memory-efficient kernel, then plain products. CuDNN is left out, because it makes a plan for each
    new shape. `one_key_head`: the model's attention may repeat one head's keys without a copy (as transformers does). For such keys and a
    mask the memory-efficient kernel gave wrong results for the last query of 65, 129, 257 and so on (torch 2.11 on an H100), so it is left
    out too.
    """
    if device.type != "cuda":
        return nullcontext()
    efficient = [] if one_key_head else [SDPBackend.EFFICIENT_ATTENTION]
    kernels = [SDPBackend.FLASH_ATTENTION, *efficient, SDPBackend.MATH]
    return sdpa_kernel(kernels, set_priority=True)
