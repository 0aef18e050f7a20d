"""Broadcasts weights to a server's workers through NCCL, so that a server on other GPUs or another machine takes them without files.

One group for each server: this process is rank 0, the server's workers are the others. `identity` is NCCL's unique id, which the server is
given over HTTP; then both sides call `join` at the same time, and later `broadcast`.

A peer that is lost in the middle would block a collective for ever. So the communicator is a non-blocking one, and every wait has a
time-out: when it is over, or `close` is called from another thread, the communicator is aborted, which also ends kernels that wait on the
GPU, and the group is of no use any more. The server's side has no such limit: its workers wait until somebody starts them again.

NCCL is called through ctypes, as vLLM calls it, because torch's own process groups exchange their ids in a way of their own.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from groupwise.core.errors import EndpointError, UsageError

LIBRARY = "libnccl.so.2"
SUCCESS, IN_PROGRESS = 0, 7
"""Values of ncclResult_t."""
SUM = 0
"""A value of ncclRedOp_t."""
NUMBER_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""Values of ncclDataType_t."""
POLL = 0.002
"""Seconds between two looks at a collective that is under way."""
MAX_UNSENT = 1 << 30
"""Bytes after which a broadcast waits until they have been sent, so that tensors that are gathered for it do not fill the GPU."""
ABORT_TIMEOUT = 5.0
"""Seconds for which an abort is waited for; it may block if the GPU does not come to rest."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId: where the ranks of a group meet."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class CommConfig(ctypes.Structure):
    """ncclConfig_t as far as NCCL 2.14 has it; NCCL takes its defaults for the fields that later releases added."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class TransferGroup(Protocol):
    """A group in which rank 0 broadcasts weights to a server's workers; `NcclGroup` is one."""

    identity: bytes

    def join(self, world: int, timeout: float) -> None:
        """Form the group of `world` ranks with the workers. Raises EndpointError if they have not joined after `timeout` seconds."""
        ...

    def broadcast(self, tensors: Iterable[Tensor], timeout: float) -> None:
        """Send tensors, one after the other. Raises EndpointError if the workers have not taken them after `timeout` seconds."""
        ...

    def close(self) -> None:
        """End the group, also from another thread while it waits. May be repeated."""
        ...


@cache
def nccl_library() -> Any:
    """NCCL, which torch's builds for CUDA bring along. Raises UsageError if there is none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise UsageError(
            f"sampler.weight_transfer is nccl, but NCCL cannot be loaded here ({error}). Install torch's build for CUDA, or have the "
            "weights read from files (weight_transfer: files)."
        ) from None


def cuda_stream(device: torch.device) -> Any:
    """A stream of its own, which begins after what has been computed so far."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


class NcclGroup:
    """A `TransferGroup` by NCCL."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the GPU with the weights."""
        self._nccl = nccl_library()
        self._device = device
        self._id = UniqueId()
        self._comm = ctypes.c_void_p()
        self._closed = threading.Event()
        self._in_use = threading.Lock()
        """Held while this process waits in `join` or `broadcast`, which then abort by themselves."""
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(self._id)), "ncclGetUniqueId")
        self.identity = bytes(self._id)

    def join(self, world: int, timeout: float) -> None:
        """See `TransferGroup.join`. Ends with the sum of one number over all ranks, as vLLM's workers do."""
        config = CommConfig(ctypes.sizeof(CommConfig), 0xCAFEBEEF, 21400, 0)
        with self._in_use, torch.cuda.device(self._device):
            deadline = time.monotonic() + timeout
            code = self._nccl.ncclCommInitRankConfig(
                ctypes.byref(self._comm), world, self._id, 0, ctypes.byref(config)
            )
            self._check(code, "ncclCommInitRankConfig")
            self._wait("join the group", deadline)
            stream = cuda_stream(self._device)
            with torch.cuda.stream(stream):
                number = torch.zeros(1, device=self._device)
            pointer = ctypes.c_void_p(number.data_ptr())
            code = self._nccl.ncclAllReduce(
                *(pointer, pointer, ctypes.c_size_t(1), NUMBER_TYPES[number.dtype]),
                *(SUM, self._comm, ctypes.c_void_p(stream.cuda_stream)),
            )
            self._check(code, "ncclAllReduce")
            self._wait("join the group", deadline, stream.query)

    def broadcast(self, tensors: Iterable[Tensor], timeout: float) -> None:
        """See `TransferGroup.broadcast`."""
        with self._in_use, torch.cuda.device(self._device):
            deadline = time.monotonic() + timeout
            stream = cuda_stream(self._device)
            unsent: list[Tensor] = []  # so that their memory is not used for other tensors
            for tensor in tensors:
                assert tensor.is_contiguous()
                stream.wait_stream(torch.cuda.current_stream(self._device))  # which gathers it
                pointer = ctypes.c_void_p(tensor.data_ptr())
                code = self._nccl.ncclBroadcast(
                    *(pointer, pointer, ctypes.c_size_t(tensor.numel())),
                    *(NUMBER_TYPES[tensor.dtype], 0, self._comm),
                    ctypes.c_void_p(stream.cuda_stream),
                )
                self._check(code, "ncclBroadcast")
                unsent.append(tensor)
                if sum(each.nbytes for each in unsent) > MAX_UNSENT:
                    self._wait("take the weights", deadline, stream.query)
                    unsent.clear()
                elif code == IN_PROGRESS:  # the next call must wait until this one is enqueued
                    self._wait("take the weights", deadline)
            self._wait("take the weights", deadline, stream.query)

    def close(self) -> None:
        """See `TransferGroup.close`."""
        self._closed.set()
        if self._in_use.acquire(blocking=False):
            self._abort()
            self._in_use.release()

    def _wait(self, task: str, deadline: float, done: Callable[[], bool] = lambda: True) -> None:
        """Wait until NCCL has accepted what it was given, and the GPU has `done` it."""
        code = ctypes.c_int(IN_PROGRESS)
        while True:
            self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(code))
            self._check(code.value, "a collective")
            if code.value == SUCCESS and done():
                return
            if self._closed.is_set() or time.monotonic() >= deadline:
                self._abort()
                why = "was closed before" if self._closed.is_set() else "waited in vain for"
                raise EndpointError(f"the transfer of weights {why} the server's workers to {task}")
            time.sleep(POLL)

    def _check(self, code: int, call: str) -> None:
        if code in (SUCCESS, IN_PROGRESS):
            return
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        words = self._nccl.ncclGetErrorString(code).decode()
        self._abort()
        raise EndpointError(
            f"{call} of NCCL failed: {words}. Both sides need the same release of NCCL, GPUs of their own, and a network between them "
            "(NCCL_SOCKET_IFNAME); NCCL_DEBUG=WARN shows more."
        )

    def _abort(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm.value is None:
            return
        aborting = threading.Thread(target=self._nccl.ncclCommAbort, args=(comm,), daemon=True)
        aborting.start()
        aborting.join(ABORT_TIMEOUT)
