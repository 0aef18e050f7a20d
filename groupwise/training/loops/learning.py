"""Trains on the groups of a step: turns them into rows with advantages and makes one or several updates.

A step makes `training.num_iterations` passes over its groups, each split into `training.minibatches` updates of whole groups. The ratio
of every update is relative to the policy that sampled (with importance correction: to the learner's weights at the start of the step),
so the clip keeps all updates of a step near that policy. Some algorithms take one ratio for a whole rollout
(`Algorithm.ratio_of_rollout`). If such a rollout has several rows, each row receives before an update the current log-ratios of its
other rows, which costs another forward pass.

If tokens are kept, the record contains the log-probabilities of the first pass over each group (`with_learner_results`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from groupwise.core.types import Group, Row
from groupwise.engine.learner.config import TrainingConfig
from groupwise.tasks.rollouts.rows import (
    GroupCredits,
    training_rows,
    with_advantages,
    with_learner_logprobs,
    with_sibling_stats,
)
from groupwise.training.loops.metrics import loss_metrics
from groupwise.training.loops.run import Learning
from groupwise.training.loops.training import count_non_finite, update


@dataclass(frozen=True, slots=True)
class LearnResult:
    """The result of a step's updates."""

    changed: bool = False
    """True if at least one update was applied."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    logprobs: Mapping[int, Sequence[tuple[float, ...]]] = field(
        default_factory=dict[int, Sequence[tuple[float, ...]]]
    )
    """Index of a group in the step -> log-probabilities of its rows in the first pass. Groups without signal are missing."""


def with_learner_results(
    groups: Sequence[Group], credits: Sequence[GroupCredits], result: LearnResult
) -> list[Group]:
    """The groups of a step as they are recorded: with each rollout's advantages and the learner's log-probabilities of its tokens."""
    return [
        with_learner_logprobs(with_advantages(group, credit), credit, result.logprobs.get(index))
        for index, (group, credit) in enumerate(zip(groups, credits, strict=True))
    ]


async def learn(
    run: Learning, groups: Sequence[Group], credits: Sequence[GroupCredits], rate: float
) -> LearnResult:
    """Make the step's updates; none if no group has a signal."""
    rows_by_group = [
        training_rows([group], [credit]) if run.algorithm.teaches(credit) else []
        for group, credit in zip(groups, credits, strict=True)
    ]
    if not any(rows_by_group):
        return LearnResult()
    run.progress.phase("learning")
    started_at = time.perf_counter()
    rows_by_group = await run.interruption.allow(_with_logprobs(run, rows_by_group))
    result = await _updates(run, groups, rows_by_group, rate)
    run.timings.learning = time.perf_counter() - started_at
    return result


async def _updates(
    run: Learning, groups: Sequence[Group], rows_by_group: Sequence[Sequence[Row]], rate: float
) -> LearnResult:
    losses: list[tuple[dict[str, float], dict[str, float]]] = []
    norms: list[float] = []
    left_out = 0
    logprobs: dict[int, Sequence[tuple[float, ...]]] = {}
    for part in update_ranges(len(groups), run.config.training):
        rows = [row for index in part for row in rows_by_group[index]]
        if not rows:
            continue
        denominators = run.algorithm.denominators(
            [groups[index] for index in part], run.longest_completion
        )
        rows = await _with_ratios(run, rows, interruptible=not norms)
        sums = await _forward_backward(run, rows, denominators, interruptible=not norms)
        if run.config.run.keep_tokens and logprobs.keys().isdisjoint(part):
            logprobs |= await _trained_logprobs(run, part, rows_by_group)
        result = await update(run, rows, sums, rate)
        left_out += not result.applied
        losses.append((sums, denominators))
        norms.append(result.grad_norm)
        run.timings.learned_tokens += sum(len(row.completion_ids) for row in rows)
    count_non_finite(run, left_out)
    metrics = {**loss_metrics(losses), "grad_norm": fmean(norms)}
    if left_out:
        metrics["updates/left_out"] = float(left_out)
    return LearnResult(changed=left_out < len(norms), metrics=metrics, logprobs=logprobs)


def update_ranges(groups: int, training: TrainingConfig) -> Iterator[range]:
    """The range of groups of each update of a step: contiguous, of nearly equal size, the same in every pass."""
    count = min(training.minibatches, groups)
    bounds = [groups * index // count for index in range(count + 1)]
    for _ in range(training.num_iterations):
        yield from (range(*pair) for pair in pairwise(bounds))


async def _forward_backward(
    run: Learning, rows: Sequence[Row], denominators: dict[str, float], *, interruptible: bool
) -> dict[str, float]:
    """Compute the gradient of one update. An interruption is accepted only if `interruptible`: before the step has changed the weights."""
    work = run.learner.forward_backward(rows, run.algorithm.loss_spec(), denominators)
    try:
        return await (run.interruption.allow(work) if interruptible else work)
    except BaseException:
        run.learner.discard()
        raise


async def _trained_logprobs(
    run: Learning, part: Iterable[int], rows_by_group: Sequence[Sequence[Row]]
) -> dict[int, Sequence[tuple[float, ...]]]:
    """Log-probabilities of the latest pass, by index of the group; empty if this learner does not provide them."""
    logprobs = await run.learner.trained_logprobs()
    if logprobs is None:
        return {}
    # Of several targets for a token, the first is the token itself.
    rows = [row for index in part for row in rows_by_group[index]]
    remaining = iter(
        [
            row_logprobs[:: row.targets_per_token]
            for row, row_logprobs in zip(rows, logprobs, strict=True)
        ]
    )
    return {
        index: [next(remaining) for _ in rows_by_group[index]]
        for index in part
        if rows_by_group[index]
    }


async def _with_logprobs(run: Learning, rows_by_group: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Add the log-probabilities that the loss needs in addition to the sampler's, all with the weights at the start of the step."""
    rows = [row for group in rows_by_group for row in group]
    if run.algorithm.needs_reference:
        logprobs = await run.learner.logprobs(rows, "reference")
        rows = [
            replace(r, reference_logprobs=row_logprobs)
            for r, row_logprobs in zip(rows, logprobs, strict=True)
        ]
    algorithm = run.algorithm
    # Rows whose teacher is an endpoint have its log-probabilities already.
    teacher_is_local = any(row.teacher_logprobs is None for row in rows)
    if algorithm.needs_teacher and not algorithm.needs_teacher_kl and teacher_is_local:
        logprobs = await run.learner.logprobs(rows, "teacher")
        rows = [
            replace(r, teacher_logprobs=row_logprobs)
            for r, row_logprobs in zip(rows, logprobs, strict=True)
        ]
    # Log-probabilities at the start of the step are needed by later updates and by other rows of the same rollout;
    # the first update computes its own.
    updates = len([*update_ranges(len(rows_by_group), run.config.training)])
    needs_proximal = updates > 1 or any(row.others is not None for row in with_sibling_stats(rows))
    if run.algorithm.needs_proximal and needs_proximal:
        logprobs = await run.learner.logprobs(rows)
        rows = [
            replace(r, proximal_logprobs=row_logprobs)
            for r, row_logprobs in zip(rows, logprobs, strict=True)
        ]
    remaining = iter(with_sibling_stats(rows))
    return [[next(remaining) for _ in group] for group in rows_by_group]


async def _with_ratios(run: Learning, rows: list[Row], *, interruptible: bool) -> list[Row]:
    """Add to each row the current log-ratios of the other rows of its rollout.

    Before the first update, the current log-probabilities are the proximal ones, so every ratio is 1 and no forward pass is needed.
    """
    split_rows = [row for row in rows if row.others is not None]
    ratios_are_one = interruptible and run.algorithm.needs_proximal
    if not split_rows or ratios_are_one or not run.algorithm.ratio_of_rollout:
        return rows
    work = run.learner.logprobs(split_rows)
    logprobs = await (run.interruption.allow(work) if interruptible else work)
    bounds = run.algorithm.log_ratio_bounds
    remaining = iter(with_sibling_stats(split_rows, logprobs, bounds))
    return [row if row.others is None else next(remaining) for row in rows]
