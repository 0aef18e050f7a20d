"""What a run costs, measured with a clock that the engine moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.checks.doctor_cost import (
    BUDGET,
    MIB,
    LessonSpeeds,
    Speeds,
    duration,
    estimate,
    estimate_lessons,
    measure,
    measure_lessons,
    peak,
)
from groupwise.checks.doctor_engine import Engine
from groupwise.config import RunConfig, load_config
from groupwise.models.chat_masks import Masked
from groupwise.rollouts.config import RolloutConfig
from groupwise.rollouts.teacher import Lesson, LessonSet
from groupwise.sft_config import load_sft_config
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


async def test_speeds_are_tokens_by_seconds(tmp_path: Path):
    speeds, sampler, _ = await measured(tmp_path, 0.01, 0.002)
    assert speeds.sampling == pytest.approx(100)
    assert speeds.learning == pytest.approx(500)
    assert speeds.publishing == pytest.approx(0.5)
    assert speeds.tokens == 50
    assert {len(request.seeds) for request in sampler.requests} == {2}
    assert all(request.params.stop_token_ids == () for request in sampler.requests)


async def test_a_slow_machine_is_measured_on_less(tmp_path: Path):
    speeds, _, learner = await measured(tmp_path, 0.2, 0.5)
    assert 4 < speeds.tokens < 50
    assert 8 * speeds.tokens * 0.2 <= BUDGET
    assert learner.rows[-1] == 2


def test_a_step_is_estimated_from_the_speeds():
    said = estimate(SPEEDS, CONFIG, 100, usual_length=10.0)
    assert said.data["step_seconds_at_most"] == pytest.approx(8 * 50 / 100 + 8 * 50 / 200 + 1)
    assert said.data["step_seconds_usual"] == pytest.approx(8 * 10 / 100 + 8 * 10 / 200 + 1)
    assert said.data["run_seconds_at_most"] == pytest.approx(700)
    assert "100 steps: 4 min" in said.meaning


def test_turns_are_written_read_again_and_learnt_from_with_what_was_said_between():
    rollout = {"type": "environment", "max_turns": 4, "max_rollout_length": 300}
    config = CONFIG.model_copy(update={"rollout": RolloutConfig.model_validate(rollout)})
    speeds = replace(SPEEDS, reading=1000.0)
    said = estimate(speeds, config, 100, usual_length=10.0, longest_prompt=20)
    each = 4 * 50 / 100 + 300 / 200 + 3 * (20 + 300) / 1000
    assert said.data["step_seconds_at_most"] == pytest.approx(8 * each + 1)
    assert said.data["step_seconds_usual"] is None, "nobody knows how many turns are usual"
    assert "8 rollouts with 4 turns" in said.meaning
    assert "the environment, scoring" in said.meaning


async def test_reading_is_measured_where_there_are_turns(tmp_path: Path):
    assert (await measured(tmp_path, 0.01, 0.002))[0].reading == float("inf")
    rollout = {"type": "environment", "max_turns": 4, "max_rollout_length": 300}
    config = CONFIG.model_copy(update={"rollout": RolloutConfig.model_validate(rollout)})
    speeds, sampler, _ = await measured(tmp_path, 0.01, 0.002, config)
    asked = sampler.requests[-1]
    assert (len(asked.prompt_ids), asked.params.max_tokens, len(asked.seeds)) == (300, 1, 1)
    assert speeds.reading == pytest.approx(300 / 0.01)


def test_lengths_that_nobody_knows_are_not_made_up():
    said = estimate(SPEEDS, CONFIG, None, usual_length=None)
    assert said.data["step_seconds_usual"] is None
    assert "run_seconds_at_most" not in said.data
    assert "7.0 s at most;" in said.meaning


@pytest.mark.parametrize(("held", "level"), [(1600, "ok"), (2000, "warning")])
def test_more_memory_than_was_planned_is_a_warning(held, level):
    assert peak(1600.0, held * MIB).level == level


def test_memory_that_nobody_tells_is_not_made_up():
    said = peak(1600.0, None)
    assert (said.level, said.data["peak_mib"]) == ("skipped", None)
    assert "the plan for a whole step is 1,600 MiB" in said.measured


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.44, "0.4 s"), (11.6, "12 s"), (150, "2 min"), (9000, "2.5 h")],
)
def test_durations_for_people(seconds, shown):
    assert duration(seconds) == shown


# --- supervised ----------------------------------------------------------------------------------


def lessons(*lengths: int) -> LessonSet:
    """One row each, of so many tokens, the last half trained."""
    rows = [
        Masked(tuple(range(length)), (0,) * (length - length // 2) + (1,) * (length // 2), 1, 1)
        for length in lengths
    ]
    return LessonSet(tuple(Lesson(Example(n, "p"), (row,)) for n, row in enumerate(rows)))


SFT = load_sft_config({"model": {"name": "tiny"}, "training": {"examples_per_step": 4}}).config


class Pupil(FakeLearner):
    """Takes `pace` seconds for each token of a row."""

    def __init__(self, folder: Path, clock: Clock, pace: float) -> None:
        super().__init__("init", folder)
        self.clock, self.pace = clock, pace
        self.batches: list[tuple[int, float]] = []
        """Rows, and what their losses are divided by."""

    async def forward_backward(self, rows, loss, denominators):
        self.batches.append((len(rows), denominators[loss.name]))
        tokens = sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
        self.clock.now += self.pace * tokens
        return {}


@pytest.mark.parametrize(("pace", "rows"), [(0.1, 4), (BUDGET / 50, 2), (BUDGET, 1)])
async def test_lessons_are_measured_as_far_as_there_is_time(tmp_path: Path, pace: float, rows: int):
    clock = Clock()
    pupil = Pupil(tmp_path, clock, pace)
    speeds = await measure_lessons(pupil, lessons(*[20] * 8), SFT, clock)
    assert speeds.learning == pytest.approx(1 / pace)
    assert pupil.batches == [(1, 10.0), (rows, 10.0 * rows)]


def test_a_supervised_step_has_usual_and_longest_rows():
    found = estimate_lessons(LessonSpeeds(100.0, 0.5), lessons(50, 150), SFT, 10)
    assert found.data["step_seconds_usual"] == 4 * 100 / 100 + 0.5
    assert found.data["step_seconds_at_most"] == 4 * 150 / 100 + 0.5
    assert found.data["run_seconds_usual"] == 45.0
    assert (
        "4.5 s with usual rows (100 tokens), 6.5 s with the longest; 10 steps: 45 s"
        in found.meaning
    )
