"""THE LOOP: draw examples, sample groups, score them, give credit, make rows, update, publish, record.

    for each step:
        groups = draw_groups        examples drawn by their order, sampled and scored, all groups at once
        take_step(groups)           weights → rows → update → publish → record → now and then a checkpoint

The runner here calls both; whoever has groups from elsewhere calls `take_step` alone. The sampler serves what was published last:
every completion names the version and fingerprint of the weights that drew it, and the loop stops if they are others.

Step k draws groups k·P … k·P + P − 1, P being `training.prompts_per_step`. Which examples those are, and every random number, follow from
the config's seed and these numbers, so the whole state of a run is its weights, the optimiser's, and the count of steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.algorithms.base import Algorithm
from groupwise.config import RunConfig
from groupwise.display.progress import Progress
from groupwise.errors import (
    NonFiniteError,
    NothingScoredError,
    PolicyMismatchError,
    RewardWorkerError,
)
from groupwise.learner.schedule import learning_rate
from groupwise.loops.awaiting import gather_all
from groupwise.loops.evaluate import EvalResult, HeldOut, answer_held_out
from groupwise.loops.interruption import Interruption
from groupwise.loops.metrics import (
    Timings,
    failure_reasons,
    group_metrics,
    loss_metrics,
    timing_metrics,
)
from groupwise.models.tokens import completion_text
from groupwise.rewards.scoring import Scorer
from groupwise.rollouts.prompts import PromptSet
from groupwise.rollouts.rows import training_rows, with_advantages
from groupwise.rollouts.score import score_group
from groupwise.rollouts.seeds import member_seed
from groupwise.rollouts.single import sample_group
from groupwise.runs import checkpoints
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.types import (
    Group,
    Learner,
    OptimiserParams,
    Policy,
    Row,
    Sampler,
    SamplingParams,
    UpdateResult,
)

logger = logging.getLogger(__name__)

MAX_GAP = 0.15
"""Mean difference of log-probabilities (nats) above which a warning is due; with bfloat16 weights 0.04 is usual."""

MAX_NON_FINITE = 3
"""Updates in a row whose gradient was not finite, after which a run stops."""


@dataclass(slots=True)
class Run:
    """A run under way: what it was built from, and where it stands."""

    config: RunConfig
    max_steps: int
    algorithm: Algorithm
    sampler: Sampler
    learner: Learner
    scorer: Scorer
    tokenizer: Any
    params: SamplingParams
    prompts: PromptSet
    held_out: HeldOut | None
    folder: RunFolder
    progress: Progress
    interruption: Interruption
    policy: Policy
    """Published last, and served by the sampler."""
    step: int = 0
    """Steps done."""
    saved_step: int | None = None
    """Steps done at the last checkpoint."""
    unscored: list[str] = field(default_factory=list[str])
    """Why rollouts failed, of the steps in a row that had no scored group."""
    unscored_steps: int = 0
    non_finite: int = 0
    gap_seen: bool = False
    """Whether a wide gap between sampler and learner was warned of."""
    tokens_seen: int = 0
    drawn: dict[int, Group] = field(default_factory=dict[int, Group])
    """Groups of the step under way that are sampled and scored."""
    timings: Timings = field(default_factory=Timings)

    def say(self, text: str) -> None:
        """Tell whoever watches, and the log."""
        logger.info("%s", text)
        self.progress.note(text)


async def train(run: Run) -> None:
    """Take all steps that are left. Raises `Interrupted` when asked to end, and `RunError` when the run cannot go on."""
    while run.step < run.max_steps:
        await evaluate_now_and_then(run)
        begun = time.perf_counter()
        run.timings = Timings()
        groups = await run.interruption.allow(draw_groups(run))
        await take_step(run, groups, begun)
        if run.step % run.config.run.save_steps == 0:
            save_checkpoint(run)


# --- drawing -------------------------------------------------------------------------------------


async def draw_groups(run: Run) -> list[Group]:
    """The groups of the step, sampled together, each scored as soon as it is sampled."""
    run.drawn = {}
    size = run.config.training.prompts_per_step
    begun = time.perf_counter()
    groups = await gather_all(
        draw_group(run, draw, begun) for draw in range(run.step * size, (run.step + 1) * size)
    )
    run.timings.scoring = time.perf_counter() - begun - run.timings.sampling
    return groups


async def draw_group(run: Run, draw: int, begun: float) -> Group:
    """One example, sampled and scored."""
    training = run.config.training
    example, prompt = run.prompts.drawn(draw, training.seed, shuffle=run.config.data.shuffle)
    seeds = [member_seed(training.seed, draw, member) for member in range(training.num_generations)]
    group = await sample_group(
        run.sampler,
        example,
        draw,
        prompt,
        seeds,
        run.params,
        lambda ids: completion_text(run.tokenizer, ids),
    )
    check_served(run.policy, group)
    run.timings.sampling = time.perf_counter() - begun
    run.timings.sampled_tokens += sum(len(rollout.completion_ids) for rollout in group.rollouts)
    scored = await score_group(run.scorer, group, run.step, run.max_steps)
    run.drawn[draw] = scored
    run.progress.phase("sampling", len(run.drawn), training.prompts_per_step)
    return scored


def check_served(policy: Policy, group: Group) -> None:
    """Raise `PolicyMismatchError` if a policy segment was drawn by other weights than those published last."""
    for rollout in group.rollouts:
        for segment in rollout.segments:
            served = (segment.policy_version, segment.fingerprint)
            if segment.source == "policy" and served != (policy.version, policy.fingerprint):
                raise PolicyMismatchError(
                    f"Draw {group.draw} was sampled by version {served[0]} with fingerprint {served[1]}, but the learner "
                    f"published version {policy.version} with fingerprint {policy.fingerprint}. "
                    "The sampler does not serve what was trained; training on would teach nothing."
                )


# --- learning ------------------------------------------------------------------------------------


async def take_step(run: Run, groups: Sequence[Group], begun: float) -> None:
    """Learn from scored groups, publish, and commit the step with its record as one unit."""
    version_in = run.policy.version
    weights = [run.algorithm.weights(group) for group in groups]
    noted = [with_advantages(group, credit) for group, credit in zip(groups, weights, strict=True)]
    taught = [run.algorithm.teaches(credit) for credit in weights]
    rows = training_rows(
        [group for group, teaches in zip(noted, taught, strict=True) if teaches],
        [credit for credit, teaches in zip(weights, taught, strict=True) if teaches],
    )
    rate = learning_rate(run.step, run.max_steps, run.config.training)
    learned = await learn(run, groups, rows, rate) if rows else {}
    if run.policy.version == version_in and learned.get("updated"):
        await publish(run, version_in + 1)
    check_something_scored(run, noted)
    run.timings.step = time.perf_counter() - begun
    commit(run, noted, version_in, rate, learned)


async def learn(
    run: Run, groups: Sequence[Group], rows: Sequence[Row], rate: float
) -> dict[str, float]:
    """Gradient and update; returns metrics, `updated` among them."""
    run.progress.phase("learning", 0, 1)
    begun = time.perf_counter()
    denominators = run.algorithm.denominators(groups, run.params.max_tokens)
    spec = run.algorithm.loss_spec()
    try:
        if run.algorithm.needs_reference:
            rows = await run.interruption.allow(with_reference(run.learner, rows))
        sums = await run.interruption.allow(run.learner.forward_backward(rows, spec, denominators))
    except BaseException:
        run.learner.discard()
        raise
    result = await run.learner.update(optimiser_params(run.config, rate))
    check_finite(run, result)
    run.timings.learning = time.perf_counter() - begun
    run.timings.learned_tokens = sum(len(row.completion_ids) for row in rows)
    return {
        **loss_metrics(sums, denominators),
        "grad_norm": result.grad_norm,
        "learning_rate": rate,
        "updated": float(result.applied),
    }


async def with_reference(learner: Learner, rows: Sequence[Row]) -> list[Row]:
    """The rows with the reference policy's log-probabilities."""
    found = await learner.logprobs(rows, "reference")
    return [
        replace(row, reference_logprobs=logprobs) for row, logprobs in zip(rows, found, strict=True)
    ]


def optimiser_params(config: RunConfig, rate: float) -> OptimiserParams:
    """AdamW as configured, at this learning rate."""
    training = config.training
    return OptimiserParams(
        learning_rate=rate,
        max_grad_norm=training.max_grad_norm,
        weight_decay=training.weight_decay,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        eps=training.adam_epsilon,
    )


async def publish(run: Run, version: int) -> None:
    """Hand the learner's weights to the sampler, and make sure that they arrived."""
    begun = time.perf_counter()
    policy = await run.learner.publish(version)
    await run.sampler.load(policy)
    if run.sampler.fingerprint() != policy.fingerprint:
        raise PolicyMismatchError(
            f"Version {version} was published with fingerprint {policy.fingerprint}, but the sampler serves "
            f"{run.sampler.fingerprint()} after loading it."
        )
    run.policy = policy
    run.timings.publishing = time.perf_counter() - begun


def check_finite(run: Run, result: UpdateResult) -> None:
    """Count updates that were left out because their gradient was not finite; too many in a row stop the run."""
    run.non_finite = 0 if result.applied else run.non_finite + 1
    if not result.applied:
        logger.warning(
            "step %d: the gradient was not finite; the update was left out", run.step + 1
        )
    if run.non_finite >= MAX_NON_FINITE:
        raise NonFiniteError(
            f"The gradient was not finite in {run.non_finite} steps in a row (norm {result.grad_norm}). The last checkpoint "
            "stands. Lower training.learning_rate, or look at the rewards with `groupwise runs rollouts`."
        )


def check_something_scored(run: Run, groups: Sequence[Group]) -> None:
    """Too many steps in a row without one scored rollout stop the run."""
    if any(group.scored for group in groups):
        run.unscored_steps, run.unscored = 0, []
        return
    run.unscored_steps += 1
    run.unscored = failure_reasons(groups)
    for reason in run.unscored:
        logger.warning("step %d: no rollout was scored: %s", run.step + 1, reason)
    limit = run.config.rewards.max_unscored_steps
    if run.unscored_steps >= limit:
        raise NothingScoredError(
            f"No rollout could be scored in {run.unscored_steps} steps in a row (rewards.max_unscored_steps). In the last one:\n  "
            + "\n  ".join(run.unscored)
            + "\nMend the reward functions, then go on with --resume."
        )


# --- recording -----------------------------------------------------------------------------------


def commit(
    run: Run, groups: Sequence[Group], version_in: int, rate: float, learned: Mapping[str, float]
) -> None:
    """The step with its rollouts and metrics, in one transaction."""
    run.tokens_seen += sum(
        len(rollout.prompt_ids) + len(rollout.completion_ids)
        for group in groups
        for rollout in group.rollouts
    )
    metrics = {
        **group_metrics(groups),
        **{name: value for name, value in learned.items() if name != "updated"},
        "learning_rate": rate,
        "num_tokens": float(run.tokens_seen),
        **timing_metrics(run.timings),
    }
    record = StepRecord(
        step=run.step,
        version_in=version_in,
        version_out=run.policy.version,
        fingerprint_out=run.policy.fingerprint,
        draws=tuple(group.draw for group in groups),
        learning_rate=rate,
        finished_at=time.time(),
    )
    run.folder.store.commit_step(record, groups, metrics)
    run.drawn = {}
    run.progress.step(run.step, metrics)
    logger.info(
        "step %d/%d: reward %.4g, version %d",
        run.step + 1,
        run.max_steps,
        metrics.get("reward", math.nan),
        run.policy.version,
    )
    warn_of_gap(run, metrics)
    run.step += 1


def warn_of_gap(run: Run, metrics: Mapping[str, float]) -> None:
    """Sampler and learner should give a token nearly the same probability; a wide gap means that they compute different policies."""
    gap = metrics.get("sampling/logprob_gap", 0.0)
    if gap > MAX_GAP and not run.gap_seen:
        run.gap_seen = True
        logger.warning(
            "step %d: sampler and learner differ by %.2g nats per token on average (expected: at most %.2g). The ratio "
            "corrects for it, but look for its cause: lora.dropout, or a model that computes differently in batches",
            run.step + 1,
            gap,
            MAX_GAP,
        )


def save_checkpoint(run: Run) -> None:
    """Weights, optimiser and position after the steps done; older checkpoints go as configured."""
    if run.saved_step != run.step:
        write_checkpoint(run)
    keep = run.config.run.save_total_limit
    if keep is not None:
        checkpoints.prune(run.folder.checkpoints, keep)


def write_checkpoint(run: Run) -> None:
    """All that a resume needs, as one folder that appears whole."""
    run.progress.phase("saving", 0, 1)
    position = {
        "step": run.step,
        "policy": {"version": run.policy.version, "fingerprint": run.policy.fingerprint},
        "tokens_seen": run.tokens_seen,
        "unscored_steps": run.unscored_steps,
        "non_finite": run.non_finite,
    }

    def fill(folder: Path) -> None:
        run.learner.save(str(folder))
        if run.policy.kind == "full":  # so that another run can start from it
            run.tokenizer.save_pretrained(folder)

    checkpoints.save(run.folder.checkpoints, run.step, fill, {"position": position})
    run.saved_step = run.step


# --- held-out prompts ----------------------------------------------------------------------------


async def evaluate_now_and_then(run: Run) -> None:
    """Every `eval.eval_steps` steps; the last step has an evaluation of its own."""
    every = run.config.eval.eval_steps
    name = f"step-{run.step}"
    due = every is not None and run.step > 0 and run.step % every == 0
    if due and recorded_evaluation(run, name, run.step) is None:
        await evaluate_held_out(run, name)


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
    return result


def described(result: EvalResult) -> str:
    """The metrics that people look at, and failures with their reasons."""
    shown = [f"{key} {value:.3f}" for key, value in result.metrics.items() if "/" not in key]
    failed = [row["reason"] for row in result.rows if row["reason"]]
    if failed:
        shown.append(f"{len(failed)} of {len(result.rows)} could not be scored ({failed[0]})")
    return ", ".join(shown)
