"""The reinforcement-learning loop: draw examples, sample groups, score them, compute advantages, update, publish, record.

    for each step:
        groups = schedule.next      draw examples in their order, sample and score all groups concurrently
        take_step(groups)           credits → rows → updates → publish → record → at intervals a checkpoint

`train` calls both. If you already have scored groups, call `take_step` directly. Every completion contains the version and fingerprint of
the weights that sampled it, and the loop stops if these are not the ones that the schedule prescribes.

The examples of a draw and all random numbers follow from the config's seed and the number of the draw. So the complete state of a run is
its weights, the optimiser's state and its position (`Run.state`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from groupwise.engine.learner.schedule import learning_rate
from groupwise.runs.advice import SOLVED, WITHOUT_SIGNAL, advice_on
from groupwise.training.loops.group_sampling import load_policy, release_sampler_memory
from groupwise.training.loops.held_out import evaluate_if_due
from groupwise.training.loops.learning import learn, with_learner_results
from groupwise.training.loops.metrics import Timings
from groupwise.training.loops.profiling import profile_step
from groupwise.training.loops.recording import check_something_scored, commit
from groupwise.training.loops.run import Run, StepBatch, TaskRun
from groupwise.training.loops.schedules import make_schedule, show_sampling
from groupwise.training.loops.training import save_checkpoint

EARLY_WARNING_STEP = 5
"""Number of steps after which a run warns if its metrics suggest that the reward cannot rise."""
EARLY_WARNING_METRICS = (WITHOUT_SIGNAL, SOLVED, "rollouts/unscored", "entropy")
"""Metrics that may show why a reward does not rise: groups without signal, no correct answers, rollouts without a reward, low entropy."""


async def train(run: TaskRun) -> None:
    """Take all remaining steps. Raises `Interrupted` when asked to end, and `RunError` if the run cannot continue."""
    run.schedule = make_schedule(run)
    try:
        while await evaluate_and_continue(run):
            await run.callbacks.step_begins()
            started_at = time.perf_counter()
            run.timings = Timings()
            show_sampling(run)
            with profile_step(run):
                batch = await run.interruption.allow(run.schedule.next())
                await take_step(run, batch, started_at)
            if run.step == EARLY_WARNING_STEP < run.max_steps:
                warn_early(run)
            if run.callbacks.save_was_asked() or run.step % run.config.run.save_steps == 0:
                await save_checkpoint(run)
                await run.callbacks.announce_checkpoint()
    finally:
        await run.schedule.close()


def warn_early(run: TaskRun) -> None:
    """Warn of anything that keeps the reward from rising, so that users need not wait for the end of a futile run."""
    for advice in advice_on(run.folder.store):
        if advice["metric"] in EARLY_WARNING_METRICS:
            run.say(f"warning: after {run.step} steps: {advice['says']} {advice['do']}")


async def evaluate_and_continue(run: TaskRun) -> bool:
    """Evaluate if that is due. Returns whether there is another step to take."""
    await evaluate_if_due(run)
    return not run.over


async def take_step(
    run: Run, batch: StepBatch, started_at: float, rate: float | None = None
) -> Mapping[str, float]:
    """Learn from scored groups, publish the weights, and commit the step with its record atomically. Returns the step's metrics.

    `rate` is the learning rate; None: that of the run's schedule at this step.
    """
    run.timings.set_sampling(batch.sampling, batch.scoring, batch.sampled_tokens)
    await run.callbacks.groups_scored(batch.groups, batch.rejected)
    policy_in = run.policy
    credits = run.algorithm.credits(batch.groups)
    if rate is None:
        rate = learning_rate(run.step, run.max_steps, run.config.training)
    await release_sampler_memory(run)
    result = await learn(run, batch.groups, credits, rate)
    if result.changed:
        await publish(run, policy_in.version + 1)
    groups = with_learner_results(batch.groups, credits, result)
    check_something_scored(run, groups)
    run.timings.step = time.perf_counter() - started_at
    metrics = commit(run, replace(batch, groups=groups), policy_in, rate, result.metrics)
    await run.callbacks.step_committed(metrics)
    return metrics


async def publish(run: Run, version: int) -> None:
    """Publish the learner's weights and load them into the sampler."""
    run.policy = await run.learner.publish(version)
    await load_policy(run, run.policy)
