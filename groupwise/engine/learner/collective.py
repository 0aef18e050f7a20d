"""Adds up the gradients of one run's learners in processes that share no memory, by torch.distributed: NCCL on GPUs, gloo on CPUs.

It does what distributed data parallel does with accumulated gradients: one sum over all ranks for each update, of everything in one piece.
`DistributedDataParallel` itself is a wrapper around a module's forward pass and takes means; here gradients may be computed by hand, and
losses are sums with denominators of the whole step. All ranks get the same bits, and make the same update of their own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from groupwise.core.errors import WorkerLostError
from groupwise.engine.models.memory import lacks_memory

RENDEZVOUS_TIMEOUT = timedelta(minutes=30)
"""Time that ranks wait for each other: for the first one to read its data, for models to be read, and for the rank with the longest rows.
The end of a rank is noticed at once; this limit is for one that hangs, or whose machine is gone without a word."""
GRACE = 5.0
"""Seconds after which a rank that cannot reach another one ends, if it has not been ended by then: the end of the other one should be
noticed first, because it is the reason."""
_NUMBER = torch.float32


_stores: list[Any] = []
"""Stores live as long as the process: the first rank's serves the others."""


def begin(rank: int, count: int, host: str, port: int, device: str, listening: int | None) -> None:
    """Meet the other ranks at a port. `listening` is the descriptor of the first rank's socket, which listens there already."""
    first: dict[str, Any] = {} if listening is None else {"master_listen_fd": listening}
    store = dist.TCPStore(host, port, count, listening is not None, RENDEZVOUS_TIMEOUT, **first)
    _stores.append(store)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=RENDEZVOUS_TIMEOUT
    )


def tell(name: str, value: str) -> None:
    """Tell the ranks that torchrun has started, in its own store; see `heard`."""
    _launchers_store().set(name, value)


def heard(name: str) -> str:
    """The value that the first rank tells, once it does. Raises WorkerLostError if it does not."""
    try:
        return _launchers_store().get(name).decode()
    except dist.DistError as error:
        minutes = RENDEZVOUS_TIMEOUT.total_seconds() / 60
        raise WorkerLostError(
            f"The first process of this run is gone, or has told the others nothing for {minutes:g} minutes, in which it reads its data "
            f"and checks its task. If that takes it longer, do it beforehand: `--dry-run` leaves what it has downloaded. ({error})"
        ) from error


def _launchers_store() -> Any:
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT)))
    _stores.append(store)
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    return store


class Collective:
    """A `groupwise.engine.learner.replicas.Summed` over the ranks that have met."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def join(self, rank: int) -> None:
        """Does nothing, because the ranks have met already."""

    def leave(self) -> None:
        """Does nothing, because no process was forked."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `groupwise.engine.learner.replicas.Replicas.sum_gradients`."""
        gradients = [
            torch.zeros_like(each) if each.grad is None else each.grad for each in parameters
        ]
        flat_N = torch.cat([gradient.flatten().to(_NUMBER) for gradient in gradients])
        flags = [float(each.grad is not None) for each in parameters]
        present_P = torch.tensor(flags, dtype=_NUMBER, device=parameters[0].device)
        total_X = torch.cat([flat_N, present_P])
        try:
            dist.all_reduce(total_X)
            present = total_X[-len(parameters) :].tolist()
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            sys.stderr.write(f"another learner cannot be reached: {error}\n")
            sys.stderr.flush()
            timer = threading.Timer(GRACE, os._exit, (1,))  # this process ends soon, too
            timer.daemon = True
            timer.start()
            raise ConnectionAbortedError("another rank cannot be reached") from error
        parts = total_X[: -len(parameters)].split([each.numel() for each in parameters])
        for parameter, has_one, part in zip(parameters, present, parts, strict=True):
            parameter.grad = part.view_as(parameter) if has_one else None
