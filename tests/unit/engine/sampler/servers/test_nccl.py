"""The arguments of calls of NCCL, and that no wait is without end: a stand-in library that completes a call at the second poll."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groupwise.core.errors import EndpointError
from groupwise.engine.sampler.servers import nccl


class Library:
    """`stuck`: the collective whose other ranks never come. `fails`: the one that returns an error."""

    def __init__(self, stuck: str = "", fails: str = "") -> None:
        self.stuck, self.fails = stuck, fails
        self.calls: list[tuple[Any, ...]] = []
        self.looks = 0
        self.waiting = threading.Event()
        self.ncclGetErrorString: Any = lambda code: f"error {code}".encode()

    def ncclGetUniqueId(self, where: Any) -> int:
        where._obj.internal[0] = 7
        return 0

    def ncclCommInitRankConfig(
        self, comm: Any, world: int, identity: Any, rank: int, config: Any
    ) -> int:
        given = config._obj
        assert (given.size, given.magic, given.blocking) == (24, 0xCAFEBEEF, 0)
        comm._obj.value = 99
        return self._call("join", world, bytes(identity)[0], rank)

    def ncclAllReduce(
        self, sent: Any, got: Any, count: Any, kind: int, op: int, comm: Any, _: Any
    ) -> int:
        return self._call("sum", count.value, kind, op, comm.value)

    def ncclBroadcast(
        self, sent: Any, got: Any, count: Any, kind: int, root: int, comm: Any, _: Any
    ) -> int:
        assert sent.value == got.value
        return self._call("broadcast", count.value, kind, root, comm.value)

    def ncclCommGetAsyncError(self, comm: Any, code: Any) -> int:
        self.looks += 1
        name = self.calls[-1][0]
        code._obj.value = 7 if name == self.stuck or self.looks < 2 else 0
        if self.looks > 2:
            self.waiting.set()
        return 0

    def ncclCommAbort(self, comm: Any) -> int:
        self.calls.append(("abort", comm.value))
        return 0

    def _call(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        self.looks = 0
        return 5 if name == self.fails else 7


def group_over(library: Library, monkeypatch: pytest.MonkeyPatch) -> nccl.NcclGroup:
    monkeypatch.setattr(nccl, "nccl_library", lambda: library)
    stream = SimpleNamespace(cuda_stream=1, query=lambda: True, wait_stream=lambda _: None)
    monkeypatch.setattr(nccl, "cuda_stream", lambda _: stream)
    for name in ("device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    return nccl.NcclGroup(torch.device("cpu"))


def test_a_group_is_joined_as_vllm_joins_it_and_all_tensors_are_sent(monkeypatch):
    library = Library()
    group = group_over(library, monkeypatch)
    assert (len(group.identity), group.identity[0]) == (128, 7)
    group.join(3, 10)
    group.broadcast([torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(5)], 10)
    group.close()
    group.close()
    assert library.calls == [
        ("join", 3, 7, 0),
        ("sum", 1, 7, 0, 99),
        ("broadcast", 6, 9, 0, 99),
        ("broadcast", 5, 7, 0, 99),
        ("abort", 99),
    ]


@pytest.mark.parametrize("stuck", ["join", "sum", "broadcast"])
def test_workers_that_never_come_are_waited_for_a_limited_time(monkeypatch, stuck: str):
    library = Library(stuck)
    group = group_over(library, monkeypatch)
    if stuck == "broadcast":
        group.join(2, 10)
    waits = (
        partial(group.broadcast, [torch.zeros(2)])
        if stuck == "broadcast"
        else partial(group.join, 2)
    )
    with pytest.raises(EndpointError, match="waited in vain"):
        waits(0.05)
    assert [call[0] for call in library.calls][-2:] == [stuck, "abort"]


def test_a_group_is_closed_while_it_waits(monkeypatch):
    library = Library("broadcast")
    group = group_over(library, monkeypatch)
    group.join(2, 10)
    library.waiting.clear()
    closing = threading.Thread(target=lambda: library.waiting.wait(10) and group.close())
    closing.start()
    begin = time.monotonic()
    with pytest.raises(EndpointError, match="was closed"):
        group.broadcast([torch.zeros(2)], 30)
    assert time.monotonic() - begin < 20, "it does not wait for the time-out"
    closing.join()
    assert library.calls[-1] == ("abort", 99)


def test_an_error_of_nccl_is_shown_and_ends_the_group(monkeypatch):
    library = Library(fails="broadcast")
    group = group_over(library, monkeypatch)
    group.join(2, 10)
    with pytest.raises(EndpointError, match=r"ncclBroadcast of NCCL failed: error 5"):
        group.broadcast([torch.zeros(2)], 10)
    assert library.calls[-1] == ("abort", 99)
