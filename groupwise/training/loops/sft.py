"""The loop of supervised fine-tuning: the learner of `groupwise rl`, trained on given answers instead of rewards.

    for each step:
        take_step       draw examples in their order → rows → update → record
        evaluate        at intervals, the loss on held-out rows; it decides the best step and early stopping
        save            at intervals, a checkpoint; the best one is never pruned

The loss of a step is the mean over all its trained tokens, in whichever rows they are. Nothing is sampled, so nothing is published
during the run: the policies of a supervised run are its checkpoints. Its complete state is the weights, the optimiser's state, the
number of steps and the results of evaluations (`SftRun.state`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import Any

from groupwise.algorithms.sft import Sft
from groupwise.core.errors import UsageError
from groupwise.core.terminal.quantities import counted
from groupwise.core.types import Row
from groupwise.engine.learner.schedule import learning_rate
from groupwise.runs import checkpoints
from groupwise.runs.advice import DISTINCT
from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.tasks.data.order import Order
from groupwise.tasks.rollouts.teacher import Lesson, LessonSet, teacher_group, teacher_row
from groupwise.training.loops.metrics import Timings, loss_metrics, timing_metrics
from groupwise.training.loops.profiling import profile_step
from groupwise.training.loops.sft_completions import WITH_SIGNAL, Completions
from groupwise.training.loops.training import Training, count_non_finite, update, write_checkpoint
from groupwise.training.sft_config import SftConfig, holds, parse_condition

logger = logging.getLogger(__name__)

PRINTED_METRICS = ("eval_loss", "eval_mean_token_accuracy", "reward", WITH_SIGNAL, DISTINCT)
"""The metrics of an evaluation that are printed during the run."""
EVALUATION_BATCH = 64
"""Number of held-out rows per batch of an evaluation, which can be interrupted between batches."""


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest held-out loss so far, and its step."""

    step: int
    loss: float


@dataclass(slots=True, kw_only=True)
class SftRun(Training):
    """A running supervised training."""

    config: SftConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    lessons: LessonSet
    order: Order
    """The order in which examples are drawn."""
    max_draws: int | None
    """Number of examples drawn in all steps together; None if the length is given in steps."""
    held_out: LessonSet | None
    eval_steps: int
    next_draw: int = 0
    """The first draw that belongs to no step yet."""
    best: Best | None = None
    loss_to_beat: float | None = None
    """The loss that early stopping compares with: the last one that was lower by more than the threshold."""
    not_better: int = 0
    """Number of evaluations in a row since then."""
    evaluated_step: int | None = None
    """Number of steps done at the last evaluation."""
    completions: Completions | None = None
    """Draws and measures the policy's own completions; None if evaluations use only the given answers."""
    met_condition: str | None = None
    """The condition of `training.stop_when` that was met; None if none was."""
    conditions_checked: bool = False
    """True once an evaluation had all metrics that `training.stop_when` names."""

    @property
    def stopped_early(self) -> bool:
        """True if early stopping ends the run here."""
        patience = self.config.eval.early_stopping_patience
        return patience is not None and self.not_better >= patience

    @property
    def over(self) -> bool:
        """See `Training.over`."""
        return super(SftRun, self).over or self.stopped_early or self.met_condition is not None

    def epoch(self) -> float:
        """See `Training.epoch`."""
        return self.next_draw / self.order.length

    def state(self) -> dict[str, Any]:
        """See `Training.state`."""
        return {
            **super(SftRun, self).state(),
            "best": asdict(self.best) if self.best else None,
            "next_draw": self.next_draw,
            "to_beat": self.loss_to_beat,
            "not_better": self.not_better,
            "evaluated_step": self.evaluated_step,
            "reached": self.met_condition,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Training.load_state`."""
        super(SftRun, self).load_state(state)
        self.best = Best(**state["best"]) if state["best"] else None
        self.next_draw = state["next_draw"]
        # The last step of the epochs configured before may have been smaller.
        if self.max_draws is not None:
            size = self.config.training.examples_per_step
            self.max_steps = self.step + max(0, -(-(self.max_draws - self.next_draw) // size))
        self.loss_to_beat = state["to_beat"]
        self.not_better = state["not_better"]
        self.evaluated_step = state["evaluated_step"]
        reached = state.get("reached")
        self.met_condition = reached if reached in self.config.training.stop_when else None


async def train(run: SftRun) -> None:
    """Take all remaining steps. Raises `Interrupted` when asked to end, and `RunError` if the run cannot continue."""
    await evaluate_if_due(run)
    while not run.over:
        await run.callbacks.step_begins()
        with profile_step(run):
            await take_step(run)
        await evaluate_if_due(run)
        if run.callbacks.save_was_asked() or run.step % run.config.run.save_steps == 0:
            await save(run)
    conditions = run.config.training.stop_when
    if conditions and run.met_condition is None:
        run.say(unmet_warning(conditions, run.folder.store.evaluations(rows=False), run.step))


async def take_step(run: SftRun) -> None:
    """Learn from the next examples, and commit the step with its record atomically."""
    started_at = time.perf_counter()
    run.timings = Timings()
    training = run.config.training
    # The last step has only the remaining draws of the epochs.
    end = run.next_draw + run.config.training.examples_per_step
    draws = range(run.next_draw, end if run.max_draws is None else min(end, run.max_draws))
    lessons = [run.lessons.lessons[run.order.example(draw)] for draw in draws]
    rows = [teacher_row(row) for lesson in lessons for row in lesson.rows]
    rate = learning_rate(run.step, run.max_steps, training)
    version_in = run.policy.version
    step_metrics = await _update_weights(run, rows, rate)
    run.timings.step = time.perf_counter() - started_at
    step_metrics["learning_rate"] = rate
    metrics = _commit_step(run, draws, lessons, version_in, step_metrics)
    await run.callbacks.step_committed(metrics)


async def _update_weights(run: SftRun, rows: list[Row], rate: float) -> dict[str, float]:
    """Compute the gradient and update the weights; returns metrics."""
    run.progress.phase("learning")
    started_at = time.perf_counter()
    denominators = {Sft.name: float(sum(sum(row.mask) for row in rows))}
    work = run.learner.forward_backward(rows, Sft().loss_spec(), denominators)
    try:
        sums = await run.interruption.allow(work)
    except BaseException:
        run.learner.discard()
        raise
    result = await update(run, rows, sums, rate)
    count_non_finite(run, not result.applied)
    if result.applied:
        run.policy = replace(run.policy, version=run.policy.version + 1)
    run.timings.learning = time.perf_counter() - started_at
    run.timings.learned_tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in rows)
    left_out = {} if result.applied else {"updates/left_out": 1.0}
    return {**loss_metrics([(sums, denominators)]), "grad_norm": result.grad_norm, **left_out}


def _commit_step(
    run: SftRun,
    draws: Sequence[int],
    lessons: Sequence[Lesson],
    version_in: int,
    step_metrics: Mapping[str, float],
) -> dict[str, float]:
    """Commit the step with its rows and metrics in one transaction, and advance the run. Returns the metrics."""
    run.tokens_seen += run.timings.learned_tokens
    metrics = {
        **step_metrics,
        "num_tokens": float(run.tokens_seen),
        "epoch": (draws[-1] + 1) / run.order.length,
        **{name: value for name, value in timing_metrics(run.timings).items() if value},
    }
    record = StepRecord(
        step=run.step,
        version_in=version_in,
        version_out=run.policy.version,
        fingerprint_out="",
        draws=tuple(draws),
        learning_rate=metrics["learning_rate"],
        finished_at=time.time(),
    )
    groups = [
        teacher_group(run.tokenizer, lesson, draw)
        for draw, lesson in zip(draws, lessons, strict=True)
    ]
    run.folder.store.commit_step(record, groups, metrics)
    run.progress.step(run.step, metrics)
    logger.info("step %d/%d: loss %.4g", run.step + 1, run.max_steps, metrics["loss"])
    run.step += 1
    run.next_draw = draws[-1] + 1
    return metrics


# --- held-out rows -------------------------------------------------------------------------------


async def evaluate_if_due(run: SftRun) -> None:
    """Evaluate before the first step, every `eval.eval_steps` steps, after the last step, and when a callback asks for it."""
    is_requested = run.callbacks.evaluation_was_asked
    has_no_data = run.held_out is None and run.completions is None
    if is_requested and has_no_data:
        logger.warning(
            "a callback asked for an evaluation, but the task has no get_sft_eval_dataset: there are no held-out rows"
        )
    if has_no_data or run.evaluated_step == run.step:
        run.callbacks.give_up_evaluation()
        return
    if run.step == 0:
        due = run.config.eval.eval_on_start
    else:
        due = run.step % run.eval_steps == 0 or run.over
    if due or is_requested:
        metrics = await _measure_held_out(run)
        _notice_conditions(run, metrics)
        # A new best step is saved; step 0 cannot be the best.
        loss = metrics.get("eval_loss")
        run.evaluated_step = run.step
        if run.step != 0 and loss is not None:
            # Only a loss that is lower by more than the threshold resets the count of early stopping.
            threshold = run.config.eval.early_stopping_threshold
            if math.isfinite(loss) and (
                run.loss_to_beat is None or loss < run.loss_to_beat - threshold
            ):
                run.loss_to_beat, run.not_better = loss, 0
            else:
                run.not_better += 1
            if math.isfinite(loss) and (run.best is None or loss < run.best.loss):
                run.best = Best(run.step, loss)
                await save(run)
            if run.stopped_early:
                best = (
                    f"{run.best.loss:.4f} (after {counted(run.best.step, 'step')})"
                    if run.best
                    else "infinity"
                )
                run.say(
                    f"stopped early: {run.not_better} evaluations without a better loss; the best is {best}"
                )


async def _measure_held_out(run: SftRun) -> dict[str, float]:
    """Measure and record the loss on the held-out rows and the metrics of the policy's own completions."""
    metrics: dict[str, float] = {}
    details: list[dict[str, Any]] = []
    if run.held_out is not None:
        metrics, details = await _held_out_loss(run, run.held_out)
    if run.completions is not None:
        completions = run.completions.measure(
            run.learner,
            run.policy,
            run.step,
            run.max_steps,
            lambda done, total: run.progress.phase("evaluating", done, total),
        )
        metrics |= await run.interruption.allow(completions)
    label = f"{run.folder.name}@{run.step}"
    questions = run.folder.store.get_meta().get("held_out", "")
    record = EvaluationRecord(run.step, f"step-{run.step}", label, metrics, details, questions)
    run.folder.store.add_evaluation(record)
    await run.callbacks.announce_evaluation(record)
    numbers = ", ".join(
        f"{name} {metrics[name]:.4g}" for name in PRINTED_METRICS if name in metrics
    )
    run.say(f"held-out after {counted(run.step, 'step')}: {numbers}")
    return metrics


def _notice_conditions(run: SftRun, metrics: Mapping[str, float]) -> None:
    """Record the condition of `training.stop_when` that is met now, if any."""
    conditions = run.config.training.stop_when
    condition_metrics = {
        name for condition in conditions for name, _, _ in parse_condition(condition)
    }
    unknown = condition_metrics - metrics.keys()
    if unknown and not run.conditions_checked:
        raise UsageError(
            f"training.stop_when names {', '.join(sorted(unknown))}, which the evaluation after {run.step} steps does not have. There are: "
            f"{', '.join(sorted(metrics))}"
        )
    run.conditions_checked = True
    matches = (condition for condition in conditions if holds(condition, metrics))
    run.met_condition = next(matches, None)
    if run.met_condition is not None:
        run.say(
            f"ended after {counted(run.step, 'step')}: {run.met_condition} (training.stop_when)"
        )


def unmet_warning(
    conditions: Sequence[str], evaluations: Sequence[EvaluationRecord], steps: int
) -> str:
    """Why no condition of `training.stop_when` was met: the last value of each metric, and an earlier one that was nearer."""
    signs = {name: sign for condition in conditions for name, sign, _ in parse_condition(condition)}
    measurements: list[str] = []
    was_nearer = False
    for name, sign in sorted(signs.items()):
        values = [(e.metrics[name], e.step) for e in evaluations if name in e.metrics]
        if not values:
            continue
        last, _ = values[-1]
        best, step = (min if "<" in sign else max)(values, key=lambda pair: pair[0])
        earlier = f" after it was {best:.4g} at step {step}" if best != last else ""
        measurements.append(f"{name} is {last:.4g}{earlier}")
        was_nearer |= bool(earlier)
    advice = "train for longer, or ask for less"
    if was_nearer:
        advice = (
            "more steps may lead further away. Ask for less, evaluate more often (eval.eval_steps), or lower "
            "training.learning_rate"
        )
    return (
        f"warning: no condition of training.stop_when was met in {counted(steps, 'step')} "
        f"({', '.join(measurements) or 'nothing was evaluated'}): {advice}"
    )


async def _held_out_loss(
    run: SftRun, held_out: LessonSet
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Loss (nats per trained token) and, if the learner tells it, accuracy on the held-out rows, and the loss of each row."""
    losses: list[float] = []
    counts: list[int] = []
    correct: int | None = 0
    rows = [(lesson, teacher_row(row)) for lesson in held_out.lessons for row in lesson.rows]
    for start in range(0, len(rows), EVALUATION_BATCH):
        run.progress.phase("evaluating", start, len(rows))
        part = [row for _, row in rows[start : start + EVALUATION_BATCH]]
        predictions = await run.interruption.allow(run.learner.predictions(part))
        for row, prediction in zip(part, predictions, strict=True):
            losses.append(-math.fsum(compress(prediction.logprobs, row.mask)))
            counts.append(sum(row.mask))
            if correct is not None and prediction.right is not None:
                correct += sum(compress(prediction.right, row.mask))
            else:
                correct = None
        await asyncio.sleep(0)
    loss = math.fsum(losses) / sum(counts)
    metrics = {
        "eval_loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),  # above, exp overflows a float
        "eval_tokens": float(sum(counts)),
    }
    if correct is not None:
        metrics["eval_mean_token_accuracy"] = correct / sum(counts)
    details = [
        {"example": lesson.example.index, "loss": total / count, "tokens": count}
        for (lesson, _), total, count in zip(rows, losses, counts, strict=True)
    ]
    return metrics, details


# --- checkpoints ---------------------------------------------------------------------------------


async def save(run: SftRun) -> None:
    """Write a checkpoint of the steps done, unless there is one, and delete older ones as configured, but never the best."""
    if run.saved_step != run.step:
        await write_checkpoint(run)
    keep = run.config.run.save_total_limit
    if keep is not None:
        checkpoints.prune(run.folder.checkpoints, keep, {run.best.step} if run.best else ())
    await run.callbacks.announce_checkpoint()
