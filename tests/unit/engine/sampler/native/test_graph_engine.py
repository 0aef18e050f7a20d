"""What a recording may depend on, shown with recordings that are as strict as a GPU's (`tests/fake_cuda_graph.py`):

1. A replay depends on memory that is changed in place alone: tokens, positions, keys and values, the adapter.
2. New numbers of an adapter or of a whole model are taken in place, and recordings stay; another shape of adapter makes new ones.
3. What a caller was given is not overwritten by the next token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.native.graph_engine import GraphEngine
from groupwise.engine.sampler.native.recording import run_eagerly
from groupwise.engine.sampler.weights import ServedAdapter, ServedModel, ServedWeights
from tests.fake_cuda_graph import FakeCudaGraph
from tests.unit.engine.models.native.families import adapted, family, randomised, text


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Torch alone computes, because a recording sees nothing else."""
    monkeypatch.setattr("groupwise.engine.models.native.compiled.suits", lambda tensor: False)
    monkeypatch.setattr(NativeModel, "pack", lambda self, **_: None)


def engine_of(weights: ServedWeights, record: Any, slots: int = 8) -> GraphEngine:
    model = weights.native()
    assert model is not None
    return GraphEngine(model, weights, slots, 600, record)


def served_adapter(name: str = "qwen3", rank: int = 4) -> ServedAdapter:
    weights = ServedAdapter(adapted(family(name), rank=rank))
    randomised(weights.adapted, weights.name, seed=5)
    return weights


@torch.inference_mode()
def decoded(engine: GraphEngine, steps: int = 3, length: int = 5) -> Tensor:
    """Logits of a few tokens of two rows."""
    engine.reset()
    prompt = engine.prefill(text(length).tolist())
    engine.add_row(prompt)
    engine.add_row(prompt)
    return torch.stack([engine.decode([3 + step % 90, 50]) for step in range(steps)])


@pytest.mark.parametrize(("name", "dtype"), [
    ("llama-biases", torch.float32), ("qwen2-tied", torch.bfloat16), ("qwen3", torch.bfloat16), ("llama-mqa", torch.float32),
])  # fmt: skip
def test_replays_are_the_plain_computation_to_the_bit(name, dtype):
    weights = ServedModel(family(name, dtype=dtype))
    graph = FakeCudaGraph()
    found = decoded(engine_of(weights, graph), steps=70)
    assert torch.equal(found, decoded(engine_of(weights, run_eagerly), steps=70))
    assert found.isfinite().all()
    assert (graph.recordings, graph.replays) == (1, 70), "on each row's first page, and beyond"


def test_a_new_adapter_is_taken_in_place_and_recordings_stay():
    weights = served_adapter()
    graph = FakeCudaGraph()
    engine = engine_of(weights, graph)
    before = decoded(engine)
    for seed in (11, 12):
        randomised(weights.adapted, weights.name, seed=seed)
        assert torch.equal(decoded(engine), before), "only a refresh takes what is new"
        with torch.inference_mode():
            engine.refresh()
        after = decoded(engine)
        assert torch.equal(after, decoded(engine_of(weights, run_eagerly)))
        assert not torch.equal(after, before)
        before = after
    assert graph.recordings == 1


def test_an_adapter_of_another_shape_makes_new_recordings():
    weights = served_adapter(rank=4)
    graph = FakeCudaGraph()
    engine = engine_of(weights, graph)
    decoded(engine)
    larger = served_adapter(rank=6)
    weights.factors = larger.factors
    engine.refresh()
    assert torch.equal(decoded(engine), decoded(engine_of(larger, run_eagerly)))
    assert graph.recordings == 2


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.float32), ("qwen3-biases", torch.float32), ("llama-biases", torch.bfloat16)],
)
def test_new_weights_of_a_whole_model_are_taken_in_place_and_recordings_stay(name, dtype):
    weights, other = (ServedModel(family(name, dtype=dtype)) for _ in range(2))
    graph = FakeCudaGraph()
    engine = engine_of(weights, graph)
    before = decoded(engine)
    with torch.no_grad():
        for each in (*weights.tensors().values(), *other.tensors().values()):
            each += 0.05
    weights._changed = True
    engine.refresh()
    after = decoded(engine)
    assert graph.recordings == 1
    assert not torch.equal(after, before)
    assert torch.equal(after, decoded(engine_of(other, run_eagerly))), "as if built with them"


def test_a_recording_goes_with_the_cache_that_it_reads():
    graph = FakeCudaGraph()
    engine = engine_of(ServedModel(family("llama")), graph)
    before = decoded(engine)
    engine.free_cache()
    assert not len(engine._keys_LGJTD)
    assert torch.equal(decoded(engine), before)
    assert graph.recordings == 2


@torch.inference_mode()
def test_rows_of_a_prompt_share_its_pages():
    engine = engine_of(ServedModel(family("llama")), run_eagerly)
    free = len(engine._free)
    prompt = engine.prefill(text(100).tolist())
    rows = [engine.add_row(prompt) for _ in range(4)]
    assert free - len(engine._free) == 2, "of 64 tokens each"
    engine.decode([3, 4, 5, 6])
    assert free - len(engine._free) == 2 + 4, "and one of each row's own"
    engine.remove_rows(rows[:3])
    assert free - len(engine._free) == 2 + 1
    engine.remove_rows(rows[3:])
    assert len(engine._free) == free


def test_returned_logits_are_not_overwritten_by_the_next_token():
    graph = FakeCudaGraph()
    engine = engine_of(ServedModel(family("llama")), graph)
    with torch.inference_mode():
        engine.add_row(engine.prefill(text(5).tolist()))
        first = engine.decode([3])
        kept = first.clone()
        second = engine.decode([4])
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)
    assert graph.recordings == 1
