"""Held-out prompts during a run: answered now and then by the policy as it is, and recorded.

Their seeds depend on prompt and sample alone, and nothing that training draws from is touched.
"""

from __future__ import annotations

import logging

from groupwise.errors import RewardWorkerError
from groupwise.loops.evaluate import EvalResult, answer_held_out
from groupwise.loops.run import Run
from groupwise.runs.records import EvaluationRecord

logger = logging.getLogger(__name__)


async def evaluate_now_and_then(run: Run) -> None:
    """Every `eval.eval_steps` steps, and where a callback asks for it."""
    if not _due(run):
        return
    name = f"step-{run.step}"
    recorded = recorded_evaluation(run, name, run.step)
    if recorded is None:
        await evaluate_held_out(run, name)
    else:
        await announce(run, name, recorded)


def _due(run: Run) -> bool:
    """After the last step only what was asked for: usually it has an evaluation of its own."""
    asked = run.callbacks.evaluation_was_asked
    if asked and run.held_out is None:
        logger.warning(
            "a callback asked for an evaluation, but this run has no held-out prompts: that takes the task's "
            "get_eval_dataset, and eval.eval_steps or eval.before_and_after"
        )
        run.callbacks.give_up_evaluation()
    if run.over:
        return asked and not run.config.eval.before_and_after
    every = run.config.eval.eval_steps
    return asked or (every is not None and run.step > 0 and run.step % every == 0)


async def announce(run: Run, name: str, result: EvalResult) -> None:
    """Tell the callbacks of an evaluation of the policy as it is."""
    await run.callbacks.evaluated(
        EvaluationRecord(run.step, name, result.policy, result.metrics, result.rows)
    )


def recorded_evaluation(run: Run, name: str, step: int) -> EvalResult | None:
    """An evaluation of that name and step that stands in the record."""
    for record in run.folder.store.evaluations():
        if (record.name, record.step) == (name, step):
            rows = [dict(row) for row in record.rows]
            return EvalResult(record.policy, dict(record.metrics), {}, rows)
    return None


async def evaluate_held_out(run: Run, name: str) -> EvalResult | None:
    """Answer the held-out prompts with the policy as it is, and record how it did.

    None where the task has none, or where its own metrics fail: what was trained is worth more than they are.
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
                trainer=(run.step, run.max_steps),
            )
        )
    except RewardWorkerError as error:
        run.say(
            f"warning: the held-out prompts after {run.step} steps could not be measured: {error}"
        )
        return None
    run.folder.store.add_evaluation(
        EvaluationRecord(run.step, name, label, result.metrics, result.rows)
    )
    run.say(f"held-out after {run.step} steps: {described(result)}")
    await announce(run, name, result)
    return result


def described(result: EvalResult) -> str:
    """The metrics that people look at, and failures with their reasons."""
    shown = [f"{key} {value:.3f}" for key, value in result.metrics.items() if "/" not in key]
    failed = [row["reason"] for row in result.rows if row["reason"]]
    if failed:
        shown.append(f"{len(failed)} of {len(result.rows)} could not be scored ({failed[0]})")
    return ", ".join(shown)
