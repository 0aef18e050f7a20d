"""A sampler over HTTP with a learner for tests, and a clock that makes waiting unnecessary."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from groupwise.api.openai_client.client import Endpoint
from groupwise.core.retry import Timing
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler.servers.adapters import AdapterFiles, SharedFolder
from groupwise.engine.sampler.servers.local_policy import TorchPolicy
from groupwise.engine.sampler.servers.sampler import ServerSampler, WeightSync
from groupwise.engine.sampler.servers.server_pool import Server, Servers
from groupwise.engine.sampler.weights import ServedAdapter

KEY = "TEST_VLLM_KEY"
"""The environment variable with the servers' key."""


class Clock:
    """Time that passes only in `sleep`, which also runs the functions in `meanwhile`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.meanwhile: dict[int, Any] = {}
        """Functions to call, by the number of the sleep."""

    def timing(self) -> Timing:
        return Timing(clock=lambda: self.now, sleep=self.sleep, jitter=lambda: 1.0)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        do = self.meanwhile.pop(len(self.slept), None)
        until = self.now + seconds
        if do is not None:
            do()  # nobody else's time passes meanwhile
        for _ in range(20):  # whoever does not wait goes first
            await asyncio.sleep(0)
        self.now = max(self.now, until)


def disturb(learner: TorchLearner, size: float = 0.3) -> None:
    """Make the adapter change something."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in trained(learner).parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


_names = count()


def trained(learner: TorchLearner) -> TrainedAdapter:
    """The weights of such a learner."""
    weights = learner._weights
    assert isinstance(weights, TrainedAdapter)
    return weights


def learner_of(folder: Path, base: Any = None) -> TorchLearner:
    """An adapter over the tiny model, or another base."""
    adapted = AdaptedModel(base or tiny_model(), new_lora_config(LoraConfig(r=4, alpha=8)))
    return TorchLearner(
        TrainedAdapter(adapted, seed=1),
        run="contract",
        publish_folder=folder,
        max_tokens_per_microbatch=4096,
        seed=1,
    )


def server_sampler(
    urls: Sequence[str],
    learner: TorchLearner,
    *,
    clock: Clock | None = None,
    base: str = "tiny",
    key_length: int = 128,
    tolerance: float = 0.01,
    timeout: float = 60.0,
    server_timeout: float = 100.0,
    seeded: bool = True,
    shared: SharedFolder | None = None,
    sync: WeightSync | None = None,
    kind: type[Server] = Server,
) -> ServerSampler:
    """A sampler over the learner's base, as `groupwise.training.assembly.servers` makes it."""
    timing = (clock or Clock()).timing()
    servers = [kind(Endpoint(url, base, KEY, timeout), 64, timing) for url in urls]
    served = ServedAdapter(trained(learner).adapted, f"served-{next(_names)}")
    return ServerSampler(
        Servers(servers, server_timeout, timing),
        TorchPolicy(served),
        tiny_tokenizer(),
        base=base,
        key_length=key_length,
        tolerance=tolerance,
        seeded=seeded,
        sync=sync or AdapterFiles(shared),
    )
