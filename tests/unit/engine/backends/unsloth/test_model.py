"""Adapters over a model of Unsloth compute what ours do, and are in the same files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.algorithms.registry import make
from groupwise.core.types import Row
from groupwise.engine.backends.unsloth.model import UnslothEngine
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.load import load_model
from groupwise.engine.models.lora import AdaptedModel, read_adapter
from groupwise.engine.models.lora_config import new_lora_config
from tests import unsloth

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def ours() -> AdaptedModel:
    base = load_model(unsloth.TINY, "float32")
    return AdaptedModel(base, new_lora_config(LoraConfig(r=4, alpha=8)))


def shifted(adapted: AdaptedModel, name: str, seed: int) -> None:
    """An adapter that changes something."""
    adapted.add(name, trainable=True, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters(name).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def logits(adapted: Any, name: str | None) -> torch.Tensor:
    with adapted.using(name), torch.no_grad():
        return adapted.base(input_ids=IDS).logits


def test_each_adapter_acts_as_ours_does_and_none_as_the_base() -> None:
    found, wanted = unsloth.tiny(), ours()
    for adapted in (found, wanted):
        shifted(adapted, "policy", 1)
        shifted(adapted, "served", 2)
    for name in ("policy", "served", None):
        torch.testing.assert_close(logits(found, name), logits(wanted, name), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(found, "policy"), logits(found, None), atol=1e-3)
    assert [*found.parameters("policy")] == [*wanted.parameters("policy")]


def test_only_what_is_trained_has_a_gradient() -> None:
    adapted = unsloth.tiny()
    adapted.add("policy", trainable=True, seed=1)
    adapted.add("served", trainable=False, seed=1)
    with adapted.using("policy"):
        adapted.base(input_ids=IDS).logits.sum().backward()
    trained = {id(each) for each in adapted.parameters("policy").values()}
    with_gradient = {id(p) for p in adapted.base.parameters() if p.grad is not None}
    assert with_gradient == trained


def test_a_saved_adapter_is_read_by_either(tmp_path: Path) -> None:
    found, other = unsloth.tiny(), ours()
    shifted(found, "policy", 3)
    found.save("policy", tmp_path)
    other.add("policy", trainable=False, seed=0)
    other.write("policy", read_adapter(tmp_path), "the file")
    torch.testing.assert_close(
        logits(found, "policy"), logits(other, "policy"), rtol=1e-4, atol=1e-5
    )


def test_another_thread_waits_while_an_adapter_is_in_use() -> None:
    adapted = unsloth.tiny()
    for seed, name in enumerate(("policy", "served")):
        shifted(adapted, name, seed)
    wanted = logits(adapted, "served")
    assert not torch.allclose(wanted, logits(adapted, "policy"), atol=1e-3)
    found: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: found.append(logits(adapted, "served")))
    with adapted.using("policy"):
        other.start()
        other.join(0.05)
        assert not found
        assert torch.equal(logits(adapted, "policy"), logits(adapted, "policy"))
    other.join()
    torch.testing.assert_close(found[0], wanted)  # a thread may add in another order


LOSS = make("dr_grpo", {}).loss_spec()
ROWS = [
    Row(prompt, tokens, (1,) * len(tokens), (-2.0,) * len(tokens), advantage, 1.0)
    for prompt, tokens, advantage in (
        ((3, 1, 4), (1, 5, 9, 2), 0.7),
        ((3, 1, 4), (6, 5), -0.4),
        ((2, 7), (1, 8, 2, 8, 1, 8), 1.1),
    )
]


async def gradient(
    folder: Path, weights: TrainedAdapter, engine: UnslothEngine | None
) -> dict[str, torch.Tensor]:
    learner = TorchLearner(
        weights,
        engine=engine,
        run="compared",
        publish_folder=folder,
        max_tokens_per_microbatch=16,
        seed=1,
        native=False,
    )
    await learner.forward_backward(ROWS, LOSS, {"policy": 10.0})
    return {name: p.grad for name, p in weights.parameters().items() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
async def test_the_gradient_is_that_of_the_reference(tmp_path: Path, recompute: bool) -> None:
    theirs = TrainedAdapter(unsloth.tiny(gradient_checkpointing=recompute), seed=1)
    shape = new_lora_config(LoraConfig(r=4, alpha=8))
    ours = TrainedAdapter(AdaptedModel(load_model(unsloth.TINY, "float32"), shape), seed=1)
    for weights in (theirs, ours):
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in weights.parameters().values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    found = await gradient(tmp_path / "theirs", theirs, UnslothEngine(theirs))
    wanted = await gradient(tmp_path / "ours", ours, None)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
