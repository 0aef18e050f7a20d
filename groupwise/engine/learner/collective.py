"""Adds up the gradients of one run's learners in processes without shared memory, by torch.distributed: NCCL on GPUs, gloo on CPUs.

It does the same as distributed data parallel with accumulated gradients: one all-reduce over all ranks for each update, of all gradients
as one tensor. `DistributedDataParallel` itself wraps a module's forward pass and takes means; here gradients may be computed by hand, and
losses are sums with denominators of the whole step. All ranks get the same bits, and make the same update.
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
from groupwise.engine.models.memory import is_out_of_memory

RENDEZVOUS_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other: while the first one reads its data, while models are read, and for the rank with the longest rows.
The end of a rank is noticed at once. This limit is for a rank that hangs, or whose machine was lost without closing its connections."""
GRACE = 5.0
"""Seconds until a rank that cannot reach another one ends itself, if it has not been ended by then. The main process should notice the end
of the other rank first, because that is the cause."""
_NUMBER = torch.float32


_stores: list[Any] = []
"""Keeps stores alive as long as the process: the first rank's serves the others."""


def join_process_group(
    rank: int, count: int, host: str, port: int, device: str, listening: int | None
) -> None:
    """Join the process group at host and port. `listening` is the descriptor of the first rank's socket, which already listens there."""
    options: dict[str, Any] = {} if listening is None else {"master_listen_fd": listening}
    store = dist.TCPStore(host, port, count, listening is not None, RENDEZVOUS_TIMEOUT, **options)
    _stores.append(store)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=RENDEZVOUS_TIMEOUT
    )


def publish_value(name: str, value: str) -> None:
    """Publish a value in torchrun's store for the ranks that it has started; they read it with `read_published`."""
    _launchers_store().set(name, value)


def read_published(name: str) -> str:
    """Wait for the value that the first rank publishes with `publish_value`. Raises WorkerLostError if none arrives in time."""
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
    """A `groupwise.engine.learner.replicas.GradientSum` over the ranks of the process group."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def join(self, rank: int) -> None:
        """Do nothing, because `join_process_group` has joined the ranks."""

    def leave(self) -> None:
        """Do nothing, because no process was forked."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `groupwise.engine.learner.replicas.Replicas.sum_gradients`."""
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in parameters
        ]
        flat_N = torch.cat([gradient.flatten().to(_NUMBER) for gradient in gradients])
        flags = [float(parameter.grad is not None) for parameter in parameters]
        present_P = torch.tensor(flags, dtype=_NUMBER, device=parameters[0].device)
        total_X = torch.cat([flat_N, present_P])
        try:
            dist.all_reduce(total_X)
            present = total_X[-len(parameters) :].tolist()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            sys.stderr.write(f"another learner cannot be reached: {error}\n")
            sys.stderr.flush()
            timer = threading.Timer(GRACE, os._exit, (1,))  # end this process as well
            timer.daemon = True
            timer.start()
            raise ConnectionAbortedError("another rank cannot be reached") from error
        parts = total_X[: -len(parameters)].split([parameter.numel() for parameter in parameters])
        for parameter, has_one, part in zip(parameters, present, parts, strict=True):
            parameter.grad = part.view_as(parameter) if has_one else None
