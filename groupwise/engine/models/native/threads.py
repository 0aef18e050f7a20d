"""Runs kernels, which have one thread each, on several threads: as many as torch uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

_pools: dict[int, ThreadPoolExecutor] = {}
"""One pool for each number of threads; a forked process begins with none."""

os.register_at_fork(after_in_child=_pools.clear)


def in_parts(work: Callable[[int, int], object], count: int, *, least: int) -> None:
    """Do `work(first, last)` for parts of 0 … `count` in parallel, each at least of the given size."""
    threads = max(1, min(torch.get_num_threads(), count // least))
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, "groupwise-kernels")
    borders = [count * number // threads for number in range(threads + 1)]
    others = [_pools[threads].submit(work, first, last) for first, last in pairwise(borders[1:])]
    work(borders[0], borders[1])
    for each in others:
        each.result()
