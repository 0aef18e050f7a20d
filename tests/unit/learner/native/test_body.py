"""What the layers keep for the backward pass lies where that of the step before lay."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

STEPS = """
import asyncio, json, random, resource, sys, tempfile
from pathlib import Path
from groupwise.algorithms.registry import make
from groupwise.learner.torch_learner import TorchLearner
from groupwise.learner.weights import TrainedAdapter
from groupwise.models.config import LoraConfig
from groupwise.models.lora import AdaptedModel, new_lora_config
from groupwise.models.machine import prepare_process
from groupwise.models.tiny import tiny_model
from groupwise.types import OptimiserParams, Row

prepare_process(1)
model = tiny_model(hidden_size=256, layers=6, heads=4)
adapted = AdaptedModel(model, new_lora_config(LoraConfig(r=4, alpha=8)))
learner = TorchLearner(
    TrainedAdapter(adapted, seed=1),
    run="r",
    publish_folder=Path(tempfile.mkdtemp()),
    max_tokens_per_microbatch=4096,
    seed=1,
)


def rows(step):
    chance = random.Random(step)
    for member in range(8):
        length = chance.randrange(150, 250)
        ids = tuple(chance.randrange(2, 100) for _ in range(length))
        yield Row((5, 6, 7), ids, (1,) * length, (-5.0,) * length, (-1.0) ** member, 1.0)


async def faults(step):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    await learner.forward_backward([*rows(step)], make("dr_grpo", {}).loss_spec(), {"policy": 1e3})
    await learner.update(OptimiserParams(learning_rate=1e-5))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


print(json.dumps([asyncio.run(faults(step)) for step in range(5)]))
"""
"""Pages that steps touch for the first time, with completions of other lengths in each."""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator's settings are glibc's")
def test_later_steps_touch_next_to_no_fresh_memory():
    ran = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, timeout=120
    )
    first, *_, before_last, last = json.loads(ran.stdout.splitlines()[-1])
    assert first > 20_000, "80 MB at least, or there is nothing to see"
    assert max(before_last, last) < first / 10
