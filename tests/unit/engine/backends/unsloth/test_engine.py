"""The gradient of rows that Unsloth computes is that of the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from groupwise.algorithms.registry import make
from groupwise.core.types import Row
from groupwise.engine.backends.unsloth.engine import UnslothEngine
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.load import load_model
from groupwise.engine.models.lora import AdaptedModel, new_lora_config
from tests import unsloth

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
