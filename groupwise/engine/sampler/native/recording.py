"""Repeated computations: on a GPU they are recorded once as a CUDA graph and replayed.

A token of a small model takes some hundred operations, and starting them one by one takes a GPU longer than running them. A recording
starts them all at once. It reads and writes the memory with which it was recorded: the caller changes its inputs in place, and nothing in
it may wait for a result.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import Tensor

Compute = Callable[[], Tensor]
"""A computation that gives the same result each time."""
Record = Callable[[Compute], Compute]
"""Turns a computation into its recorded form. Each replay overwrites the previous result."""


def run_eagerly(compute: Compute) -> Compute:
    """Record nothing: every operation is started each time."""
    return compute


def cuda_graphs() -> Record:
    """Make recordings that share one pool of memory as long as any of them exists; only one is replayed at a time."""
    living: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
    # One stream for all: libraries reserve memory for each stream at its first use (cuBLAS 32 MiB) and never release it.
    apart = torch.cuda.Stream()

    def record(compute: Compute) -> Compute:
        # Run it once before recording, so that memory reserved at the first use is not part of the recording.
        apart.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(apart):
            compute()
        torch.cuda.current_stream().wait_stream(apart)
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(living), None)
        pool = None if shared is None else shared.pool()
        # Operations of other threads, such as freeing memory, are not recorded and stay allowed.
        with torch.cuda.graph(graph, pool=pool, stream=apart, capture_error_mode="thread_local"):
            result = compute()
        living.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record
