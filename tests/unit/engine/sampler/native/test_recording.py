"""In which order a CUDA graph is made, with stand-ins for what torch needs a GPU for."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

from groupwise.engine.sampler.native.recording import cuda_graphs


class Graph:
    """A `torch.cuda.CUDAGraph`: which memory it has, and how often it was replayed."""

    def __init__(self) -> None:
        self.memory: Any = None
        self.replays = 0

    def pool(self) -> Any:
        return self.memory

    def replay(self) -> None:
        self.replays += 1


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


@pytest.fixture
def recorded_steps(monkeypatch) -> list[str]:
    """What was done, in its order."""
    done: list[str] = []

    @contextlib.contextmanager
    def stream(used: Stream):
        done.append("apart")
        yield
        done.append("beside")

    @contextlib.contextmanager
    def graph(made: Graph, *, pool: Any, stream: Stream, capture_error_mode: str):
        done.append("shared" if pool is not None else "own")
        assert capture_error_mode == "thread_local"
        made.memory = pool or object()
        yield
        done.append("recorded")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return done


def test_a_computation_is_tried_apart_recorded_and_then_only_replayed(recorded_steps):
    result = torch.ones(2)

    def compute() -> torch.Tensor:
        recorded_steps.append("computed")
        return result

    replay = cuda_graphs()(compute)
    assert recorded_steps == ["apart", "computed", "beside", "own", "computed", "recorded"]
    assert replay() is replay() is result
    assert recorded_steps[6:] == []


def test_recordings_share_memory_as_long_as_one_of_them_lives(recorded_steps):
    record = cuda_graphs()

    def recorded() -> Any:
        recorded_steps.clear()
        return record(lambda: torch.ones(2))

    first = recorded()
    assert "own" in recorded_steps
    second = recorded()
    assert "shared" in recorded_steps
    del first
    third = recorded()
    assert "shared" in recorded_steps
    del second, third
    gc.collect()
    kept = recorded()
    assert "own" in recorded_steps, "memory of graphs that are gone is nobody's"
    assert kept is not None
