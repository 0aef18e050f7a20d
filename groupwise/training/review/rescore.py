"""`groupwise runs rescore`: scores the recorded completions of a run with other rewards.

The reward functions come from a task file, or are named one by one; they run in the same killable workers as in training. The result
compares both scores: totals per step, their agreement, and the rollouts whose rank in their group changed, because training learns from
ranks within groups. The record is only read. The result is a pair of files in `results/`: the numbers as JSON, and the rollouts as JSON
Lines, written step by step, because those of a long run do not fit into memory.

Rewards receive the recorded data: texts and columns as JSON stores them, and token ids if the run kept them (`run.keep_tokens`).
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import nlargest
from itertools import chain, combinations, groupby
from math import fsum, inf, sqrt
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

from groupwise.core import atomic_files
from groupwise.core.errors import RunNotFoundError, TaskError, UsageError
from groupwise.core.interruption import gather_all, run_to_end
from groupwise.core.reward_call.request import Scorer
from groupwise.core.types import Group, Outcome, Rollout
from groupwise.runs.find import resolve
from groupwise.runs.folder import RECORD, add_result, read_config, result_file
from groupwise.runs.store import Store
from groupwise.tasks.rewards.inprocess import InProcessScorer, RubricScorer
from groupwise.tasks.rewards.registry import named_rubric
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rewards.workers import RewardWorkers
from groupwise.tasks.rollouts.score import score_group
from groupwise.training import rollout_builder
from groupwise.training.config import LoadedConfig, load_config, with_task_schema

FORMAT = 2
KIND = "rescoring"
ROWS = ".jsonl"
"""Suffix of the file with the rollouts, which is stored next to the one with the numbers."""
SHOWN_REASONS = 3
"""Number of reasons for failures that a result names, most frequent first."""
KEPT_REASONS = 20
"""Number of reasons that are kept per step: a reason may quote a completion, and all those of a long run do not fit into memory."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """One rollout with its old and its new score."""

    step: int
    group: int
    rollout: int
    attempt: int
    example: int
    completion: str
    old: float | None
    """The recorded total; None if the rollout was not scored."""
    new: float | None
    old_parts: dict[str, float | None]
    new_parts: dict[str, float | None]
    old_outcome: Outcome
    new_outcome: Outcome
    reason: str | None
    """Why it could not be scored now; None if it was."""
    old_rank: float | None = None
    """Rank in its group among the rollouts with both scores; 1 is the best, and ties share their mean rank."""
    new_rank: float | None = None
    failed_rewards: dict[str, str] = field(default_factory=dict[str, str])
    """Name of a new reward function -> why it gave no value. If the whole call timed out, only `reason` is set, and `new_parts` is
    empty.
    """

    @property
    def ranks_moved(self) -> float:
        """Number of ranks moved within the group; 0 if either rank is missing."""
        if self.old_rank is None or self.new_rank is None:
            return 0.0
        return abs(self.new_rank - self.old_rank)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Comparison of the old and new rewards of some rollouts."""

    rollouts: int
    scored: int
    """Number of rollouts with both scores; old, new, correlation, agreement and moved refer to these."""
    old: float | None
    new: float | None
    """Mean totals."""
    correlation: float | None
    """Pearson's correlation over the rollouts; None if either side is constant."""
    agreement: float | None
    """The fraction of pairs that both sides order alike, of those within a group that are not tied on both sides."""
    moved: int
    """Number of rollouts whose rank in their group changed."""
    failed: int
    """Number of rollouts that could not be scored now."""
    reasons: dict[str, int]
    """Most frequent failures with their number of rollouts, including those of rewards without weight."""
    unanswered: dict[str, int]
    """Name of a new reward function -> number of rollouts on which it failed; a call that timed out counts for every function."""


@dataclass(frozen=True, slots=True)
class Rescoring:
    """Result of a rescoring."""

    run: str
    rewards: dict[str, float]
    """The new reward functions with their weights."""
    steps: dict[int, Agreement]
    overall: Agreement
    path: Path
    """The result file; a file with the same stem contains the rollouts."""

    @property
    def rows_path(self) -> Path:
        """The file with the rollouts: JSON Lines, one per rollout."""
        return self.path.with_suffix(ROWS)

    @property
    def failed_rewards(self) -> tuple[str, ...]:
        """The new reward functions that failed on every rollout."""
        counts = self.overall.unanswered
        return tuple(name for name in self.rewards if counts.get(name) == self.overall.rollouts)

    @property
    def exit_code(self) -> int:
        """1 if a reward function failed on every rollout, or if no rollout could be scored; otherwise 0."""
        all_failed = 0 < self.overall.rollouts == self.overall.failed
        return 1 if self.failed_rewards or all_failed else 0

    def rows(self) -> Iterator[Rescored]:
        """Read the rollouts from their file, in the order of the record."""
        with self.rows_path.open("rb") as file:
            yield from (Rescored(**json.loads(line)) for line in file)

    def summary(self, rows: int = 0) -> dict[str, Any]:
        """The result as plain data for `--json`, with `rows` of the rollouts whose rank changed most."""
        return {
            "run": self.run,
            "rewards": self.rewards,
            "broken": list(self.failed_rewards),
            "overall": asdict(self.overall),
            "steps": {str(step): asdict(agreement) for step, agreement in self.steps.items()},
            "moved": [asdict(row) for row in self.farthest(rows)],
            "results": str(self.path),
            "results_rows": str(self.rows_path),
        }

    def farthest(self, count: int) -> list[Rescored]:
        """The `count` rollouts whose rank in the group changed most."""
        moved_rows = (row for row in self.rows() if row.ranks_moved) if count else ()
        return nlargest(count, moved_rows, key=lambda row: row.ranks_moved)


def rescore(
    run: str,
    *,
    task: object | None = None,
    rewards: Sequence[str] = (),
    runs_dir: Path = Path("runs"),
    overrides: Sequence[str] = (),
    step: int | None = None,
    limit: int | None = None,
) -> Rescoring:
    """Score recorded rollouts with the rewards of a task or with named rewards: the command `groupwise runs rescore`.

    `overrides` change the run's config for the task; `limit` restricts scoring to the last so many groups. Raises `UsageError`.
    """
    if (task is None) == (not rewards):
        raise UsageError("Give either --task-module or --rewards: whose rewards are to judge?")
    path = resolve(run, runs_dir).path
    with Store.open(path / RECORD, readonly=True) as store:
        kind = store.get_meta().get("kind", "rl")
        if kind != "rl":
            raise UsageError(f"{path} is a run of `groupwise {kind}`: it has no rollouts to score.")
        steps = {record.step: record.all_draws for record in store.steps()}
        if not steps:
            raise RunNotFoundError(f"The run {path.name!r} has recorded no step yet.")
        if step is not None and step - 1 not in steps:
            raise RunNotFoundError(
                f"The run {path.name!r} has no step {step}; it has the steps {min(steps) + 1} to {max(steps) + 1}."
            )
        draws = [(k, draw) for k, draws in steps.items() if step in (None, k + 1) for draw in draws]
        by_draw = groupby(draws[-limit:] if limit else draws, key=itemgetter(0))
        draws_by_step = {k: frozenset(draw for _, draw in step_draws) for k, step_draws in by_draw}
        loaded = load_config(read_config(path), overrides)
        judge = _task_judge(loaded, task) if task is not None else _named_judge(loaded, rewards)
        target = result_file(path, judge.name)
        atomic_files.check_can_write(target)
        with atomic_files.explaining_disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        steps = store.get_meta().get("max_steps") or len(draws_by_step)
        rows_file = atomic_files.building_path(target.with_suffix(ROWS))
        try:
            with atomic_files.explaining_disk_errors(rows_file), rows_file.open("wb") as file:
                tallies = run_to_end(_rescore_steps(store, draws_by_step, judge, steps, file))
            agreements = {
                step_number: _agreement([tally]) for step_number, tally in tallies.items()
            }
            overall = _agreement(list(tallies.values()))
            content = {
                "format": FORMAT,
                "kind": KIND,
                "run": path.name,
                "rewards": judge.weights,
                "overall": asdict(overall),
                "steps": {
                    str(number): asdict(agreement) for number, agreement in agreements.items()
                },
            }
            result = add_result(path, judge.name, content, rows_file)
        finally:
            rows_file.unlink(missing_ok=True)
    return Rescoring(path.name, judge.weights, agreements, overall, result)


# --- the new rewards -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Judge:
    name: str
    """Name of the result file."""
    where: str
    """Source of the functions, for messages."""
    rubric: Rubric
    scorer: Scorer

    @property
    def weights(self) -> dict[str, float]:
        return dict(zip(self.rubric.names, self.rubric.weights, strict=True))


def _task_judge(loaded: LoadedConfig, task: object) -> _Judge:
    resolved_task = rollout_builder.task_of(loaded.config, task)
    if not resolved_task.has("get_reward_funcs") and resolved_task.has("get_environment"):
        raise TaskError(
            f"{resolved_task.described} has no get_reward_funcs: its environment gave the rewards, turn by turn, which cannot be "
            "computed again from the record. Give --rewards MODULE:FUNCTION, functions that judge what was recorded."
        )
    if not resolved_task.has("get_reward_funcs"):
        raise TaskError(resolved_task.missing("get_reward_funcs", "rl"))
    resolved_task.check_signature("get_reward_funcs")
    schema = resolved_task.config_schema()
    config = (with_task_schema(loaded, schema) if schema else loaded).config
    tokenizer = rollout_builder.LazyTokenizer(config)
    rubric = rollout_builder.task_rubric(config, resolved_task, tokenizer)
    assert rubric is not None
    scorer = rollout_builder.build_scorer(config, resolved_task, tokenizer, rubric)
    origin = f"{resolved_task.described}: get_reward_funcs"
    return _Judge(f"rescored-{resolved_task.name}", origin, rubric, scorer)


def _named_judge(loaded: LoadedConfig, rewards: Sequence[str]) -> _Judge:
    answer_column = loaded.config.rewards.answer_column
    rubric = named_rubric(rewards, answer_column, "--rewards")
    arguments = {"rewards": list(rewards), "answer_column": answer_column}
    limit = loaded.config.rewards.time_limit
    if rubric.stateful or loaded.config.rewards.in_process:
        scorer = InProcessScorer(rubric, time_limit=limit)
    else:
        scorer = RewardWorkers(
            "groupwise.training.review.rescore:named_scorer",
            arguments,
            workers=loaded.config.rewards.workers,
            time_limit=limit,
            start_limit=loaded.config.rewards.start_limit,
        )
    return _Judge(f"rescored-{'-'.join(rubric.names)}"[:100], "--rewards", rubric, scorer)


def named_scorer(rewards: Sequence[str], answer_column: str | None) -> RubricScorer:
    """The factory that reward workers call for rewards by name."""
    return RubricScorer(named_rubric(rewards, answer_column, "--rewards"))


def _check_needs(judge: _Judge, groups: Sequence[Group]) -> None:
    """Raise TaskError if a function needs data that the record does not have."""
    for group in groups:
        judge.rubric.check_rows({group.example.index: group.example.columns})
    tokens_missing = any(
        rollout.completion and not rollout.completion_ids
        for group in groups
        for rollout in group.rollouts
    )
    for name, function in zip(judge.rubric.names, judge.rubric.functions, strict=True):
        if tokens_missing and "completion_ids" in inspect.signature(function).parameters:
            raise TaskError(
                f"{judge.where}: `{name}` asks for completion_ids, but the run did not keep tokens (run.keep_tokens). "
                "Rewards that read the text can be used."
            )


# --- scoring -------------------------------------------------------------------------------------


async def _rescore_steps(
    store: Store,
    draws_by_step: dict[int, frozenset[int]],
    judge: _Judge,
    max_steps: int,
    file: BinaryIO,
) -> dict[int, _Tally]:
    """Score the rollouts again and write them to `file`, step by step. Returns a tally of each step."""
    tallies: dict[int, _Tally] = {}
    try:
        for step, draws in draws_by_step.items():
            pairs = [_before_scoring(group) for group in store.groups(step) if group.draw in draws]
            _check_needs(judge, [unscored for _, unscored in pairs])
            rescored_groups = await gather_all(
                score_group(judge.scorer, unscored, step, max_steps)
                for _, unscored in pairs
                if unscored.rollouts
            )
            by_draw = {group.draw: group for group in rescored_groups}
            groups = [
                _with_ranks(_pair_rollouts(step + 1, old, by_draw.get(old.draw)))
                for old, _ in pairs
            ]
            tallies[step + 1] = _tally(groups, judge.rubric.names)
            for row in chain.from_iterable(groups):
                text = json.dumps(atomic_files.without_nan(asdict(row)), ensure_ascii=False)
                file.write(text.encode("utf-8", "backslashreplace") + b"\n")
    finally:
        await judge.scorer.close()
    return tallies


def _before_scoring(group: Group) -> tuple[Group, Group]:
    """The rollouts of a group that can be scored: as recorded, and with their scores removed.

    Rollouts that failed in an environment are left out, because they never reached their end.
    """
    rollouts = [rollout for rollout in group.rollouts if _can_be_judged(rollout)]
    unscored = [
        replace(rollout, outcome="pending", reason=None, reward=None, parts=(), notes={})
        for rollout in rollouts
    ]
    return replace(group, rollouts=tuple(rollouts)), replace(group, rollouts=tuple(unscored))


def _can_be_judged(rollout: Rollout) -> bool:
    has_environment_text = any(segment.source == "environment" for segment in rollout.segments)
    return rollout.outcome == "scored" or (
        rollout.outcome != "pending" and not has_environment_text
    )


def _pair_rollouts(step: int, old: Group, new: Group | None) -> list[Rescored]:
    if new is None:
        return []
    return [
        Rescored(
            step=step,
            group=old.draw + 1,
            rollout=before.member + 1,
            attempt=before.attempt,
            example=old.example.index,
            completion=before.completion,
            old=before.reward,
            new=after.reward,
            old_parts=before.part_values,
            new_parts=after.part_values,
            old_outcome=before.outcome,
            new_outcome=after.outcome,
            reason=after.reason,
            failed_rewards=after.notes.get("failed_rewards", {}),
        )
        for before, after in zip(old.rollouts, new.rollouts, strict=True)
    ]


# --- comparison of old and new -------------------------------------------------------------------


def _reward_pairs(rows: Sequence[Rescored]) -> list[tuple[float, float]]:
    return [(row.old, row.new) for row in rows if row.old is not None and row.new is not None]


def _with_ranks(group: Sequence[Rescored]) -> list[Rescored]:
    """The rollouts of a group with their ranks."""
    pairs = _reward_pairs(group)
    old_rewards, new_rewards = [x for x, _ in pairs], [y for _, y in pairs]
    return [
        row
        if row.old is None or row.new is None
        else replace(
            row, old_rank=_rank(row.old, old_rewards), new_rank=_rank(row.new, new_rewards)
        )
        for row in group
    ]


def _rank(value: float, values: Sequence[float]) -> float:
    better_count = sum(other_value > value for other_value in values)
    return better_count + (1 + sum(other_value == value for other_value in values)) / 2


@dataclass(frozen=True, slots=True)
class _Tally:
    """A step's contribution to the overall result: sums and squares, so that its rollouts need not be kept."""

    rollouts: int
    moved: int
    failed: int
    scored: int
    sums: tuple[float, float]
    """Sums of the old and of the new totals, over rollouts with both scores."""
    squares: tuple[float, float, float]
    """Sums of squares of the old and of the new totals and sum of their products, all about the step's means."""
    lowest: tuple[float, float]
    highest: tuple[float, float]
    pairs: int
    """Number of pairs that are not tied on both sides."""
    alike: int
    """Number of these pairs that both sides order alike."""
    reasons: dict[str, int]
    unanswered: dict[str, int]

    @property
    def means(self) -> tuple[float, float]:
        return self.sums[0] / self.scored, self.sums[1] / self.scored


def _tally(groups: Sequence[Sequence[Rescored]], names: Sequence[str]) -> _Tally:
    rows = [row for group in groups for row in group]
    pairs = _reward_pairs(rows)
    old, new = [x for x, _ in pairs], [y for _, y in pairs]
    mean_old, mean_new = (fmean(old), fmean(new)) if pairs else (0.0, 0.0)
    orders_agree = [agrees for group in groups for agrees in _order_agreements(group)]
    # The reason why a rollout was not scored; if it was, the reasons why rewards without weight failed.
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row.failed_rewards.values() if row.reason is None else (row.reason,))
    return _Tally(
        rollouts=len(rows),
        moved=sum(row.ranks_moved > 0 for row in rows),
        failed=sum(row.new is None for row in rows),
        scored=len(pairs),
        sums=(fsum(old), fsum(new)),
        squares=(
            fsum((x - mean_old) * (x - mean_old) for x in old),
            fsum((y - mean_new) * (y - mean_new) for y in new),
            fsum((x - mean_old) * (y - mean_new) for x, y in pairs),
        ),
        lowest=(min(old, default=inf), min(new, default=inf)),
        highest=(max(old, default=-inf), max(new, default=-inf)),
        pairs=len(orders_agree),
        alike=sum(orders_agree),
        reasons=dict(reasons.most_common(KEPT_REASONS)),
        unanswered=Counter(
            name
            for row in rows
            for name in names
            if name in row.failed_rewards or name not in row.new_parts
        ),
    )


def _agreement(tallies: Sequence[_Tally]) -> Agreement:
    """Combine the tallies of several steps."""
    scored_tallies = [tally for tally in tallies if tally.scored]
    scored_count = sum(tally.scored for tally in scored_tallies)
    pairs = sum(tally.pairs for tally in scored_tallies)
    means = _means(scored_tallies, scored_count) if scored_count else (None, None)
    return Agreement(
        rollouts=sum(tally.rollouts for tally in tallies),
        scored=scored_count,
        old=means[0],
        new=means[1],
        correlation=_correlation(scored_tallies, scored_count),
        agreement=sum(tally.alike for tally in scored_tallies) / pairs if pairs else None,
        moved=sum(tally.moved for tally in tallies),
        failed=sum(tally.failed for tally in tallies),
        reasons=dict(_sum_counts(tally.reasons for tally in tallies).most_common(SHOWN_REASONS)),
        unanswered=dict(_sum_counts(tally.unanswered for tally in tallies)),
    )


def _sum_counts(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def _means(tallies: Sequence[_Tally], scored_count: int) -> tuple[float, float]:
    return (
        fsum(tally.sums[0] for tally in tallies) / scored_count,
        fsum(tally.sums[1] for tally in tallies) / scored_count,
    )


def _correlation(tallies: Sequence[_Tally], scored_count: int) -> float | None:
    """Pearson's correlation over all steps; None if either side is constant.

    Each step contributes its squares about its own mean, and the distance of its mean from the overall mean.
    """
    spread = [
        max(tally.highest[side] for tally in tallies) > min(tally.lowest[side] for tally in tallies)
        for side in ((0, 1) if scored_count else ())
    ]
    if not spread or not all(spread):
        return None
    mean = _means(tallies, scored_count)
    deviations = [
        (tally, tally.means[0] - mean[0], tally.means[1] - mean[1], tally.scored)
        for tally in tallies
    ]
    old = fsum(tally.squares[0] + n * x * x for tally, x, _, n in deviations)
    new = fsum(tally.squares[1] + n * y * y for tally, _, y, n in deviations)
    covariance = fsum(tally.squares[2] + n * x * y for tally, x, y, n in deviations)
    return max(-1.0, min(1.0, covariance / sqrt(old * new))) if old and new else None


def _order_agreements(group: Sequence[Rescored]) -> Iterator[bool]:
    """Whether both sides order a pair of a group alike, for each that is not tied on both sides."""
    for (x_old, x_new), (y_old, y_new) in combinations(_reward_pairs(group), 2):
        old_order, new_order = _sign(x_old - y_old), _sign(x_new - y_new)
        if old_order or new_order:
            yield old_order == new_order


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
