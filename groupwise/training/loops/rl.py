"""THE LOOP: draw examples, sample groups, score them, give credit, make rows, update, publish, record.

    for each step:
        groups = schedule.next      examples drawn by their order, sampled and scored, all groups at once
        take_step(groups)           weights → rows → updates → publish → record → now and then a checkpoint

The runner here calls both; a caller that has groups from elsewhere calls `take_step` alone. Every completion names the version and
fingerprint of the weights that drew it, and the loop stops if they are others than the schedule says.

Which examples a draw gets, and every random number, follow from the config's seed and the number of the draw, so the whole state of
a run is its weights, the optimiser's, and where it stands (`Run.position`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from groupwise.engine.learner.schedule import learning_rate
from groupwise.runs.advice import SOLVED, WITHOUT_SIGNAL, advice_on
from groupwise.training.loops.drawing import serve
from groupwise.training.loops.held_out import evaluate_now_and_then
from groupwise.training.loops.learning import learn, noted
from groupwise.training.loops.metrics import Timings
from groupwise.training.loops.profiling import profiled
from groupwise.training.loops.recording import check_something_scored, commit
from groupwise.training.loops.run import Run, StepBatch, TaskRun
from groupwise.training.loops.schedules import make_schedule
from groupwise.training.loops.training import save_checkpoint

WARNED_AFTER = 5
"""Steps after which a run says what keeps its reward from rising."""
WARNED_ABOUT = (WITHOUT_SIGNAL, SOLVED, "rollouts/unscored", "entropy")
"""Metrics of what may keep a reward from rising: groups without signal, nothing right, rollouts without a reward, a policy without
choice."""


async def train(run: TaskRun) -> None:
    """Take all steps that are left. Raises `Interrupted` when asked to end, and `RunError` when the run cannot go on."""
    run.schedule = make_schedule(run)
    try:
        while await evaluate_and_continue(run):
            await run.callbacks.step_begins()
            started = time.perf_counter()
            run.timings = Timings()
            with profiled(run):
                batch = await run.interruption.allow(run.schedule.next())
                await take_step(run, batch, started)
            if run.step == WARNED_AFTER < run.max_steps:
                warn_early(run)
            if run.callbacks.save_was_asked() or run.step % run.config.run.save_steps == 0:
                save_checkpoint(run)
                await run.callbacks.saved()
    finally:
        await run.schedule.close()


def warn_early(run: TaskRun) -> None:
    """Say what keeps the reward from rising, so that users do not wait for the end of a run whose reward cannot rise."""
    for each in advice_on(run.folder.store):
        if each["metric"] in WARNED_ABOUT:
            run.say(f"warning: after {run.step} steps: {each['says']} {each['do']}")


async def evaluate_and_continue(run: TaskRun) -> bool:
    """Evaluate if that is due. Returns whether there is another step to take."""
    await evaluate_now_and_then(run)
    return not run.over


async def take_step(
    run: Run, batch: StepBatch, started: float, rate: float | None = None
) -> Mapping[str, float]:
    """Learn from scored groups, publish, and commit the step with its record as one unit. Returns the step's metrics.

    `rate` is the learning rate; None: that of the run's schedule at this step.
    """
    run.timings.drew(batch.sampling, batch.scoring, batch.sampled_tokens)
    await run.callbacks.groups_scored(batch.groups, batch.rejected)
    policy_in = run.policy
    weights = run.algorithm.weights(batch.groups)
    if rate is None:
        rate = learning_rate(run.step, run.max_steps, run.config.training)
    learned = await learn(run, batch.groups, weights, rate)
    if learned.changed:
        await publish(run, policy_in.version + 1)
    groups = noted(batch.groups, weights, learned)
    check_something_scored(run, groups)
    run.timings.step = time.perf_counter() - started
    metrics = commit(run, replace(batch, groups=groups), policy_in, rate, learned.metrics)
    await run.callbacks.step_committed(metrics)
    return metrics


async def publish(run: Run, version: int) -> None:
    """Hand the learner's weights to the sampler."""
    run.policy = await run.learner.publish(version)
    await serve(run, run.policy)
