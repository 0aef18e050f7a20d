"""Adds up the gradients of one run's learners in several processes of this machine, in shared memory.

The processes are forks of one that had made the learner and its `Replicas`. Each computes the gradient of its own rows and writes it into
its slot in the shared memory. When all have, each adds up all slots in the same order. So all have the same sum to the bit and make the
same update, and the weights, which are never sent, stay equal. They wait for each other on sockets: these close when a process ends, and
waiting on them uses no CPU time.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

_NUMBER = torch.float32


class GradientSum(Protocol):
    """Adds up the gradients of learners that train the same parameters, given in the same order by all; see `Replicas`."""

    @property
    def rank(self) -> int: ...

    def join(self, rank: int) -> None: ...

    def leave(self) -> None: ...

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None: ...


class Replicas:
    """The slots of `count` learners that train the same parameters, given in the same order by all."""

    def __init__(self, count: int, parameters: Sequence[nn.Parameter]) -> None:
        """Create it before the fork."""
        sizes = [parameter.numel() for parameter in parameters]
        self.rank = 0
        self._sizes = sizes
        # An anonymous mapping is not subject to containers' limits on /dev/shm; it takes no memory before it is written.
        memory = mmap.mmap(-1, max(1, count * (sum(sizes) + len(sizes))) * _NUMBER.itemsize)
        slots = torch.frombuffer(memory, dtype=_NUMBER)[: count * (sum(sizes) + len(sizes))]
        slots_CX = slots.view(count, -1)
        self._gradients_CN = slots_CX[:, : sum(sizes)]
        self._present_CP = slots_CX[:, sum(sizes) :]
        self._barrier = _Barrier(count)

    def join(self, rank: int) -> None:
        """Take a slot; called once in each process after the fork."""
        self.rank = rank
        self._barrier.join(rank)

    def leave(self) -> None:
        """Close the sockets of all slots in the parent process: kept open, they would hide the end of a fork from the other forks."""
        self._barrier.leave()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set each parameter's gradient to the sum over all replicas; None if no replica has one.

        Waits until all have called it. Raises ConnectionAbortedError if another process has ended.
        """
        slots = self._gradients_CN[self.rank].split(self._sizes)
        for slot, parameter in zip(slots, parameters, strict=True):
            if parameter.grad is None:
                slot.zero_()
            else:
                slot.copy_(parameter.grad.flatten())
        flags = [float(parameter.grad is not None) for parameter in parameters]
        self._present_CP[self.rank].copy_(torch.tensor(flags))
        self._barrier.wait()
        total_N = self._gradients_CN[0].clone()
        for other_N in self._gradients_CN[1:]:
            total_N += other_N
        present_P = self._present_CP.amax(0).tolist()
        self._barrier.wait()  # all have read, so the slots may be overwritten
        parts = total_N.split(self._sizes)
        for parameter, present, part in zip(parameters, present_P, parts, strict=True):
            parameter.grad = part.view_as(parameter) if present else None


class _Barrier:
    """A barrier that no process passes before all have reached it. The first hears from the others, and then answers each."""

    def __init__(self, count: int) -> None:
        self._pairs = [socket.socketpair() for _ in range(count - 1)]
        self._first = True
        self._others: list[socket.socket] = []

    def join(self, rank: int) -> None:
        """Keep only this process's ends of the sockets, so that the end of another process is noticed."""
        self._first = rank == 0
        for number, (hub, spoke) in enumerate(self._pairs, start=1):
            own_end = hub if self._first else spoke if number == rank else None
            if own_end is not None:
                self._others.append(own_end)
            for end in (hub, spoke):
                if end is not own_end:
                    end.close()

    def leave(self) -> None:
        """Close all sockets; this process takes no part in the barrier."""
        for ends in self._pairs:
            for end in ends:
                end.close()

    def wait(self) -> None:
        """Return when all processes have called it."""
        steps = (
            (self._await_others, self._notify_others)
            if self._first
            else (self._notify_others, self._await_others)
        )
        try:
            for step in steps:
                step()
        except (ConnectionError, EOFError) as error:
            raise ConnectionAbortedError("a process that learns with this one has ended") from error

    def _notify_others(self) -> None:
        for other in self._others:
            other.sendall(b".")

    def _await_others(self) -> None:
        for other in self._others:
            if not other.recv(1):
                raise EOFError
