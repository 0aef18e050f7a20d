"""Several devices, with layers that shard their computation as on a TPU: models learn and sample as on one device, and can be resumed."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from groupwise.algorithms.registry import make
from groupwise.core.types import Completion, GroupRequest, SamplingParams
from groupwise.training.assembly.parts import Parts
from tests.integration.tunix.running import STEP, config_of, flat, parts_of, rows_of

pytestmark = [
    pytest.mark.soak(suite="tunix"),
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("divided"),
]

LOSS = make("dr_grpo", {}).loss_spec()
ROWS = rows_of(random.Random(6), 9)
REQUEST = GroupRequest(0, (5, 9, 7, 30), (1, 2, 3), SamplingParams(12, 1.0, (1,)))


def learnt(parts: Parts, steps: int) -> None:
    for _ in range(steps):
        asyncio.run(parts.learner.forward_backward(ROWS, LOSS, {"policy": 9.0}))
        assert asyncio.run(parts.learner.update(STEP)).applied


def outcome(family: str, mesh: tuple[int, int], folder: Path) -> tuple[list[float], Completion]:
    """Log-probabilities of rows after two updates, and what such a policy draws."""
    config = config_of(family, "tunix", mesh=mesh, layers=2)
    with closing(parts_of(config, folder / str(mesh))) as parts:
        learnt(parts, 2)
        asyncio.run(parts.sampler.load(asyncio.run(parts.learner.publish(1))))
        (completion, *_) = asyncio.run(parts.sampler.generate(REQUEST))
        return flat(asyncio.run(parts.learner.logprobs(ROWS))), completion


MESHES = (("gemma3", (8, 1)), ("llama", (1, 2)), ("gemma3", (1, 2)), ("qwen3", (4, 2)))


@pytest.mark.parametrize(("family", "mesh"), MESHES)
def test_devices_compute_together_what_one_does(
    family: str, mesh: tuple[int, int], tmp_path: Path
) -> None:
    (alone, drawn), (together, drawn_so) = (
        outcome(family, each, tmp_path) for each in ((1, 1), mesh)
    )
    np.testing.assert_allclose(together, alone, atol=2e-3)
    assert drawn_so.token_ids == drawn.token_ids
    np.testing.assert_allclose(drawn_so.logprobs, drawn.logprobs, atol=2e-3)
