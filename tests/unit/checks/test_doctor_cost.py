"""What a run costs, measured with a clock that the engine moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.checks.doctor_cost import (
    Speeds,
    estimate,
    measure,
)
from groupwise.checks.doctor_engine import Engine
from groupwise.config import RunConfig, load_config
from groupwise.rollouts.config import RolloutConfig
from groupwise.testing.fakes import END_ID, FakeLearner, FakeSampler, FakeTokenizer
from groupwise.types import Example, SamplingParams

CONFIG = load_config(
    {
        "model": {"name": "tiny"},
        "sampler": {"max_completion_length": 50},
        "training": {"prompts_per_step": 4, "num_generations": 2, "max_steps": 100},
    }
).config
SPEEDS = Speeds(sampling=100.0, learning=200.0, publishing=1.0, tokens=32)


class Clock:
    """Moves when work is done."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedSampler(FakeSampler):
    """Takes `pace` seconds for each token of a member, all members one after the other."""

    def __init__(self, clock: Clock, pace: float) -> None:
        super().__init__()
        self.clock, self.pace = clock, pace

    async def generate(self, request):
        found = await super().generate(request)
        self.clock.now += self.pace * sum(len(each.token_ids) for each in found)
        return found


class TimedLearner(FakeLearner):
    """Takes `pace` seconds for each completion token."""

    def __init__(self, folder: Path, clock: Clock, pace: float) -> None:
        super().__init__("doctor", folder)
        self.clock, self.pace = clock, pace
        self.rows: list[int] = []

    async def forward_backward(self, rows, loss, denominators):
        self.rows.append(len(rows))
        self.clock.now += self.pace * sum(len(row.completion_ids) for row in rows)
        return await super().forward_backward(rows, loss, denominators)

    async def publish(self, version):
        self.clock.now += 0.5
        return await super().publish(version)


async def measured(
    folder: Path, sampling: float, learning: float, config: RunConfig = CONFIG
) -> tuple[Speeds, Any, Any]:
    clock = Clock()
    sampler, learner = TimedSampler(clock, sampling), TimedLearner(folder, clock, learning)
    engine = Engine(
        sampler, learner, FakeTokenizer(), SamplingParams(12, 1.0, stop_token_ids=(END_ID,)),
        (Example(0, "a"), Example(1, "b")), ((1,), (2,)), "float32",
    )  # fmt: skip
    return await measure(engine, config, 8, 1, clock), sampler, learner


ROLLOUT = {"type": "environment", "max_turns": 4, "max_rollout_length": 300}
TURNS = CONFIG.model_copy(update={"rollout": RolloutConfig.model_validate(ROLLOUT)})


async def test_speeds_are_tokens_by_seconds(tmp_path: Path):
    speeds, sampler, _ = await measured(tmp_path, 0.01, 0.002)
    assert speeds.sampling == pytest.approx(100)
    assert speeds.learning == pytest.approx(500)
    assert speeds.publishing == pytest.approx(0.5)
    assert speeds.tokens == 50
    assert {len(request.seeds) for request in sampler.requests} == {2}
    assert all(request.params.stop_token_ids == () for request in sampler.requests)
    assert speeds.reading == float("inf")
    speeds, sampler, _ = await measured(tmp_path, 0.01, 0.002, TURNS)
    asked = sampler.requests[-1]
    assert (len(asked.prompt_ids), asked.params.max_tokens, len(asked.seeds)) == (300, 1, 1)
    assert speeds.reading == pytest.approx(300 / 0.01)


def test_a_step_is_estimated_from_the_speeds():
    said = estimate(SPEEDS, CONFIG, 100, usual_length=10.0)
    assert said.data["step_seconds_at_most"] == pytest.approx(8 * 50 / 100 + 8 * 50 / 200 + 1)
    assert said.data["step_seconds_usual"] == pytest.approx(8 * 10 / 100 + 8 * 10 / 200 + 1)
    assert said.data["run_seconds_at_most"] == pytest.approx(700)
    assert "100 steps: 4 min" in said.meaning


def test_turns_are_written_read_again_and_learnt_from_with_what_was_said_between():
    speeds = replace(SPEEDS, reading=1000.0)
    said = estimate(speeds, TURNS, 100, usual_length=10.0, longest_prompt=20)
    each = 4 * 50 / 100 + 300 / 200 + 3 * (20 + 300) / 1000
    assert said.data["step_seconds_at_most"] == pytest.approx(8 * each + 1)
    assert said.data["step_seconds_usual"] is None, "nobody knows how many turns are usual"
    assert "8 rollouts with 4 turns" in said.meaning
