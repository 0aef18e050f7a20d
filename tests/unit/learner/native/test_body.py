"""What the layers keep for the backward pass lies where that of the step before lay."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
from pathlib import Path

import pytest

from groupwise.algorithms.registry import make
from groupwise.learner.torch_learner import TorchLearner
from groupwise.learner.weights import TrainedAdapter
from groupwise.models.config import LoraConfig
from groupwise.models.lora import AdaptedModel, new_lora_config
from groupwise.models.machine import prepare_process
from groupwise.models.tiny import tiny_model
from groupwise.types import Row


def rows(step: int) -> list[Row]:
    """Completions of other lengths in each step."""
    chance = random.Random(step)
    lengths = [chance.randrange(150, 250) for _ in range(4)]
    return [
        Row((5, 6, 7), (9,) * length, (1,) * length, (-5.0,) * length, (-1.0) ** member, 1.0)
        for member, length in enumerate(lengths)
    ]


def fresh_pages(learner: TorchLearner, step: int) -> int:
    """Pages that a step touches for the first time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    loss = make("dr_grpo", {}).loss_spec()
    asyncio.run(learner.forward_backward(rows(step), loss, {"policy": 1e3}))
    learner.discard()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.soak(suite="engine")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="the allocator's settings are glibc's")
def test_later_steps_touch_next_to_no_fresh_memory(tmp_path: Path):
    """Of the best of some steps, since how the allocator cuts its memory up differs from processor to processor."""
    adapted = AdaptedModel(
        tiny_model(hidden_size=256, layers=6, heads=4), new_lora_config(LoraConfig(r=4, alpha=8))
    )
    learner = TorchLearner(
        TrainedAdapter(adapted, seed=1),
        run="r",
        publish_folder=tmp_path,
        max_tokens_per_microbatch=4096,
        seed=1,
    )
    child = os.fork()  # to which all memory is fresh, and whose allocator is nobody else's
    if child == 0:
        prepare_process(1)
        found = [fresh_pages(learner, step) for step in range(5)]
        (tmp_path / "found").write_text(json.dumps(found))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    first, *_, third, second, last = json.loads((tmp_path / "found").read_text())
    assert first > 5_000, "20 MB at least, or there is nothing to see"
    assert min(third, second, last) < first / 10
