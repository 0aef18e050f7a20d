"""Parts that threads do beside each other: all of the work, once; errors are told; a fork has threads of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from groupwise.engine.models.native.threads import in_parts


@pytest.fixture(params=[1, 2, 3])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 5, 6, 40])
def test_all_is_done_once(threads, count):
    done: list[int] = []
    parts: list[tuple[int, int]] = []

    def work(first: int, last: int) -> None:
        done.extend(range(first, last))
        parts.append((first, last))

    in_parts(work, count, least=3)
    assert sorted(done) == list(range(count))
    assert len(parts) == max(1, min(threads, count // 3))
    assert all(last - first >= min(3, count) for first, last in parts)


def test_parts_are_done_beside_each_other(threads):
    together = threading.Barrier(threads, timeout=60)
    in_parts(lambda *_: together.wait(), threads, least=1)


def test_an_error_of_any_part_is_told(threads):
    def work(first: int, last: int) -> None:
        if last == 12:
            raise ArithmeticError("the last part")

    with pytest.raises(ArithmeticError, match="the last part"):
        in_parts(work, 12, least=1)


def test_a_fork_has_threads_of_its_own(threads):
    in_parts(lambda *_: None, 12, least=1)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        in_parts(lambda first, last: done.extend(range(first, last)), 12, least=1)
        os._exit(0 if sorted(done) == list(range(12)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
