"""Measurements that need torch: the device's facts and memory use, and its generator's numbers."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from groupwise.runs import publications

SIZES = Path("/proc/self/smaps_rollup")
"""A process's memory by kinds. Linux has this file since 4.14, but not every sandbox does."""


def free_memory(device: str) -> int | None:
    """Bytes that can still be had on the device, also within a container's limit; None if the system does not tell."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return publications.free_memory()
    except OSError:
        return None


def gpu_memory(device: str) -> int:
    """Bytes that a GPU has, whether they are free or not."""
    return torch.cuda.mem_get_info(device)[1]


def peak_memory(device: str) -> int:
    """Peak memory in bytes: of the device by torch, on a CPU of the whole process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def shared_memory() -> int | None:
    """Bytes of this process that others have in the same place, such as what was there before a fork; None if the system does
    not tell."""
    try:
        lines = SIZES.read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Shared_"))


def random_start(seed: int, count: int) -> list[float]:
    """The first numbers of the generator from which an adapter's start is drawn."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator).tolist()
