"""Rows and learners over the tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.types import Row
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter, TrainedModel
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.tiny import tiny_model

MakeRows = Callable[..., list[Row]]
MakeLearner = Callable[..., TorchLearner]


@pytest.fixture
def make_rows() -> MakeRows:
    """Rows of several prompts and lengths, a one-token completion and a masked stretch among them."""

    def make(count: int = 11, prompts: int = 3, seed: int = 0, reference: bool = False):
        rng = random.Random(seed)
        openings = [
            tuple(rng.randrange(2, 100) for _ in range(3 + 4 * index)) for index in range(prompts)
        ]
        return [_row(rng, openings[index % prompts], index, reference) for index in range(count)]

    return make


def _row(rng: random.Random, prompt: tuple[int, ...], index: int, reference: bool) -> Row:
    length = 1 if index == 1 else rng.randrange(2, 14)
    mask = [1] * length
    if index == 2:
        mask[: length // 2] = [0] * (length // 2)
    return Row(
        prompt_ids=prompt,
        completion_ids=tuple(rng.randrange(2, 100) for _ in range(length)),
        mask=tuple(mask),
        sampling_logprobs=tuple(rng.uniform(-5, -4) for _ in range(length)),
        advantage=rng.uniform(-1, 1),
        scale=1 / length,
        temperature=rng.choice([0.7, 1.0, 1.3]),
        reference_logprobs=tuple(rng.uniform(-6, -4) for _ in range(length)) if reference else None,
        teacher_logprobs=tuple(rng.uniform(-6, -4) for _ in range(length)) if reference else None,
    )


@pytest.fixture
def make_learner(tmp_path: Path) -> MakeLearner:
    """A learner of an adapter that already changes something, natively or by the model's modules, or of all weights; `rounded` computes
    with those in bfloat16."""

    def make(kind: str = "adapter", *, max_tokens: int = 4096, dropout: float = 0.0, **more: Any):
        model = more.pop("model", None) or tiny_model(seed=4)
        if kind not in ("full", "rounded"):
            settings = LoraConfig(r=4, alpha=8, dropout=dropout)
            weights: Any = TrainedAdapter(AdaptedModel(model, new_lora_config(settings)), seed=1)
            _fill(weights.parameters())
        else:
            weights = TrainedModel(model, dtype="bfloat16" if kind == "rounded" else "float32")
        return TorchLearner(
            weights,
            run="r",
            publish_folder=tmp_path / "published",
            max_tokens_per_microbatch=max_tokens,
            **{"seed": 1, "native": kind == "adapter", **more},
        )

    return make


def _fill(parameters: dict[str, Any]) -> None:
    import torch

    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
