"""Writes a step into the run's record and warns about problems of the step."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from statistics import fmean

from groupwise.core.errors import NothingScoredError
from groupwise.core.types import Group, Policy
from groupwise.runs.advice import SOLVED
from groupwise.runs.records import StepRecord
from groupwise.tasks.rollouts.config import TURNS
from groupwise.training.evaluation.evaluate import success_of
from groupwise.training.loops.metrics import failure_reasons, group_metrics, timing_metrics
from groupwise.training.loops.run import Run, StepBatch

logger = logging.getLogger(__name__)

MAX_GAP = 0.15
"""Mean difference of log-probabilities (nats per token) between sampler and learner above which a warning is logged.

In bfloat16, 0.02 is usual with the native engines and 0.04 with transformers' modules.
"""

_WRONG_CODE = re.compile(
    r"^[ \t]*(Type|Attribute|Name|UnboundLocal|Key|Index|Import|ModuleNotFound|Syntax|Indentation|NotImplemented)Error\b",
    re.MULTILINE,
)
"""In the reason of a failed rollout: its code is wrong, and would fail again. Others, such as a service that is away, may pass."""


def commit(
    run: Run, batch: StepBatch, policy_in: Policy, rate: float, learner_metrics: Mapping[str, float]
) -> dict[str, float]:
    """Commit the step with its rollouts and metrics in one transaction, and advance the run. Returns the metrics."""
    run.tokens_seen += sum(
        len(rollout.prompt_ids) + len(rollout.completion_ids)
        for group in batch.all
        for rollout in group.rollouts
    )
    run.observe(batch.all)
    signals, warnings = {}, ()
    if run.signals is not None:
        observation = run.signals.observe(batch.all, run.step, learner_metrics.get("entropy"))
        signals, warnings = observation.metrics, observation.warnings
    metrics = {
        **_drawn_metrics(run, batch, policy_in),
        **run.data_metrics(batch.groups),
        **learner_metrics,
        **signals,
        "learning_rate": rate,
        "num_tokens": float(run.tokens_seen),
        **timing_metrics(run.timings),
    }
    record = StepRecord(
        step=run.step,
        version_in=policy_in.version,
        version_out=run.policy.version,
        fingerprint_out=run.policy.fingerprint,
        draws=tuple(group.draw for group in batch.groups),
        rejected=tuple(group.draw for group in batch.rejected),
        learning_rate=rate,
        finished_at=time.time(),
    )
    run.folder.store.commit_step(record, batch.all, metrics, warnings)
    for group in batch.all:
        run.uncommitted_groups.pop(group.draw, None)
    run.progress.step(run.step, metrics, batch.groups)
    logger.info(
        "step %d/%d: reward %.4g, version %d",
        run.step + 1,
        run.max_steps,
        metrics.get("reward", math.nan),
        run.policy.version,
    )
    run.committed(batch)
    for warning in warnings:
        run.warn(warning)
    _warn_of_step(run, batch.all, metrics)
    # Prepare the next step: adapt the KL coefficient, and keep the policies that the schedule still needs.
    run.adapt(metrics)
    run.recent_policies[run.step] = policy_in
    run.step += 1
    first_step = run.step - run.kept_policies
    run.recent_policies = {
        step: policy for step, policy in run.recent_policies.items() if step >= first_step
    }
    return metrics


def check_something_scored(run: Run, groups: Sequence[Group]) -> None:
    """Raise NothingScoredError after too many steps in a row without any scored rollout; in a shorter run, after all its steps."""
    if any(group.scored for group in groups):
        run.unscored_steps, run.unscored_reasons = 0, []
        return
    run.unscored_steps += 1
    run.unscored_reasons = failure_reasons(groups)
    for reason in run.unscored_reasons:
        logger.warning("step %d: no rollout was scored: %s", run.step + 1, reason)
    limit = run.unscored_limit
    if limit is not None and run.unscored_steps >= min(limit, run.max_steps):
        last = run.step + 1  # not counted as done
        steps = (
            f"step {last}"
            if run.unscored_steps == 1
            else f"{run.unscored_steps} steps in a row, up to step {last}"
        )
        # A rollout without `ended_by` was failed by its environment.
        endings = {rollout.ended_by is None for group in groups for rollout in group.rollouts}
        names = {True: "the environment", False: "the reward functions"}
        if run.config.rollout.type not in TURNS:
            endings = {False}
        culprits = " and ".join(names[kind] for kind in sorted(endings, reverse=True))
        why = "rewards.max_unscored_steps" if run.unscored_steps >= limit else "the whole run"
        raise NothingScoredError(
            f"No rollout could be scored in {steps} ({why}). Fix {culprits}, then start the run again; in a terminal, --resume continues "
            "it from its last checkpoint. In the last step:\n  "
            + "\n  ".join(
                run.unscored_reasons
            ),  # last, because a fleet quotes the last line of the log
            wrong_code=all(map(_WRONG_CODE.search, run.unscored_reasons or [""])),
        )


def _warn_of_step(run: Run, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
    """Warn once each about a large difference between sampler and learner, and about a task that gives no reward."""
    # Both should give a token nearly the same probability; a large difference means that they compute different policies.
    gap = metrics.get("sampling/logprob_gap", 0.0)
    is_off_policy = (
        run.config.training.max_off_policy_steps > 0 or run.config.training.updates_per_step > 1
    )
    if gap > MAX_GAP and not run.gap_warned and not is_off_policy:
        run.gap_warned = True
        logger.warning(
            "step %d: sampler and learner differ by %.2g nats per token on average (expected: at most %.2g). The ratio "
            "corrects for it, but look for its cause: lora.dropout, a model that computes differently in batches, or experts that the two "
            "choose differently (sampler.routing_replay)",
            run.step + 1,
            gap,
            MAX_GAP,
        )
    # Rollouts without a reward count as 0, so a task that forgot its rewards looks like one that is never solved.
    if run.unrewarded and any(group.scored for group in groups):
        run.unrewarded = False
        logger.warning(
            "step %d: no environment gave any reward, and the task has no get_reward_funcs, so every rollout counts as 0 and "
            "nothing is learnt. Return Step(reward=...), or add a method `reward` or the hook; groupwise check looks at it",
            run.step + 1,
        )


def _drawn_metrics(run: Run, batch: StepBatch, policy_in: Policy) -> dict[str, float]:
    """Metrics of all groups that were drawn for a step, including the rejected ones, and of the sampling settings."""
    metrics = group_metrics(batch.all)
    if batch.rejected:
        metrics["rollouts/rejected_groups"] = float(len(batch.rejected))
    ages = [
        policy_in.version - segment.policy_version
        for group in batch.groups
        for rollout in group.rollouts
        for segment in rollout.segments
        if segment.policy_version is not None
    ]
    if any(ages):
        metrics["sampling/staleness"] = fmean(ages)
    if run.config.sampler.routing_replay:
        metrics["sampling/routing_lost"] = float(
            sum(
                segment.source == "policy" and segment.routed_experts is None
                for group in batch.groups
                for rollout in group.rollouts
                for segment in rollout.segments
            )
        )
    success = success_of(run.config)
    verdicts = [success.judge(rollout) for group in batch.all for rollout in group.rollouts]
    if known_verdicts := [verdict for verdict in verdicts if verdict is not None]:
        metrics[SOLVED] = fmean(known_verdicts)
    if run.config.sampler.temperature_schedule is not None:
        metrics["sampling/temperature"] = run.config.sampler.temperature_at(run.step)
    knobs = run.algorithm.loss_spec().knobs
    if knobs.get("kl_target") is not None:
        metrics["beta"] = knobs["beta"]
    return metrics
