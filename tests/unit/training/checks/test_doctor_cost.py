"""What a run costs, measured with a clock that the engine moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.tasks.rollouts.config import RolloutConfig
from groupwise.training.checks.doctor_cost import Speeds, estimate
from groupwise.training.config import load_config

CONFIG = load_config(
    {
        "model": {"name": "tiny"},
        "sampler": {"max_completion_length": 50},
        "training": {"prompts_per_step": 4, "num_generations": 2, "max_steps": 100},
    }
).config
SPEEDS = Speeds(sampling=100.0, learning=200.0, publishing=1.0, tokens=32)


ROLLOUT = {"type": "environment", "max_turns": 4, "max_rollout_length": 300}
TURNS = CONFIG.model_copy(update={"rollout": RolloutConfig.model_validate(ROLLOUT)})


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
