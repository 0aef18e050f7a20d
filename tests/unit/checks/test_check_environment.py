"""Environments as `groupwise check` sees them: made, begun twice, answered once."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.checks.check import check
from groupwise.checks.findings import Finding
from groupwise.errors import TaskError
from groupwise.tasks.environment import Step


class Guess:
    """Guess a word; the first prompt is the environment's own."""

    def reset(self, secret):
        self.secret = secret
        return f"Guess the word of {len(secret)} letters."

    def step(self, completion):
        return (
            Step(done=True, reward=1.0) if completion == self.secret else Step("No.", reward=-0.5)
        )


class Moody(Guess):
    """Begins differently each time."""

    def reset(self, secret):
        return f"{super().reset(secret)} {random.random()}"


class Fragile(Guess):
    """Takes numbers only."""

    def step(self, completion):
        return Step(reward=float(completion))


def found(environment: Any, **config: Any) -> dict[str, Finding]:
    task = SimpleNamespace(
        get_rl_dataset=lambda config: [{"prompt": "Guess.", "secret": "red"}],
        get_environment=lambda config: environment,
    )
    given = {"model": {"name": "tiny"}, "rollout": {"type": "environment", **config}}
    return {finding.name: finding for finding in check(task, given).findings}


def test_an_environment_is_begun_and_answered():
    said = found(Guess)["environment"]
    assert said.level == "ok"
    assert "begins with 'Guess the word of 3 letters.'" in said.measured
    assert "answers nonsense with 'No.'" in said.measured
    assert said.data["rewards"] == {"environment": -0.5}


def test_a_task_whose_environment_gives_the_rewards_suffices():
    seen = found(Guess)
    assert "rl" in seen["hooks"].data["verbs"]
    assert seen["rewards"].level == "skipped"


def test_members_must_begin_alike():
    said = found(Moody)["environment"]
    assert said.level == "problem"
    assert "same seed" in said.measured


def test_an_environment_that_raises_is_a_problem():
    said = found(Fragile)["environment"]
    assert said.level == "problem"
    assert "ValueError" in said.measured


def test_an_environment_that_the_config_would_never_ask_is_refused():
    task = SimpleNamespace(
        get_rl_dataset=lambda config: [{"prompt": "Guess.", "secret": "red"}],
        get_environment=lambda config: Guess,
    )
    with pytest.raises(TaskError, match=r"rollout\.type"):
        check(task, {"model": {"name": "tiny"}})
    assert {each.name: each.level for each in check(task).findings}["environment"] == "ok"
