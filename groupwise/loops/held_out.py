"""Held-out prompts during a run: answered now and then by the policy as it is, and recorded.

Their seeds depend on prompt and sample alone, and nothing that training draws from is touched.
"""

from __future__ import annotations

import logging

from groupwise.errors import RewardWorkerError
from groupwise.evaluation.evaluate import EvalResult, answer_held_out
from groupwise.loops.run import Run
from groupwise.runs.records import EvaluationRecord

logger = logging.getLogger(__name__)

ASKED = "held_out"
"""The fact about a run that says what its evaluations ask, and how."""


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
    await run.callbacks.evaluated(_record(run, name, result))


def recorded_evaluation(run: Run, name: str, step: int) -> EvalResult | None:
    """An evaluation of that name and step that stands in the record, if it asked what the run asks now."""
    record = run.folder.store.evaluation(step, name)
    if record is None or record.asked not in ("", _asked(run)):
        return None
    return EvalResult(record.policy, dict(record.metrics), {}, [dict(row) for row in record.rows])


def notice_changed_questions(run: Run, asked: str) -> None:
    """After a resume: note what the run asks from now on, and say so where that is something else."""
    before = _asked(run)
    if before == asked:
        return
    run.folder.store.set_meta({ASKED: asked})
    if before and run.folder.store.evaluations(rows=False):
        run.say(
            "the held-out prompts, or how they are answered, were changed: evaluations do not compare with earlier ones, and "
            "the best one is looked for anew"
        )


def _asked(run: Run) -> str:
    return run.folder.store.get_meta().get(ASKED, "")


def _record(run: Run, name: str, result: EvalResult) -> EvaluationRecord:
    metrics, rows = result.metrics, result.rows
    return EvaluationRecord(run.step, name, result.policy, metrics, rows, _asked(run))


async def evaluate_held_out(run: Run, name: str) -> EvalResult | None:
    """Answer the held-out prompts with the policy as it is, and record how it did.

    Metrics of the task that fail are left out. None where the task has no such prompts, or where no reward worker can be
    started: what was trained is worth more.
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
                on_metrics_failed=lambda error: run.say(
                    f"warning: after {run.step} steps the task's own metrics of the held-out prompts are left out: {error}"
                ),
            )
        )
    except RewardWorkerError as error:
        run.say(
            f"warning: the held-out prompts after {run.step} steps could not be measured: {error}"
        )
        return None
    run.folder.store.add_evaluation(_record(run, name, result))
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
