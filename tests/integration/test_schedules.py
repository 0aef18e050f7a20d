"""Schedules, seen from outside, on real runs of the tiny model:

1. lag 0 equals a loop that draws, scores and learns in turns, bit for bit;
2. with a lag of s, the groups of step n come from the policy after max(0, n − s) steps;
3. a lagged run resumes bit-equal after a clean stop and after a crash at any durable write;
4. the free schedule trains every draw once, none older than its bound, slow ones too, also over a crash.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.core import atomic_files
from groupwise.runs.records import StepRecord
from groupwise.runs.store import Store
from groupwise.training.loops import group_sampling
from groupwise.training.loops import rl as loop
from groupwise.training.loops.run import StepBatch
from tests.integration.toy_run import STEPS, TOY, config, crash_at, go_on, what_must_be_equal
from tests.rotation import turn

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
STEPPED = str(Path(__file__).with_name("stepped_task.py"))


def trained(runs: Path, **training: Any) -> Path:
    assert groupwise.rl(config(runs, **training), TOY).exit_code == 0
    return runs / "toy"


def steps(folder: Path) -> list[tuple[StepRecord, list[int]]]:
    """Each step with the ages of its rollouts, in steps."""
    with Store.open(folder / "run.db", readonly=True) as store:
        records = store.steps()
        before = {record.version_in: record.step for record in reversed(records)}
        return [
            (
                record,
                [
                    record.step - before[segment.policy_version]
                    for group in store.groups(record.step)
                    for rollout in group.rollouts
                    for segment in rollout.segments
                    if segment.policy_version is not None
                ],
            )
            for record in records
        ]


class InTurns:
    """The loop without a schedule: one group after the other, nothing ahead."""

    outstanding = ()

    def __init__(self, run: Any) -> None:
        self.run = run

    @property
    def next_draw(self) -> int:
        return self.run.step * self.run.config.training.prompts_per_step

    async def next(self) -> StepBatch:
        size = self.run.config.training.prompts_per_step
        step, selection = self.run.step, self.run.selection
        selection.plan(step, step, size)
        groups = []
        for slot in range(size):
            draw = self.next_draw + slot
            choice = selection.take(step, slot, draw)
            group = await group_sampling.sample(self.run, draw, choice, step)
            groups.append(await group_sampling.score(self.run, group, step))
        return StepBatch(groups)

    def committed(self, drawn: StepBatch) -> None:
        self.run.selection.finish(self.run.step, len(drawn.all))

    async def settle(self) -> None: ...

    async def close(self) -> None: ...


def test_lag_0_equals_taking_turns(whole_toy, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(loop, "make_schedule", InTurns)
    assert what_must_be_equal(trained(tmp_path)) == whole_toy.equal


@pytest.mark.parametrize("lag", [0, 2, 7])
def test_the_groups_of_a_step_come_from_the_policy_that_the_lag_says(tmp_path, lag):
    """And their rewards are told the step that they are drawn for."""
    assert groupwise.rl(config(tmp_path, max_off_policy_steps=lag), STEPPED).exit_code == 0
    for record, ages in steps(tmp_path / "toy"):
        assert set(ages) == {min(record.step, lag)}
    with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
        for step in range(STEPS):
            for group in store.groups(step):
                assert {p.value for r in group.rollouts for p in r.parts[1:]} == {
                    step / 20
                }  # of 40 rows, 2 in a step


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.soak(suite="kills"))])
def lagged(request, tmp_path_factory):
    runs = tmp_path_factory.mktemp(f"lag{request.param}")
    torch.set_num_threads(1)
    points: list[str] = []
    atomic_files.on_write = points.append
    try:
        folder = trained(runs, max_off_policy_steps=request.param)
    finally:
        atomic_files.on_write = lambda name: None
    return request.param, what_must_be_equal(folder), points


def test_a_lagged_run_stops_cleanly_and_continues(lagged, tmp_path, monkeypatch):
    lag, whole, _ = lagged
    commit = loop.commit

    def stop(run, *arguments):
        commit(run, *arguments)
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "commit", stop)
        assert groupwise.rl(config(tmp_path, max_off_policy_steps=lag), TOY).exit_code == 130
    assert groupwise.rl(config(tmp_path, max_off_policy_steps=lag), TOY, resume=True).exit_code == 0
    resumed = what_must_be_equal(tmp_path / "toy")
    assert resumed["record"] == whole["record"]
    final = "final/adapter_model.safetensors"
    assert resumed["files"][final] == whole["files"][final]


@pytest.mark.timeout(400)
def test_a_lagged_run_survives_a_crash_at_its_durable_writes(lagged, tmp_path):
    """A few points here, others with each lag and commit; `make soak SUITE=kills` has them all."""
    lag, whole, points = lagged
    chosen = range((turn() + 15 * lag) % 40, len(points), 40)
    failed = [
        f"{number} {points[number]}"
        for number in chosen
        if crashed_and_resumed(config(tmp_path / str(number), max_off_policy_steps=lag), number)
        != whole
    ]
    assert not failed


def crashed_and_resumed(settings: dict[str, Any], number: int) -> dict[str, Any]:
    assert crash_at(number, lambda: start(settings)) == 17
    go_on(settings)
    return what_must_be_equal(Path(settings["run"]["dir"]) / "toy")


def start(settings: dict[str, Any]) -> None:
    groupwise.rl(settings, TOY)


@pytest.fixture
def slow_rewards(monkeypatch):
    """Each group's rewards take another number of turns of the event loop; some take very long."""
    score = group_sampling.score
    dice = random.Random(5)

    async def slow(run, group, step):
        for _ in range(dice.choice([0, 5, 50, 500])):
            await asyncio.sleep(0)
        return await score(run, group, step)

    monkeypatch.setattr(group_sampling, "score", slow)


def test_the_free_schedule_loses_no_group_even_over_crashes(tmp_path, slow_rewards):
    settings = config(tmp_path, schedule="free", max_off_policy_steps=2, max_steps=8)
    assert crash_at(40, lambda: start(settings)) == 17
    assert crash_at(18, lambda: go_on(settings)) == 17
    go_on(settings)
    found = steps(tmp_path / "toy")
    draws = [draw for record, _ in found for draw in record.draws]
    assert sorted(draws) == list(range(16))
    assert draws != sorted(draws), "slow groups held up the others"
    assert max(age for _, ages in found for age in ages) <= 2
    assert all(len(record.draws) == 2 for record, _ in found)
