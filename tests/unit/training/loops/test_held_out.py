"""Reward hacking that held-out evaluations show, in a run whose record of training rewards and evaluations is written by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.runs.records import EvaluationRecord, StepRecord, WarningRecord
from groupwise.runs.store import Store
from groupwise.tasks.data.reward_hacking import Signals
from groupwise.tasks.data.reward_hacking_detectors import SignalsConfig
from groupwise.training.callbacks.base import Callbacks
from groupwise.training.evaluation.evaluate import EvalResult
from groupwise.training.loops.held_out import HELD_OUT_KEY, announce

PROMPTS = 8


class HeldOutRun:
    """A run whose steps have a given training reward, and whose evaluations solve a given number of eight prompts."""

    def __init__(self, store: Store, **config: Any) -> None:
        self.store = store
        self.warnings: list[WarningRecord] = []
        self.messages: list[str] = []
        self.run: Any = SimpleNamespace(
            signals=Signals(SignalsConfig(**config)),
            folder=SimpleNamespace(store=store),
            callbacks=Callbacks(),
            step=0,
            warn=self.warnings.append,
            say=self.messages.append,
        )
        store.set_meta({HELD_OUT_KEY: "these"})

    def steps(self, *rewards: float, name: str = "reward") -> None:
        for reward in rewards:
            step = StepRecord(self.run.step, 0, 0, "", (), 0.1, 0.0)
            self.store.commit_step(step, [], {name: reward})
            self.run.step += 1

    def add_evaluation(self, solved: int, asked: str = "these", **parts: int) -> EvaluationRecord:
        """Add an evaluation; `parts` are how many prompts earn 1 by each."""
        rows = [
            {
                "example": n,
                "key": str(n),
                "reward": float(n < solved),
                "outcome": "scored",
                "parts": {name: float(n < count) for name, count in parts.items()},
            }
            for n in range(PROMPTS)
        ]
        metrics = {"reward": solved / PROMPTS}
        metrics |= {f"rewards/{name}/mean": count / PROMPTS for name, count in parts.items()}
        step = self.run.step
        record = EvaluationRecord(step, f"step-{step}", f"r@{step}", metrics, rows, asked)
        self.store.add_evaluation(record)
        return record

    async def evaluate(self, solved: int, **more: Any) -> None:
        """Add an evaluation and announce it, as the loop does."""
        record = self.add_evaluation(solved, **more)
        await self.announce(record)

    async def announce(self, record: EvaluationRecord) -> None:
        result = EvalResult(record.policy, dict(record.metrics), {}, [dict(r) for r in record.rows])
        await announce(self.run, record.name, result)


RISING = [n / 10 for n in range(9)]


@pytest.fixture
def store(tmp_path: Path):
    with Store.create(tmp_path / "run.db") as opened:
        yield opened


async def test_held_out_prompts_that_do_worse_while_the_reward_rises(store):
    run = HeldOutRun(store)
    await run.evaluate(2)
    run.steps(*RISING)
    await run.evaluate(8)
    run.steps(*RISING)
    await run.evaluate(2)
    (warning,) = run.warnings
    assert (warning.step, warning.name, warning.kind) == (18, "held_out", "begins")
    assert "(best reward 1, last reward 0.25, reward then 0.1, reward now 0.7)" in warning.message
    assert store.warnings() == [warning]
    run.steps(*RISING)
    await run.evaluate(2)
    assert run.warnings == [warning], "warned once"
    run.steps(*RISING)
    await run.evaluate(8)
    assert [each.kind for each in run.warnings] == ["begins", "ends"]
    assert store.warnings() == run.warnings


@pytest.mark.parametrize("rewards", [RISING[::-1], [0.5] * 9], ids=["falling", "flat"])
async def test_a_fall_without_a_rise_is_no_hack(store, rewards):
    run = HeldOutRun(store)
    await run.evaluate(8)
    run.steps(*rewards)
    await run.evaluate(2)
    assert run.warnings == []


async def test_an_evaluation_that_a_resume_finds_says_what_it_said(store):
    run = HeldOutRun(store)
    await run.evaluate(8)
    run.steps(*RISING)
    record = run.add_evaluation(2)
    await run.announce(record)
    said = store.warnings()
    await run.announce(record)
    assert store.warnings() == said
    assert len(run.warnings) == 1
    resumed = HeldOutRun(store)
    resumed.run.step = 9
    await resumed.announce(record)
    assert (store.warnings(), resumed.warnings) == (said, []), "it is in the record"


@pytest.mark.parametrize("part", ["my_accuracy", "correct", "math_answer"])
async def test_the_part_that_says_whether_a_task_is_solved_counts(store, part):
    """The held-out reward itself may be hacked as well."""
    run = HeldOutRun(store)
    await run.evaluate(2, form=2, **{part: 8})
    run.steps(*RISING)
    await run.evaluate(8, form=8, **{part: 2})
    assert [w.values[f"best rewards/{part}/mean"] for w in run.warnings] == [1.0]
    other = HeldOutRun(store, held_out_metric="reward")
    other.run.step = 9
    await other.announce(store.evaluations()[-1])
    assert store.warnings() == [], "another metric says otherwise"


async def test_evaluations_that_asked_something_else_do_not_compare(store):
    run = HeldOutRun(store)
    await run.evaluate(8, asked="others")
    run.steps(*RISING)
    await run.evaluate(2)
    assert run.warnings == []


async def test_rewards_of_chosen_examples_do_not_count_as_a_rise(store):
    run = HeldOutRun(store)
    await run.evaluate(8)
    for reward in RISING:
        step = StepRecord(run.run.step, 0, 0, "", (), 0.1, 0.0)
        store.commit_step(step, [], {"reward": reward, "reward/fresh": 0.5})
        run.run.step += 1
    await run.evaluate(2)
    assert run.warnings == []
