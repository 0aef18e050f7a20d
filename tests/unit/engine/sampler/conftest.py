"""Samplers over the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedModel

MakeSampler = Callable[..., TorchSampler]


@pytest.fixture(params=["native", "transformers"])
def engine(request: pytest.FixtureRequest) -> str:
    """What computes the model; a test that names it runs with each."""
    return request.param


@pytest.fixture
def make_sampler(request: pytest.FixtureRequest) -> MakeSampler:
    """Natively, unless the test names `engine`."""
    native = "engine" not in request.fixturenames or request.getfixturevalue("engine") == "native"

    def make(model: Any = None, slots: int = 8, key_length: int = 48, dtype: Any = None):
        chosen: Any = model or tiny_model(seed=4)
        served = ServedModel(chosen.to(dtype or torch.float32))
        return TorchSampler(
            served, tiny_tokenizer(), DecodeLayout(slots, key_length), native=native
        )

    return make
