"""Draws, seen in the record of real runs: examples, seeds and the order of training.

1. Each epoch draws every example once, whatever the number of prompts of a step.
2. An example that is drawn twice in one step makes two groups: with seeds of their own, each compared with itself alone.
3. Groups are trained in the order of their draws, whichever is scored first.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

import groupwise
from groupwise.core.types import Group
from groupwise.runs.store import Store
from groupwise.training.loops import group_sampling
from tests.integration.toy_run import config, what_must_be_equal


class Few:
    """So few examples that an epoch ends in the middle of a step."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_rl_dataset(self, config: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"write {index}:"} for index in range(self.count)]

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        return [letters]


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(str.isalpha, text)) / 6 for text in completions]


def trained(runs: Path, examples: int, **training: Any) -> list[list[Group]]:
    """The groups of each step."""
    torch.set_num_threads(1)
    settings = {
        **config(runs, **training),
        "algorithm": {"type": "dr_grpo"},
        "eval": {"before_and_after": False},
    }
    result = groupwise.rl(settings, Few(examples))
    assert result.folder
    with Store.open(result.folder / "run.db", readonly=True) as store:
        return [store.groups(record.step) for record in store.steps()]


@pytest.mark.parametrize("size", [3, 10])
def test_each_epoch_draws_every_example_once(tmp_path, size):
    steps = trained(tmp_path, 5, prompts_per_step=size, max_steps=-(-10 // size))
    drawn = [group.example.index for groups in steps for group in groups]
    for epoch in (drawn[:5], drawn[5:10]):
        assert sorted(epoch) == list(range(5))


def test_an_example_that_is_drawn_twice_in_a_step_is_two_groups(tmp_path):
    for groups in trained(tmp_path, 2, prompts_per_step=6, max_steps=3):
        assert sorted(group.example.index for group in groups) == [0, 0, 0, 1, 1, 1]
        members = [rollout for group in groups for rollout in group.rollouts]
        seeds = {segment.seed for rollout in members for segment in rollout.segments}
        assert len(seeds) == len(members) == 24
        assert len({rollout.completion_ids for rollout in members}) > 12
        for group in groups:
            credit = [rollout.advantage for rollout in group.rollouts]
            mean = fmean(rewards_of(group))
            assert credit == pytest.approx([r - mean for r in rewards_of(group)], abs=1e-9)
        means = {fmean(rewards_of(group)) for group in groups}
        assert len(means) > 1, "or one baseline for all would not show"


def rewards_of(group: Group) -> list[float]:
    return [rollout.reward for rollout in group.rollouts if rollout.reward is not None]


@pytest.mark.parametrize("lag", [2, pytest.param(0, marks=pytest.mark.soak(suite="training"))])
def test_the_order_of_scoring_does_not_change_the_run(tmp_path, monkeypatch, lag):
    """Rewards of a group take as long as they like; the run is the same to the bit."""
    trained(tmp_path / "plain", 5, prompts_per_step=4, max_off_policy_steps=lag, max_steps=4)
    score, dice = group_sampling.score, random.Random(5)
    begun: list[int] = []
    ended: list[int] = []

    async def slow(run: Any, group: Group, step: int) -> Group:
        begun.append(group.draw)
        for _ in range(dice.choice([0, 20, 100])):
            await asyncio.sleep(0)
        ended.append(group.draw)
        return await score(run, group, step)

    monkeypatch.setattr(group_sampling, "score", slow)
    trained(tmp_path / "slow", 5, prompts_per_step=4, max_off_policy_steps=lag, max_steps=4)
    assert begun != ended
    plain, late = (what_must_be_equal(tmp_path / name / "toy") for name in ("plain", "slow"))
    assert late == plain
