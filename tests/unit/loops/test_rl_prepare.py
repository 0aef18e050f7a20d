"""What is planned of a run before a model is loaded: how much it decodes, and learns from, at once."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise import machine_layout
from groupwise.config import load_config
from groupwise.errors import TaskError
from groupwise.loops import rl_prepare
from groupwise.models.plan import Decoding


def asked_of_the_plan(monkeypatch: pytest.MonkeyPatch, processes: int = 1, **sections: Any) -> Any:
    """What `plan_model` is given for prompts of 40 tokens at most, by a step of 3 groups of 4."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(rl_prepare, "plan_model", lambda *_, **more: given.update(more))
    monkeypatch.setattr(machine_layout, "_processes", lambda *_: processes)
    training = {"prompts_per_step": 3, "num_generations": 4}
    settings = {"model": {"name": "tiny"}, "sampler": {"max_completion_length": 24, "slots": 10}}
    config = load_config({**settings, "training": training, **sections}).config
    rl_prepare.planned_sizes(config, machine_layout.choose_layout(config, 40))
    return given


def test_members_of_a_group_share_their_prompt(monkeypatch):
    given = asked_of_the_plan(monkeypatch)
    assert given["decoding"] == Decoding(
        slots=10, key_length=64, completion=24, prompts=3, prompt=40
    )
    assert given["microbatch"] == 3 * 40 + 12 * 24


def test_a_budget_limits_what_is_learnt_from_at_once(monkeypatch):
    training = {"prompts_per_step": 3, "num_generations": 4, "max_tokens_per_microbatch": 100}
    assert asked_of_the_plan(monkeypatch, training=training)["microbatch"] == 100


def test_later_turns_have_prompts_of_their_own(monkeypatch):
    several = {"type": "environment", "max_turns": 3, "max_rollout_length": 88}
    given = asked_of_the_plan(monkeypatch, rollout=several)
    assert given["decoding"] == Decoding(
        slots=10, key_length=128, completion=24, prompts=10, prompt=128 - 24
    )
    stages = {"type": "two_stage", "max_reasoning_length": 50, "max_answer_length": 5}
    found = asked_of_the_plan(monkeypatch, rollout=stages, sampler={"slots": 10})["decoding"]
    assert (found.completion, found.prompts) == (50, 10)
    assert found.prompt == found.key_length - 5


def test_parts_of_an_environment_are_known_when_it_gives_them():
    given = {"model": {"name": "tiny"}, "data": {"curriculum": {"success_part": "won"}}}
    config = load_config(given).config
    for hooks in (["get_environment"], []):
        task: Any = SimpleNamespace(has=hooks.__contains__, described="the task")
        said = contextlib.nullcontext() if hooks else pytest.raises(TaskError, match="'won'")
        with said:
            rl_prepare._check_success_parts(config, task, None, [])
