"""Evaluates the current policy on held-out prompts during a run, and records the results.

The seeds depend only on prompt and sample, and the random state of training is not changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from groupwise.core.errors import RewardWorkerError
from groupwise.core.terminal.quantities import counted
from groupwise.runs.records import EvaluationRecord
from groupwise.tasks.data.divergence import HeldOutDrop, divergence
from groupwise.tasks.data.reward_hacking import change
from groupwise.tasks.data.reward_hacking_detectors import Finding, SignalsConfig
from groupwise.tasks.data.success import part_of_success
from groupwise.training.evaluation.evaluate import EvalResult, answer_held_out
from groupwise.training.evaluation.measures import REWARD, measure
from groupwise.training.loops.run import TaskRun

logger = logging.getLogger(__name__)

HELD_OUT_KEY = "held_out"
"""The run's fact with the fingerprint of its evaluations: their prompts and sampling options."""
PART, MEAN = "rewards/", "/mean"
"""Prefix and suffix around a reward part's name in the metric of its mean."""
SIGNAL = "held_out"
"""Name of the reward-hacking signal that comes from evaluations."""


async def evaluate_if_due(run: TaskRun) -> None:
    """Evaluate every `eval.eval_steps` steps and when a callback asks for it."""
    if not _evaluation_due(run):
        return
    name = evaluation_name(run.step)
    result = recorded_evaluation(run, name, run.step)
    if result is None:
        await evaluate_held_out(run, name)
    else:
        await announce(run, name, result)


def evaluation_name(step: int) -> str:
    """The name of an evaluation during training."""
    return f"step-{step}"


def _evaluation_due(run: TaskRun) -> bool:
    """True if an evaluation is due. After the last step only on request, because the run ends with another evaluation."""
    is_requested = run.callbacks.evaluation_was_asked
    if is_requested and run.held_out is None:
        logger.warning(
            "a callback asked for an evaluation, but this run has no held-out prompts: that takes the task's "
            "get_eval_dataset, and eval.eval_steps or eval.before_and_after"
        )
        run.callbacks.give_up_evaluation()
    if run.over:
        return is_requested and not run.config.eval.before_and_after
    eval_steps = run.config.eval.eval_steps
    return is_requested or (eval_steps is not None and run.step > 0 and run.step % eval_steps == 0)


async def announce(run: TaskRun, name: str, result: EvalResult) -> None:
    """Pass an evaluation of the current policy to the callbacks, and warn if it shows reward hacking."""
    # The warning depends only on the record, so an evaluation that a resume finds there gives the
    # same one again.
    if run.signals is not None:
        store = run.folder.store
        evaluations = {
            e.step: e for e in store.evaluations(rows=False) if e.asked == _stored_questions(run)
        }
        if run.step in evaluations:
            # The metric's name can only be checked at the first evaluation.
            metric, metrics = run.signals.config.held_out_metric, evaluations[run.step].metrics
            if metric is not None and metric not in metrics and min(evaluations) == run.step:
                run.say(
                    f"warning: signals.held_out_metric is {metric}, which the evaluations do not have, so that nothing is compared. "
                    f"There are: {', '.join(metrics)}"
                )
            finding = _divergence(run, run.signals.config, evaluations)
            warnings_by_step = {warning.step: warning for warning in store.warnings(SIGNAL)}
            earlier_kinds = [
                warning.kind for step, warning in warnings_by_step.items() if step < run.step
            ]
            was_active = earlier_kinds[-1:] == ["begins"]
            new_warning = change(SIGNAL, finding, run.step, was=was_active) if finding else None
            if new_warning != warnings_by_step.get(run.step):
                store.set_warning(run.step, SIGNAL, new_warning)
                if new_warning is not None:
                    run.warn(new_warning)
    await run.callbacks.announce_evaluation(_evaluation_record(run, name, result))


def recorded_evaluation(run: TaskRun, name: str, step: int) -> EvalResult | None:
    """The recorded evaluation of that name and step, or None. It must have the held-out prompts and options that the run has now."""
    record = run.folder.store.evaluation(step, name)
    if record is None or record.asked not in ("", _stored_questions(run)):
        return None
    return EvalResult.from_record(record)


def notice_changed_questions(run: TaskRun, questions: str) -> None:
    """After a resume, record the fingerprint of the held-out prompts and options, and log if it changed."""
    stored = _stored_questions(run)
    if stored == questions:
        return
    run.folder.store.set_meta({HELD_OUT_KEY: questions})
    if stored and run.folder.store.evaluations(rows=False):
        run.say(
            "the held-out prompts, or how they are answered, were changed: evaluations do not compare with earlier ones, and "
            "the search for the best one starts again"
        )


def _stored_questions(run: TaskRun) -> str:
    return run.folder.store.get_meta().get(HELD_OUT_KEY, "")


def _evaluation_record(run: TaskRun, name: str, result: EvalResult) -> EvaluationRecord:
    metrics, rows = result.metrics, result.rows
    return EvaluationRecord(run.step, name, result.policy, metrics, rows, _stored_questions(run))


async def evaluate_held_out(run: TaskRun, name: str) -> EvalResult | None:
    """Evaluate the current policy on the held-out prompts and record the result.

    The task's own metrics are omitted if they fail. Returns None if the task has no such prompts, or if no reward worker can be
    started: that must not stop training.
    """
    if run.held_out is None:
        return None
    label = f"{run.folder.name}@{run.step}"
    try:
        result = await run.interruption.allow(
            answer_held_out(
                run.held_out,
                run.sampler,
                run.scorer,
                run.tokenizer,
                label,
                on_progress=lambda done, total: run.progress.phase("evaluating", done, total),
                trainer=(run.step, run.max_steps, run.steps_per_epoch),
                on_metrics_failed=lambda error: run.say(
                    f"warning: after {counted(run.step, 'step')} the task's own metrics of the held-out prompts are left out: {error}"
                ),
            )
        )
    except RewardWorkerError as error:
        run.say(
            f"warning: the held-out prompts after {counted(run.step, 'step')} could not be measured: {error}"
        )
        return None
    run.say(f"held-out after {counted(run.step, 'step')}: {describe_result(result)}")
    return await store_evaluation(run, name, result)


async def store_evaluation(run: TaskRun, name: str, result: EvalResult) -> EvalResult:
    """Record an evaluation of the current policy and announce it to the callbacks."""
    run.folder.store.add_evaluation(_evaluation_record(run, name, result))
    await announce(run, name, result)
    return result


def _divergence(
    run: TaskRun, config: SignalsConfig, evaluations: Mapping[int, EvaluationRecord]
) -> Finding | None:
    """Compare the evaluation of the current policy with the best one before it; None if they cannot be compared."""
    metric = config.held_out_metric or _main_metric(evaluations[run.step].metrics, config)
    values_by_step = {
        step: e.metrics[metric] for step, e in evaluations.items() if metric in e.metrics
    }
    earlier_steps = [step for step in values_by_step if step < run.step]
    if run.step not in values_by_step or not earlier_steps:
        return None
    best = max(earlier_steps, key=lambda step: (values_by_step[step], step))
    values: list[Mapping[str, float]] = []
    for step in (best, run.step):
        evaluation = run.folder.store.evaluation(evaluations[step].step, evaluations[step].name)
        computed = measure(metric, evaluation.rows) if evaluation else None
        values.append(computed.values if computed else {})
    old_values, new_values = values
    common_keys = sorted(old_values.keys() & new_values.keys())
    fall = HeldOutDrop(
        metric,
        [old_values[key] for key in common_keys],
        [new_values[key] for key in common_keys],
        len(earlier_steps) + 1,
    )
    # Training rewards since the best evaluation. If some examples were chosen by the curriculum or replay,
    # only the rewards of the others count.
    curves = run.folder.store.metrics([f"{REWARD}/fresh", REWARD], best)
    rewards = curves.get(f"{REWARD}/fresh") or curves.get(REWARD, [])
    return divergence(fall, [value for _, value in rewards if math.isfinite(value)])


def _main_metric(metrics: Mapping[str, float], config: SignalsConfig) -> str:
    """The mean of the reward part that shows whether a task is solved; without such a part, the reward."""
    parts = [name for name in metrics if name.startswith(PART) and name.endswith(MEAN)]
    metric = f"{PART}{config.accuracy_part}{MEAN}"
    if config.accuracy_part is not None:
        return metric if metric in parts else REWARD
    success_part = part_of_success(name.removeprefix(PART).removesuffix(MEAN) for name in parts)
    return REWARD if success_part is None else f"{PART}{success_part}{MEAN}"


def describe_result(result: EvalResult) -> str:
    """The main metrics of an evaluation, and the number of failures with the first reason, as text."""
    parts = [f"{key} {value:.3f}" for key, value in result.metrics.items() if "/" not in key]
    failed = [row["reason"] for row in result.rows if row["reason"]]
    if failed:
        parts.append(f"{len(failed)} of {len(result.rows)} could not be scored ({failed[0]})")
    return ", ".join(parts)
