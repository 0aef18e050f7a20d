"""What a run leaves behind when it ends: the final weights, the curve, and a summary."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from groupwise.display.plot import svg_curve, with_mean
from groupwise.loops.evaluate import EvalResult
from groupwise.loops.prepare import Prepared
from groupwise.loops.run import Run
from groupwise.loops.statistics import Interval, paired_difference
from groupwise.runs import durable, find


def write_final(run: Run, folder: Path) -> None:
    """The published weights and the tokenizer, as transformers, peft and vLLM load them."""
    shutil.copytree(run.policy.path, folder, dirs_exist_ok=True)
    run.tokenizer.save_pretrained(folder)


def write_curve(run: Run) -> None:
    """`reward.svg`, the reward of every step."""
    points = run.folder.store.metrics(["reward"]).get("reward", [])
    if points:
        drawn = svg_curve(with_mean("reward", points), title=f"{run.folder.name}: reward")
        durable.write_file(run.folder.curve, drawn.encode())


def summarise(
    run: Run,
    prepared: Prepared,
    started: float,
    before: EvalResult | None,
    after: EvalResult | None,
) -> dict[str, Any]:
    """What a run amounts to, in a few lines."""
    rewards = [value for _, value in run.folder.store.metrics(["reward"]).get("reward", [])]
    first, last = find.reward_ends(rewards)
    summary: dict[str, Any] = {
        "run": run.folder.name,
        "folder": str(run.folder.path),
        "task": prepared.task.name,
        "steps": run.step,
        "max_steps": run.max_steps,
        "policy": f"{run.folder.name}@{run.step}",
        "fingerprint": run.policy.fingerprint,
        "seconds": round(time.perf_counter() - started, 1),
    }
    if first is not None:
        summary |= {"reward_first": first, "reward_last": last}
    if before and after:
        summary["held_out"] = compared(before, after)
    return summary


def compared(before: EvalResult, after: EvalResult) -> dict[str, Any]:
    """Held-out metrics before and after, and the paired difference of the rewards with its 95 % interval."""
    first, last = before.rewards, after.rewards
    both = sorted(first.keys() & last.keys())
    change = paired_difference([first[key] for key in both], [last[key] for key in both])
    names = [name for name in after.metrics if name in before.metrics]
    return {
        "prompts": len(both),
        "change": _as_dict(change),
        "rises": change.low > 0,
        "before": {name: _measured(before, name) for name in names},
        "after": {name: _measured(after, name) for name in names},
    }


def _measured(result: EvalResult, name: str) -> dict[str, float]:
    """A metric, with its 95 % interval where it has one."""
    if name in result.judged:
        return _as_dict(result.interval(name))
    return {"value": result.metrics[name]}


def _as_dict(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}
