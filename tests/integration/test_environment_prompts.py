"""What is said of an environment before a run is what the run records; one that gives no reward is warned of."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import groupwise
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.engine.models.tokens import render_prompt
from groupwise.runs.records import RolloutFilter
from groupwise.runs.store import Store
from groupwise.tasks.environment import Step
from groupwise.tasks.tools import Tools
from tests.integration.toy_run import config


class Guess:
    """Has a first prompt of its own, which its seed has a part in."""

    def reset(self, secret, seed):
        return f"Guess {len(secret)} letters, {seed % 1000}."

    def step(self, completion):
        return Step("No.", reward=0.0)


class Silent(Guess):
    def step(self, completion):
        return Step("Well done.", done=True)


class Broken(Guess):
    def reset(self, secret):  # pyright: ignore[reportIncompatibleMethodOverride] — it is called by names
        raise KeyError(secret)


class Shop:
    """Tools with a reward."""

    def buy(self, count: int) -> str:
        """Buy some apples."""
        return f"{count} bought"

    def reward(self):
        return 0.5


def task(environment: Any) -> SimpleNamespace:
    chat = isinstance(environment, Tools)
    prompt: Any = [{"role": "user", "content": "Buy three."}] if chat else "Guess."
    return SimpleNamespace(
        get_rl_dataset=lambda config: [{"prompt": prompt, "secret": "red"}],
        get_environment=lambda config: environment,
    )


def settings(folder: Path, steps: int = 1) -> dict[str, Any]:
    rollout = {"type": "environment", "max_turns": 2, "max_rollout_length": 40}
    given = config(folder, max_steps=steps)
    del given["rewards"], given["eval"]
    return {**given, "rollout": rollout}


@pytest.mark.parametrize("environment", [Guess, Tools(Shop)], ids=["reset", "tools"])
def test_a_dry_run_shows_the_prompt_that_the_run_records(tmp_path: Path, environment: Any):
    plan = groupwise.rl(settings(tmp_path), task(environment), dry_run=True).summary["plan"]
    groupwise.rl(settings(tmp_path), task(environment))
    with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
        (first, _) = store.groups(0)
        shown = {view.prompt for view in store.rollouts(RolloutFilter(group=1))}
    recorded = render_prompt(load_tokenizer(ModelConfig(name="tiny")), first.rollouts[0].prompt_ids)
    assert plan["first_prompt"] == recorded
    assert shown == {recorded}
    assert ("Buy some apples." if environment is not Guess else "3 letters, ") in recorded


def test_a_dry_run_refuses_an_environment_that_cannot_begin(tmp_path: Path):
    with pytest.raises(groupwise.core.errors.TaskError, match=r"(?s)of row 0: .*KeyError"):
        groupwise.rl(settings(tmp_path), task(Broken), dry_run=True)


def warnings_of(folder: Path, environment: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, "groupwise"):
        groupwise.rl(settings(folder, steps=3), task(environment))
    return [each.message for each in caplog.records if "gave any reward" in each.message]


def test_environments_that_give_no_reward_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (said,) = warnings_of(tmp_path, Silent, caplog)
    assert said.startswith("step 1: ")
