"""Compares two evaluations of the same prompts, such as before and after a training."""

from __future__ import annotations

from typing import Any

from groupwise.training.evaluation.evaluate import EvalResult
from groupwise.training.evaluation.statistics import Interval, paired_difference


def compared(
    before: EvalResult, after: EvalResult, untrained: EvalResult | None = None
) -> dict[str, Any]:
    """Held-out metrics before and after, and the paired difference of the rewards with its 95 % interval.

    `untrained` is the result of the base model, if the run began from a warm-up.
    """
    first, last = before.rewards, after.rewards
    both = sorted(first.keys() & last.keys())
    change = paired_difference([first[key] for key in both], [last[key] for key in both])
    all_of_them = [before, after, *([untrained] if untrained else [])]
    names = [name for name in after.metrics if all(name in each.metrics for each in all_of_them)]
    return {
        "prompts": len(both),
        "change": _as_dict(change),
        "rises": change.low > 0,
        **({"base": {name: _measured(untrained, name) for name in names}} if untrained else {}),
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
