"""Draws that are not simply the next example: what the sampler, the rewards and the record get to see of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.core import atomic_files
from groupwise.core.errors import ConfigError, TaskError
from groupwise.core.types import Group, Rollout, Segment
from groupwise.runs.store import Store
from tests.integration.toy_run import TOY, config, crash_at, go_on
from tests.rotation import rotating_params

EASY = {
    "dataset_name": str(Path(__file__).parents[1] / "fixtures" / "easy.jsonl"),
    "columns": {"prompt": "question"},
    "schedule": [[0, 0.5]],
}
REPLAY = {"warmup_entries": 1, "success_threshold": 0.01}


def trained(runs: Path, task: Any = TOY, **sections: Any) -> list[list[Group]]:
    """The groups of each step."""
    settings = {**config(runs), **sections}
    settings["sampler"] = {**config(runs)["sampler"], **sections.get("sampler", {})}
    assert groupwise.rl(settings, task).exit_code == 0
    return recorded(runs)


def recorded(runs: Path) -> list[list[Group]]:
    with Store.open(runs / "toy" / "run.db", readonly=True) as store:
        return [store.groups(step) for step in range((store.last_step() or 0) + 1)]


def origins(steps: list[list[Group]]) -> set[str]:
    return {group.origin for groups in steps for group in groups}


def test_the_record_says_where_each_group_came_from(tmp_path):
    steps = trained(tmp_path, data={"easy_pool": EASY, "replay": REPLAY})
    assert origins(steps) == {"fresh", "easy", "replay"}
    for group in (group for groups in steps for group in groups):
        easy = str(group.example.prompt).startswith("easy")
        assert easy or group.origin != "easy"
        assert "task" not in group.example.columns, "no router asks for a label"
        assert group.again is None


def test_replayed_completions_are_those_of_the_draw_that_they_name(tmp_path):
    steps = trained(tmp_path, data={"replay": {**REPLAY, "mode": "completions"}})
    by_draw = {group.draw: group for groups in steps for group in groups}
    again = [group for group in by_draw.values() if group.origin == "replay"]
    assert again
    for group in again:
        assert group.again is not None
        first = by_draw[group.again]
        assert first.again is None
        assert group.example == first.example
        for mine, theirs in zip(group.rollouts, first.rollouts, strict=True):
            assert sampled(mine) == sampled(theirs), "sampled then, by the policy of then"
            (said,), (before,) = map(said_by_learner, (mine, theirs))
            assert said is None or said != before, "learnt from now, by the policy of now"
            assert (mine.reward, mine.parts, mine.completion) == (
                theirs.reward,
                theirs.parts,
                theirs.completion,
            )
    assert any(said_by_learner(rollout) != [None] for group in again for rollout in group.rollouts)
    with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
        assert any(
            age > 0 for _, age in store.metrics(["sampling/staleness"])["sampling/staleness"]
        )


def sampled(rollout: Rollout) -> list[Segment]:
    return [replace(segment, learner_logprobs=None) for segment in rollout.segments]


def said_by_learner(rollout: Rollout) -> list[tuple[float, ...] | None]:
    return [segment.learner_logprobs for segment in rollout.segments]


def test_every_token_of_a_step_is_drawn_at_its_temperature(tmp_path):
    schedule = {
        "start": 1.0,
        "end": 0.4,
        "steps": 2,
        "high_temperature_every": 4,
        "high_temperature": 2.0,
    }
    steps = trained(tmp_path, sampler={"temperature_schedule": schedule})
    found = [
        {
            round(s.params.temperature, 9)
            for g in groups
            for r in g.rollouts
            for s in r.segments
            if s.params
        }
        for groups in steps
    ]
    assert found == [{1.0}, {0.7}, {0.4}, {0.4}, {2.0}]


@pytest.mark.parametrize("part", rotating_params([2, 3, 4], 3, "kills", str))
def test_the_free_schedule_loses_and_repeats_nothing(tmp_path, part):
    """Draws are asked for one by one there; one that a crash cut off is asked for again, and gets the same."""
    settings = {
        **config(tmp_path, schedule="free", max_off_policy_steps=2),
        "data": {"easy_pool": EASY, "replay": {**REPLAY, "mode": "completions"}},
    }
    points: list[str] = []
    atomic_files.on_write = points.append
    try:
        groupwise.rl({**settings, "run": {**settings["run"], "name": "whole"}}, TOY)
    finally:
        atomic_files.on_write = lambda name: None
    assert crash_at(part * len(points) // 5, lambda: groupwise.rl(settings, TOY)) == 17
    go_on(settings)
    steps = recorded(tmp_path)
    draws = [group.draw for groups in steps for group in groups]
    assert [len(groups) for groups in steps] == [2] * 5
    assert len(draws) == len(set(draws)) == 10


def easily(completions, **columns):
    return [1.0] * len(completions)


def test_the_router_gives_easy_examples_a_reward_of_their_own(tmp_path):
    """Beside a task, whose own rewards stay those of its rows."""
    settings = {
        **config(tmp_path),
        "data": {"easy_pool": EASY},
        "rewards": {"router": {"EASY": [f"{__file__}:easily"]}},
    }
    assert groupwise.rl(settings, TOY).exit_code == 0
    groups = [group for groups in recorded(tmp_path) for group in groups]
    applied = {
        (g.origin, part.name)
        for g in groups
        for r in g.rollouts
        for part in r.parts
        if part.value is not None
    }
    assert applied == {("easy", "EASY/easily"), ("fresh", "toy_task/share")}


AGAIN = {"mode": "completions"}
WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"data": {"replay": {"at_temperature_floor": True}}}, "sampler.temperature_schedule"),
    ({"data": {"replay": AGAIN}, "run": {"keep_tokens": False}}, "run.keep_tokens is false"),
    ({"data": {"replay": AGAIN}, "algorithm": {"importance_sampling_correction": "none"}}, "earlier policy"),
    ({"data": {"replay": {"capacity": 100}}}, "warmup_entries is 500.* capacity is 100"),
    ({"data": {"replay": {}}}, r"warmup_entries is 500.* prompts is \d+"),
    ({"data": {"replay": {"max_share": 0.4}}}, "max_share is 0.4"),
    ({"sampler": {"temperature": 0.7, "temperature_schedule": {}}}, "temperature_schedule"),
    ({"sampler": {"temperature_schedule": {"high_temperature_every": None, "high_temperature": 1.5}}}, "high_temperature_every is null"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "said"), WITHOUT_EFFECT)
def test_settings_of_selection_without_effect_are_refused(tmp_path, sections, said):
    settings = config(tmp_path)
    for name, keys in sections.items():
        settings[name] = {**settings.get(name, {}), **keys}
    with pytest.raises(ConfigError, match=said):
        groupwise.rl(settings, TOY, dry_run=True)


UNKNOWN_PARTS = {
    "data.replay.success_part": {
        "data": {"replay": {"success_part": "nosuch", "warmup_entries": 1}}
    },
    "data.curriculum.success_part": {"data": {"curriculum": {"success_part": "nosuch"}}},
    "eval.success_part": {"eval": {"success_part": "nosuch", "before_and_after": False}},
    "signals.accuracy_part": {"signals": {"accuracy_part": "nosuch"}},
    "success_cache: part": {
        "data": {"replay": {"success_threshold": None, "warmup_entries": 1}},
        "callbacks": [{"name": "success_cache", "part": "nosuch"}],
    },
}


@pytest.mark.parametrize("key", UNKNOWN_PARTS)
def test_a_part_that_would_never_be_solved_is_refused_before_the_model_is_loaded(tmp_path, key):
    with pytest.raises(TaskError, match=rf"{key} is 'nosuch'.* share"):
        groupwise.rl({**config(tmp_path), **UNKNOWN_PARTS[key]}, TOY, dry_run=True)


def test_a_buffer_that_cannot_tell_examples_apart_is_refused(tmp_path):
    given = {**config(tmp_path), "rollout": {"type": "environment"}}
    given["data"] = {"replay": {"warmup_entries": 1}}
    with pytest.raises(ConfigError, match="all 703"):
        groupwise.rl(given, "wordle_game", dry_run=True)
