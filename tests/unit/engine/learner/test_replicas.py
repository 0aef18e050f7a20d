"""Gradients of learners in forked processes, added up.

1. All have the same sum to the bit, in the order of ranks, again and again.
2. A parameter without gradient somewhere counts as zero there; without any, it has none.
3. What is not finite is so everywhere.
4. The end of one does not leave the others waiting.
"""

import os
import pickle
import traceback
from functools import partial

import pytest
import torch

from groupwise.engine.learner.replicas import SharedMemoryGradientSum

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

SHAPES = ((3, 2), (4,), (1, 5))


def parameters():
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def gradient(rank, update, number):
    generator = torch.Generator().manual_seed(100 * rank + 10 * update + number)
    return torch.randn(SHAPES[number], generator=generator)


def forked(replicas, works):
    """Do each of the works in a fork of its own; returns their exit statuses."""
    children = []
    for rank, work in enumerate(works):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                replicas.join(rank)
                work()
            except BaseException:  # noqa: BLE001 — a fork must never return into the tests
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    replicas.leave()
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def in_ranks(count, folder, given, updates=1):
    """The gradients that each rank has after each update; `given(rank, update, number)` is what it brings."""
    replicas = SharedMemoryGradientSum(count, parameters())

    def work(rank):
        own, found = parameters(), []
        for update in range(updates):
            for number, parameter in enumerate(own):
                parameter.grad = given(rank, update, number)
            replicas.sum_gradients(own)
            found.append([None if p.grad is None else p.grad.clone() for p in own])
        (folder / str(rank)).write_bytes(pickle.dumps(found))

    assert forked(replicas, [partial(work, rank) for rank in range(count)]) == [0] * count
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_all_have_the_sum_of_all(tmp_path, count):
    found = in_ranks(count, tmp_path, gradient, updates=3)
    for update in range(3):
        for number in range(len(SHAPES)):
            total = gradient(0, update, number)
            for rank in range(1, count):
                total = total + gradient(rank, update, number)
            assert all(torch.equal(each[update][number], total) for each in found)


def test_a_gradient_that_some_or_all_lack(tmp_path):
    def given(rank, update, number):
        lacks = number == 0 or (number == 1 and rank == update)
        return None if lacks else gradient(rank, update, number)

    for found in in_ranks(2, tmp_path, given, updates=2):
        for update, (nobody, one, both) in enumerate(found):
            assert nobody is None
            assert torch.equal(one, gradient(1 - update, update, 1))
            assert torch.equal(both, gradient(0, update, 2) + gradient(1, update, 2))


def test_a_gradient_that_is_not_finite_reaches_all_ranks(tmp_path):
    def given(rank, update, number):
        return gradient(rank, update, number) * (float("inf") if rank == 1 else 1.0)

    for (found,) in in_ranks(2, tmp_path, given):
        assert not any(torch.isfinite(each).any() for each in found)


@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_do_not_wait_for_a_rank_that_is_gone(victim):
    replicas = SharedMemoryGradientSum(2, parameters())

    def stays():
        with pytest.raises(ConnectionAbortedError, match="has ended"):
            replicas.sum_gradients(parameters())

    works = [stays, stays]
    works[victim] = lambda: None
    assert forked(replicas, works) == [0, 0]
