"""What the server computes from a recipe's own datums is what plain torch computes from them.

`guess_number` renders a player's turn in another way when it has become history. So each turn is a datum, whose prompt has all the turns
before it, with advantage 0.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from groupwise.core.types import OptimiserParams
from groupwise.engine.distributed.multi_adapter import NewModel
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.machine import has_bfloat16
from groupwise.server.tinker import translate
from groupwise.server.tinker.tensors import messages
from groupwise.training import placement
from groupwise.training.assembly.start import models_over, start_base
from groupwise.training.config import load_config
from tests.integration.cookbook.plain_torch import (
    PlainModel,
    RecordedStep,
    Step,
    read_recorded_steps,
    read_weights,
)
from tests.integration.cookbook.running import Program
from tests.integration.cookbook.workplace import MODEL
from tests.integration.server.server_process import Server

pytestmark = [pytest.mark.soak(suite="cookbook"), pytest.mark.timeout(600)]

GROUP, STEPS = 4, 3


@pytest.fixture(scope="module")
def steps_of_game(workplace: Path, server: Server) -> list[RecordedStep]:
    sizes = ("renderer_name=qwen3", "batch_size=1", f"group_size={GROUP}", f"max_steps={STEPS}")
    options = ("learning_rate=1e-3", "max_tokens=12", "eval_every=0")
    recipe = "multiplayer_rl.guess_number.train"
    Program(workplace, server.url, recipe, *sizes, *options, name="exact").run()
    steps = read_recorded_steps(server.folder)
    assert len(steps) == STEPS
    for step in steps:
        assert len(step.datums) > 2 * GROUP
        for datum in step.datums:
            has_advantage = [advantage != 0 for advantage in datum.advantages]
            assert has_advantage == sorted(has_advantage), "the answer comes last"
    return steps


def test_the_server_trains_as_plain_torch_does(
    steps_of_game: list[RecordedStep], workplace: Path, server: Server
) -> None:
    """Up to the rounding of the base's number format. Each step begins with the server's weights, so that rounding does not add up."""
    dtype = torch.bfloat16 if has_bfloat16("cpu") else torch.float32
    plain = PlainModel(workplace / MODEL, steps_of_game[0].adapter, dtype)
    for step in steps_of_game:
        plain.load(step.adapter)
        expected = plain.step(step.datums, step.adam)
        scale = sum(abs(advantage) for datum in step.datums for advantage in datum.advantages)
        assert step.of_server.loss == pytest.approx(expected.loss, abs=1e-3 * scale)
        # Terms of both signs nearly cancel in the gradient, so rounding moves its norm by percents; in float32 it is exact, see below.
        assert step.of_server.norm == pytest.approx(expected.norm, rel=0.05)
        gaps = torch.tensor(step.of_server.logprobs) - torch.tensor(expected.logprobs)
        assert gaps.square().mean().sqrt() < 0.02
        distance = 0.1 * step.adam["learning_rate"]
        assert step.of_server.share_that_differs(expected, distance) < 0.02


async def test_in_float32_nothing_is_left_to_rounding(
    steps_of_game: list[RecordedStep], workplace: Path, tmp_path: Path
) -> None:
    """The server's translation of the requests and our learner, against plain torch: all steps, one after the other."""
    config = load_config({"model": {"name": str(workplace / MODEL), "dtype": "float32"}}).config
    base = await start_base(config, placement.choose_layout(config, 2000))
    with closing(base):
        new = NewModel(run="here", folder=str(tmp_path), seed=1, lora=LoraConfig(r=8))
        learner = (await models_over(base, 1).add("here", new)).learner
        await learner.save(str(tmp_path))
        plain = PlainModel(workplace / MODEL, tmp_path, torch.float32)
        for step in steps_of_game:
            expected = plain.step(step.datums, step.adam)
            request = messages().ForwardBackwardRequest()
            request.ParseFromString(step.request)
            forward = translate.forward_of(request)
            logprobs = await learner.logprobs(forward.rows)
            sums = await learner.forward_backward(forward.rows, forward.loss, {"policy": 1.0})
            adam = step.adam
            params = OptimiserParams(
                adam["learning_rate"], None, 0.0, adam["beta1"], adam["beta2"], adam["eps"]
            )
            norm = (await learner.update(params)).grad_norm
            await learner.save(str(tmp_path))
            flat = tuple(logprob for row in logprobs for logprob in row)
            computed = Step(sums["loss/policy"], norm, flat, read_weights(tmp_path))
            assert computed.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-3)
            assert computed.norm == pytest.approx(expected.norm, rel=1e-4)
            assert computed.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
            assert computed.share_that_differs(expected, 0.05 * adam["learning_rate"]) < 1e-3
