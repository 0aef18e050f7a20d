"""Weights are broadcast by gloo in NCCL's place (`groupwise.engine.sampler.servers.nccl`), so that tests need no GPU.

`GlooGroup` is the learner's side, `GlooWorker` that of a server's worker. As with NCCL, a group's unique id has 128 bytes, both sides join
at the same time, a sum of one number over all ranks comes first, and a worker whose learner is lost never returns: here it raises, so that
its server can wait for ever in its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore

from groupwise.core.errors import EndpointError
from tests.ports import free_port

LONG = timedelta(seconds=60)


class GlooGroup:
    """The learner's side: a `TransferGroup`."""

    def __init__(self, device: torch.device) -> None:
        self._port = free_port()
        self.identity = str(self._port).encode().ljust(128, b" ")
        self._store = TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)
        self._group: Any = None
        self._closed = threading.Event()

    def join(self, world: int, timeout: float) -> None:
        workers = [str(rank) for rank in range(1, world)]
        self._wait(lambda: self._store.check(workers), time.monotonic() + timeout)
        self._group = ProcessGroupGloo(self._store, 0, world, LONG)
        self._wait(self._group.allreduce([torch.zeros(1)]).is_completed, time.monotonic() + timeout)

    def broadcast(self, tensors: Iterable[Tensor], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for tensor in tensors:
            self._wait(lambda: self._store.check(["receives"]), deadline)
            self._wait(self._group.broadcast(tensor, 0).is_completed, deadline)

    def close(self) -> None:
        self._closed.set()
        self._group = None

    def _wait(self, done: Callable[[], bool], deadline: float) -> None:
        while not done():
            if self._closed.is_set() or time.monotonic() > deadline:
                self._group = None
                raise EndpointError("the transfer of weights waited in vain")
            time.sleep(0.002)


class GlooWorker:
    """The server's side, with a single worker."""

    def __init__(self, identity: bytes, rank: int, world: int) -> None:
        self._store = TCPStore("127.0.0.1", int(identity), is_master=False, timeout=LONG)
        self._store.set(str(rank), "")
        self._group: Any = ProcessGroupGloo(self._store, rank, world, LONG)
        self._group.allreduce([torch.zeros(1)]).wait()

    def receive(
        self, names: list[str], dtype_names: list[str], shapes: list[list[int]]
    ) -> Iterator[tuple[str, Tensor]]:
        self._store.set("receives", "")
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(tensor, 0).wait()
            yield name, tensor
