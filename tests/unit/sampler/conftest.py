"""Samplers over the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from groupwise.models.tiny import tiny_model, tiny_tokenizer
from groupwise.sampler.torch_sampler import DecodeLayout, TorchSampler
from groupwise.sampler.weights import ServedModel

MakeSampler = Callable[..., TorchSampler]


@pytest.fixture
def make_sampler() -> MakeSampler:
    def make(model: Any = None, slots: int = 8, key_length: int = 48, dtype: Any = None):
        chosen: Any = model or tiny_model(seed=4)
        served = ServedModel(chosen.to(dtype or torch.float32))
        return TorchSampler(served, tiny_tokenizer(), DecodeLayout(slots, key_length))

    return make
