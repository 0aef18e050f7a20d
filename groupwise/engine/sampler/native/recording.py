"""A computation that is repeated: recorded once as a CUDA graph and replayed, if there is a GPU.

A token of a small model is some hundred operations, and starting them one by one takes a GPU longer than doing them. A recording starts
them all at once. It reads and writes the memory that it was made with: its inputs are changed in place, and nothing in it may
wait for a result.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import Tensor

Compute = Callable[[], Tensor]
"""A computation that gives the same result if it is done twice."""
Record = Callable[[Compute], Compute]
"""Turns a computation into its recorded form. Each replay writes its result over that of the one before."""


def plainly(compute: Compute) -> Compute:
    """Records nothing: every operation is started each time."""
    return compute


def cuda_graphs() -> Record:
    """Recordings that share one pool of memory as long as one of them lives; one at a time is replayed."""
    living: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
    # One for all: libraries reserve memory for each stream at its first use, cuBLAS 32 MiB, and never give it back.
    apart = torch.cuda.Stream()

    def record(compute: Compute) -> Compute:
        # It is done once before it is recorded, so that memory reserved at the first use is not part of the recording.
        apart.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(apart):
            compute()
        torch.cuda.current_stream().wait_stream(apart)
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(living), None)
        pool = None if shared is None else shared.pool()
        # What other threads do meanwhile, such as freeing memory, is not recorded, and stays allowed.
        with torch.cuda.graph(graph, pool=pool, stream=apart, capture_error_mode="thread_local"):
            result = compute()
        living.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record
