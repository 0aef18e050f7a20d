"""How a training run ends, whatever it learns from: the curve, a summary, the state of its folder, and the word to its callbacks."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

from groupwise.callbacks.base import RunEnd
from groupwise.display.plot import svg_curve, with_mean
from groupwise.errors import StoreError
from groupwise.loops.prepare import Prepared
from groupwise.loops.training import Training
from groupwise.runs import durable, find

logger = logging.getLogger(__name__)


def write_curve(run: Training, metric: str) -> None:
    """`reward.svg` or `loss.svg`: the metric of every step."""
    points = run.folder.store.metrics([metric]).get(metric, [])
    if points:
        drawn = svg_curve(with_mean(metric, points), title=f"{run.folder.name}: {metric}")
        durable.write_file(run.folder.path / f"{metric}.svg", drawn.encode())


def summarise(run: Training, prepared: Prepared, started: float) -> dict[str, Any]:
    """What every run amounts to, in a few lines. `started` is by `time.perf_counter`."""
    published = {"fingerprint": run.policy.fingerprint} if run.policy.fingerprint else {}
    return {
        "run": run.folder.name,
        "folder": str(run.folder.path),
        "task": prepared.task.name,
        "steps": run.step,
        "max_steps": run.max_steps,
        "policy": f"{run.folder.name}@{run.step}",
        **published,
        "seconds": round(time.perf_counter() - started, 1),
    }


def first_and_last(run: Training, metric: str) -> tuple[float | None, float | None]:
    """A metric at the beginning of the run and at its end, as `groupwise.runs.find.reward_ends` has it."""
    points = run.folder.store.metrics([metric]).get(metric, [])
    return find.reward_ends([value for _, value in points])


def ended_early(run: Training) -> dict[str, Any]:
    """For the summary: which callback ended the run before its last step, and why."""
    stop = run.callbacks.stop
    if stop is None or run.step >= run.max_steps:
        return {}
    why = f": {stop.reason}" if stop.reason else ""
    run.say(f"ended after {run.step} of {run.max_steps} steps by the callback {stop.by}{why}")
    return {"stopped": asdict(stop)}


async def end(
    run: Training, state: Literal["finished", "interrupted"], summary: dict[str, Any]
) -> dict[str, Any]:
    """Record how the run ended, and tell the callbacks and whoever watches. Returns the summary with the state."""
    run.folder.finish(state, summary)
    await run.callbacks.end(RunEnd(state, summary))
    if state == "finished":
        logger.info("finished after %d steps", run.step)
    else:
        run.say(f"interrupted after {run.step} steps; the same command with --resume goes on")
    return {**summary, "state": state}


async def failed(run: Training, error: BaseException) -> None:
    """Tell the callbacks, once the folder says so. Ctrl-C twice ends the run at once and does not wait for them."""
    if isinstance(error, Exception):
        with suppress(StoreError):
            run.folder.finish("failed", error=error)
        await run.callbacks.end(RunEnd("failed", {}, str(error)))
