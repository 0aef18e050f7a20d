"""What the ranks of the contract suites host: an adapter over the tiny model, as in one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from groupwise.engine.distributed.worker_state import WorkerState
from groupwise.engine.learner.replicas import SharedMemoryGradientSum
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedAdapter


@dataclass
class Disturbed(WorkerState):
    shift: Any = None

    def disturb(self) -> None:
        """Change the learner's weights, in each rank alike."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.trained.parameters().values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def adapter(folder: str, count: int) -> Disturbed:
    adapted = AdaptedModel(tiny_model(), new_lora_config(LoraConfig(r=4, alpha=8)))
    trained = TrainedAdapter(adapted, seed=1)
    replicas = SharedMemoryGradientSum(count, [*trained.parameters().values()])
    learner = TorchLearner(
        trained,
        run="contract",
        publish_folder=Path(folder),
        max_tokens_per_microbatch=4096,
        seed=1,
        replicas=replicas,
    )
    sampler = TorchSampler(ServedAdapter(adapted), tiny_tokenizer(), DecodeLayout(8, 64))
    return Disturbed(1, sampler, learner, (), trained, replicas)
