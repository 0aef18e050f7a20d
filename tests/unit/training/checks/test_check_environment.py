"""Environments as `groupwise check` sees them: made, begun twice, answered once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.core.findings import Finding, Report
from groupwise.tasks.environment import Step
from groupwise.tasks.tools import Tools
from groupwise.training.checks.check import check


class Guess:
    """Guess a word; the first prompt is the environment's own."""

    def reset(self, secret):
        self.secret = secret
        return f"Guess the word of {len(secret)} letters."

    def step(self, completion):
        return (
            Step(done=True, reward=1.0) if completion == self.secret else Step("No.", reward=-0.5)
        )


class Silent:
    """Forgets to reward."""

    def step(self, completion):
        return Step("Well done.", done=True)


def reported(environment: Any, prompt: Any = "Guess.", model: Any = None, **config: Any) -> Report:
    task = SimpleNamespace(
        get_rl_dataset=lambda config: [{"prompt": prompt, "secret": "red"}],
        get_environment=lambda config: environment,
    )
    rollout = {"type": "environment", "max_turns": 4, "max_rollout_length": 400, **config}
    return check(task, {"model": {"name": "tiny", **(model or {})}, "rollout": rollout})


def found(environment: Any, **given: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in reported(environment, **given).findings}


def test_an_environment_is_begun_and_answered():
    said = found(Guess)["environment"]
    assert said.level == "ok"
    assert "'Guess the word of 3 letters.'" in said.measured
    assert "answers nonsense with 'No.'" in said.measured
    assert said.data["rewards"] == {"environment": -0.5}


class Mute:
    """Says nothing that could be answered."""

    def step(self, completion):
        return Step(reward=1.0)


def test_environments_without_a_reward_or_an_observation_are_a_problem():
    seen = found(Silent)
    assert seen["rewards"].level == "problem"
    with_functions = SimpleNamespace(
        get_rl_dataset=lambda config: [{"prompt": "Guess."}],
        get_environment=lambda config: Silent,
        get_reward_funcs=lambda config, tokenizer: [lambda completions, **_: [0.0, 0.0]],
    )
    assert "rewards" not in {each.name for each in check(with_functions).findings}
    said = found(Mute, prompt=[{"role": "user", "content": "Guess."}])["games"]
    assert (said.level, "no observation" in said.measured) == ("problem", True)


class Strict(Guess):
    """Takes silence for a fault."""

    def step(self, completion):
        if not completion:
            raise ValueError("an empty reply")
        return super().step(completion)


def test_an_environment_that_takes_any_text_but_none_is_warned_of():
    said = found(Strict)["games"]
    assert said.level == "warning"
    assert "1 of 9 games failed, all of the player who says nothing" in said.measured


def test_an_environment_that_the_config_would_never_ask_is_refused():
    task = SimpleNamespace(
        get_rl_dataset=lambda config: [{"prompt": "Guess.", "secret": "red"}],
        get_environment=lambda config: Guess,
    )
    with pytest.raises(TaskError, match=r"rollout\.type"):
        check(task, {"model": {"name": "tiny"}})
    assert {each.name: each.level for each in check(task).findings}["environment"] == "ok"


def test_tools_are_part_of_the_prompt_and_of_its_length():
    chat = [{"role": "user", "content": "Buy three."}]
    report = reported(Tools(Shop), prompt=chat)
    (shown,) = report.details["prompts"]
    assert "Buy some apples." in shown
    said = {finding.name: finding for finding in report.findings}
    length = said["training data"].data["prompt_length"]["max"]
    assert length > 200
    short = found(Tools(Shop), prompt=chat, model={"max_seq_length": 500})
    assert short["training data: length"].level == "problem"
    assert short["training data: length"].data["room"] == 100


class Shop:
    """Tools that share a state."""

    def buy(self, count: int) -> str:
        """Buy some apples."""
        return f"{count} bought"

    def reward(self):
        return 0.5
