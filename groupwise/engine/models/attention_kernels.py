"""Chooses the kernels with which torch computes attention and its gradient on a GPU.

Left alone, torch chooses a kernel of `scaled_dot_product_attention` for each call, differently on each kind of GPU and in each release.
Sampler, learner and transformers' models wrap their calls in `pinned_kernels`, so all take the same kernel. And it adds the parts of a
query's gradient in the order in which the GPU's threads finish, unless it is in its deterministic mode, as in `deterministic_gradient`.
Torch's switches belong to the whole process; they are restored after each call, so that other code of the process keeps torch's choice
unless another of its threads calls at that moment.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def pinned_kernels(device: torch.device, *, one_key_head: bool = False) -> Generator[None]:
    """Context manager for calls of attention on this device, and for backward passes through them. On a CPU it does nothing.

    Flash attention comes first, then the memory-efficient kernel, then plain products. CuDNN is left out, because it makes a plan for each
    new shape. `one_key_head`: the model's attention may repeat one head's keys without a copy (as transformers does). For such keys and a
    mask the memory-efficient kernel gave wrong results for the last query of 65, 129, 257 and so on (torch 2.11 on an H100), so it is left
    out too.
    """
    if device.type != "cuda":
        yield
        return
    efficient = [] if one_key_head else [SDPBackend.EFFICIENT_ATTENTION]
    kernels = [SDPBackend.FLASH_ATTENTION, *efficient, SDPBackend.MATH]
    mode = torch.get_deterministic_debug_mode()
    with sdpa_kernel(kernels, set_priority=True):
        try:
            yield
        finally:
            # After a failure inside of `with_deterministic_gradient`.
            torch.set_deterministic_debug_mode(mode)


@contextmanager
def deterministic_gradient() -> Generator[None]:
    """Context manager for a backward pass of attention alone: the same inputs give the same bits each time.

    A whole backward pass cannot be inside: torch refuses operations that have no deterministic kernel.
    """
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def with_deterministic_gradient(output: Tensor) -> Tensor:
    """The output of an attention kernel; its backward pass, whenever it comes, is inside of `deterministic_gradient`."""
    node = output.grad_fn
    if node is not None:
        mode = torch.get_deterministic_debug_mode()
        node.register_prehook(lambda _: torch.set_deterministic_debug_mode("error"))
        node.register_hook(lambda *_: torch.set_deterministic_debug_mode(mode))
    return output
