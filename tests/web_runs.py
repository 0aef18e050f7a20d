"""Records for the dashboard's tests, written without a training: any number of steps, groups and texts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.core.types import Example, Group, RewardPart, Rollout, SamplingParams, Segment
from groupwise.runs.records import EvaluationRecord, StepRecord, WarningRecord
from groupwise.runs.store import Store

HOSTILE = (
    "<script>document.body.dataset.owned='yes'</script><img src=x onerror=\"document.body.dataset.owned='yes'\">"
    "\x1b[2J\x1b]0;owned\x07 {{ 7*7 }} \u202eevil\u202c \x00\x07 'quoted' \"double\" &amp; ﷽ \ud83d"
)
"""Text that must be shown verbatim and not be executed."""
Write = Callable[[int, int], str]
"""Returns the completion of a step's member."""


def plainly(step: int, member: int) -> str:
    return f"answer {member} of step {step}: it is {member * step}"


def task_of(draw: int) -> str:
    """The task of a draw: mostly the first, sometimes the second, rarely the third."""
    return "proofs" if draw % 5000 == 3 else "products" if draw % 7 < 2 else "sums"


def groups_of(step: int, write: Write, groups: int, members: int, examples: int = 7) -> list[Group]:
    """The groups of one step, made with a seed of its own."""
    dice = random.Random(step)
    made: list[Group] = []
    for draw in range(step * groups, (step + 1) * groups):
        columns = {"answer": str(draw), "task": task_of(draw)}
        example = Example(draw % examples, f"question {draw % examples}", columns)
        rollouts = (_rollout(draw, member, step, write, dice) for member in range(members))
        made.append(Group(draw, example, tuple(rollouts)))
    return made


def _rollout(draw: int, member: int, step: int, write: Write, dice: random.Random) -> Rollout:
    text = write(step, member)
    ids = tuple(ord(each) % 90 + 5 for each in text[:12])
    drawn = tuple(-dice.random() * 4 for _ in ids)
    ends = "length" if member == 1 else "stop"
    policy: Any = (step, f"weights-{step}", SamplingParams(16), member, ends)
    segment = Segment("policy", ids, drawn, *policy)
    known: Any = {"draw": draw, "member": member, "attempt": 0, "prompt_ids": (1, 2)}
    if member == 3:
        failed: Any = {"outcome": "failed", "reason": f"grader: {text[:40]}"}
        return Rollout(**known, segments=(segment,), completion=text, **failed)
    reward = round(dice.random(), 3)
    return Rollout(
        **known,
        segments=(replace(segment, learner_logprobs=_learnt(segment)),),
        completion=text,
        outcome="scored",
        reward=reward,
        parts=(RewardPart("correct", reward), RewardPart("brief", 1.0 - reward, 0.5)),
        advantage=reward - 0.5,
        notes={"found": text[:20]},
    )


def _learnt(segment: Segment) -> tuple[float, ...]:
    """Learner's log-probabilities after some updates: some tokens are more probable, others less."""
    drawn = segment.sampling_logprobs or ()
    return tuple(min(each + math.sin(17 * each) / 2, -0.001) for each in drawn)


def write_run(
    folder: Path,
    steps: int,
    *,
    write: Write = plainly,
    groups: int = 2,
    members: int = 4,
    state: str = "finished",
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """A run's folder, with a record, settings and a log."""
    folder.mkdir(parents=True)
    config = {"model": {"name": "tiny"}, "training": {"learning_rate": 0.01, "max_steps": steps}}
    (folder / "config.json").write_text(json.dumps({**config, "run": {"name": folder.name}}))
    (folder / "log.txt").write_text("it began\nit went on\n")
    with Store.create(folder / "run.db") as store:
        known = {"state": state, "created_at": 1.7e9, "model": "tiny", "task": "sums"}
        store.set_meta({**known, "max_steps": steps, **(facts or {})})
        for step in range(steps):
            add_step(store, step, write=write, groups=groups, members=members)
        if steps:
            for after, share in ((0, 0.2), (steps, 0.6)):
                store.add_evaluation(evaluation_of(folder.name, after, share))
    return folder


def add_step(
    store: Store,
    step: int,
    *,
    write: Write = plainly,
    groups: int = 2,
    members: int = 4,
    examples: int = 7,
) -> None:
    """Add the next step."""
    made = groups_of(step, write, groups, members, examples)
    scored = [r.reward for g in made for r in g.rollouts if r.reward is not None]
    metrics = {
        "reward": sum(scored) / len(scored), "reward_std": 0.2, "rewards/correct/mean": 0.5, "rewards/correct/std": 0.1,
        "frac_reward_zero_std": 0.9, "entropy": 2.0, "completions/mean_length": 12.0, "completions/clipped_ratio": 0.25,
        "rollouts/scored": float(len(scored)), "rollouts/failed": float(groups), "rollouts/timed_out": 0.0,
        "time/sampling": 1.0, "time/learning": 2.0, "time/step": 3.0, "own/number": float(step),
    }  # fmt: skip
    warning = WarningRecord(step + 1, "length", "begins", "longer than before")
    draws = tuple(each.draw for each in made)
    record = StepRecord(step, step, step + 1, f"w{step}", draws, 0.01, 1.7e9 + step)
    store.commit_step(record, made, metrics, [warning] if step == 1 else [])


def evaluation_of(run: str, step: int, share: float) -> EvaluationRecord:
    """An evaluation after `step` steps, of ten prompts of which this share was solved."""
    rows = [
        {
            "example": n, "sample": 0, "prompt": f"question {n}", "completion": f"answer {n} after {step}", "outcome": "scored",
            "reward": float(n < share * 10), "parts": {"correct": float(n < share * 10)}, "tokens": 5, "truncated": False,
            "key": f"k{n}", "answer": None, "success": n < share * 10,
        }
        for n in range(10)
    ]  # fmt: skip
    metrics = {"reward": share, "pass@1": share, "pass@4": min(1.0, share + 0.2)}
    return EvaluationRecord(step, "held-out", f"{run}@{step}", metrics, rows, "asked")
