"""Measurements of a device's memory and its use, and the numbers of torch's generator.

Torch is imported only where it is asked: the memory of a CPU is read from the system.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from groupwise.runs import publications

SIZES = Path("/proc/self/smaps_rollup")
"""A process's memory by kind. Linux has this file since 4.14, but some sandboxes lack it."""


def free_memory(device: str) -> int | None:
    """Free bytes on the device, also considering a container's limit; None if the system does not report them."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        return publications.free_memory()
    except OSError:
        return None


def gpu_memory(device: str) -> int:
    """All bytes of a GPU's memory."""
    import torch

    return torch.cuda.mem_get_info(device)[1]


def peak_memory(device: str) -> int:
    """Peak memory in bytes: torch's on a GPU, the whole process's on a CPU."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def shared_memory() -> int | None:
    """Bytes of this process that it shares with others, such as memory from before a fork; None if the system does not
    report them."""
    try:
        lines = SIZES.read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Shared_"))


def random_start(seed: int, count: int) -> list[float]:
    """The first numbers of the generator from which a new adapter is initialised."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator).tolist()
