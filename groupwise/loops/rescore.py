"""Recorded rollouts judged anew: what would other rewards have said about the same completions?

The completions stand in the record of a run; here they go through the reward functions of a task file, or through functions named
one by one, in the same killable workers as in training. What comes back is set beside what was recorded: totals step by step, how
far the two agree, and the rollouts whose place in their group changed, because groups are what is learnt from. The record is
only read; the result is a file of its own in `results/`.

Rewards see what was recorded: texts and columns as JSON keeps them, token ids if the run kept them (`run.keep_tokens`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import Any

from groupwise import build
from groupwise.config import LoadedConfig, RunConfig, load_config, with_task_schema
from groupwise.errors import RunNotFoundError, TaskError, UsageError
from groupwise.loops.awaiting import gather_all, run_to_end
from groupwise.plugins import load
from groupwise.rewards.inprocess import InProcessScorer, RubricScorer
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.scoring import Scorer
from groupwise.rewards.workers import RewardWorkers
from groupwise.rollouts.score import score_group
from groupwise.runs.durable import check_can_write
from groupwise.runs.find import resolve
from groupwise.runs.folder import RECORD, add_result, read_config, result_file
from groupwise.runs.store import Store
from groupwise.tasks.contract import load_task
from groupwise.types import Group, Outcome, Rollout

FORMAT = 1
KIND = "rescoring"


@dataclass(frozen=True, slots=True)
class Rescored:
    """One rollout with the old verdict and the new one."""

    step: int
    draw: int
    member: int
    attempt: int
    example: int
    completion: str
    old: float | None
    """The recorded total; None unless it was scored."""
    new: float | None
    old_parts: dict[str, float | None]
    new_parts: dict[str, float | None]
    old_outcome: Outcome
    new_outcome: Outcome
    reason: str | None
    """Why it could not be scored now."""
    old_rank: float | None = None
    """Place in its group among those that both scored, 1 for the best; the mean place where several are equal."""
    new_rank: float | None = None

    @property
    def moved(self) -> float:
        """By how many places."""
        if self.old_rank is None or self.new_rank is None:
            return 0.0
        return abs(self.new_rank - self.old_rank)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Old and new rewards of some rollouts."""

    rollouts: int
    scored: int
    """Those that both could score; all that follows is about them."""
    old: float | None
    new: float | None
    """Mean totals."""
    correlation: float | None
    """Pearson's, over the rollouts; None where either has no spread."""
    agreement: float | None
    """Of the pairs within a group that either tells apart, the share that both put in the same order."""
    moved: int
    """Rollouts whose place in their group changed."""
    failed: int
    """Rollouts that could not be scored now."""


@dataclass(frozen=True, slots=True)
class Rescoring:
    """What came of it."""

    run: str
    rewards: dict[str, float]
    """The new reward functions with their weights."""
    steps: dict[int, Agreement]
    overall: Agreement
    rows: tuple[Rescored, ...]
    path: Path
    """Where all of it was written."""

    def summary(self, rows: int = 0) -> dict[str, Any]:
        """Plain data, for `--json`, with so many of the rollouts that moved, the farthest first."""
        return {
            "run": self.run,
            "rewards": self.rewards,
            "overall": asdict(self.overall),
            "steps": {str(step): asdict(each) for step, each in self.steps.items()},
            "moved": [asdict(row) for row in self.farthest(rows)],
            "results": str(self.path),
        }

    def farthest(self, count: int) -> list[Rescored]:
        """The rollouts whose place in the group changed most."""
        moved = [row for row in self.rows if row.moved]
        return sorted(moved, key=lambda row: -row.moved)[:count]


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
    """Score recorded rollouts with the rewards of a task, or with functions (`module:function`): `groupwise runs rescore`.

    `overrides` change the run's config for the task; `limit` takes the last so many groups. Raises `UsageError`.
    """
    if (task is None) == (not rewards):
        raise UsageError("Give either --task-module or --rewards: whose rewards are to judge?")
    path = resolve(run, runs_dir).path
    with Store.open(path / RECORD, readonly=True) as store:
        chosen = _chosen(store, path.name, step, limit)
        loaded = load_config(read_config(path), overrides)
        judge = _task_judge(loaded, task) if task is not None else _named_judge(loaded, rewards)
        check_can_write(result_file(path, judge.name))
        steps = store.get_meta().get("max_steps") or len(chosen)
        rows = run_to_end(_rescored(store, chosen, judge, steps))
    by_step = {number: [row for row in rows if row.step == number] for number in chosen}
    agreements = {number: _agreement(some) for number, some in by_step.items()}
    overall = _agreement(rows)
    content = {
        "format": FORMAT,
        "kind": KIND,
        "run": path.name,
        "rewards": judge.weights,
        "overall": asdict(overall),
        "steps": {str(number): asdict(each) for number, each in agreements.items()},
        "rows": [asdict(row) for row in rows],
    }
    written = add_result(path, judge.name, content)
    return Rescoring(path.name, judge.weights, agreements, overall, tuple(rows), written)


# --- who judges ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Judge:
    name: str
    """Of the result file."""
    where: str
    """Who gave the functions, in messages."""
    rubric: Rubric
    scorer: Scorer

    @property
    def weights(self) -> dict[str, float]:
        return dict(zip(self.rubric.names, self.rubric.weights, strict=True))


def _task_judge(loaded: LoadedConfig, task: object) -> _Judge:
    found = load_task(task)
    if not found.has("get_reward_funcs"):
        raise TaskError(found.missing("get_reward_funcs", "rl"))
    found.check_signature("get_reward_funcs")
    schema = found.config_schema()
    config = (with_task_schema(loaded, schema) if schema else loaded).config
    tokenizer = build.LazyTokenizer(config)
    rubric = build.task_rubric(config, found, tokenizer)
    assert rubric is not None
    scorer = build.build_scorer(config, found, tokenizer, rubric)
    where = f"{found.described}: get_reward_funcs"
    return _Judge(f"rescored-{found.name}", where, rubric, scorer)


def _named_judge(loaded: LoadedConfig, rewards: Sequence[str]) -> _Judge:
    plugins = [load(spec, kind="reward function") for spec in rewards]
    rubric = Rubric([plugin.object for plugin in plugins], where="--rewards")
    scorer = _scorer_of(loaded.config, rubric, [plugin.spec for plugin in plugins])
    return _Judge(f"rescored-{'-'.join(rubric.names)}"[:100], "--rewards", rubric, scorer)


def _scorer_of(config: RunConfig, rubric: Rubric, specs: list[str]) -> Scorer:
    limit = config.rewards.time_limit
    if rubric.stateful or config.rewards.in_process:
        return InProcessScorer(rubric, _no_metrics, time_limit=limit)
    return RewardWorkers(
        "groupwise.loops.rescore:named_scorer",
        {"rewards": specs},
        workers=config.rewards.workers,
        time_limit=limit,
        start_limit=config.rewards.start_limit,
    )


def named_scorer(rewards: Sequence[str]) -> RubricScorer:
    """The factory that reward workers call: functions by their names."""
    functions = [load(spec, kind="reward function").object for spec in rewards]
    return RubricScorer(Rubric(functions, where="--rewards"), _no_metrics)


def _no_metrics(*_: Any) -> dict[str, Any]:
    return {}


def _check_needs(judge: _Judge, groups: Sequence[Group]) -> None:
    """Raise TaskError if a function asks for what the record does not have."""
    for group in groups:
        judge.rubric.check_columns(group.example.columns, where=judge.where)
    forgotten = any(
        rollout.completion and not rollout.completion_ids
        for group in groups
        for rollout in group.rollouts
    )
    for name, function in zip(judge.rubric.names, judge.rubric.functions, strict=True):
        if forgotten and "completion_ids" in inspect.signature(function).parameters:
            raise TaskError(
                f"{judge.where}: `{name}` asks for completion_ids, but the run did not keep tokens (run.keep_tokens). "
                "Rewards that read the text can be used."
            )


# --- scoring -------------------------------------------------------------------------------------


def _chosen(
    store: Store, name: str, step: int | None, limit: int | None
) -> dict[int, frozenset[int]]:
    """The draws to be scored, by step: of one step or of all, and of these the last ones."""
    steps = {record.step: record.all_draws for record in store.steps()}
    if not steps:
        raise RunNotFoundError(f"The run {name!r} has recorded no step yet.")
    if step is not None and step not in steps:
        raise RunNotFoundError(
            f"The run {name!r} has no step {step}; it has the steps {min(steps)} to {max(steps)}."
        )
    draws = [(k, draw) for k, draws in steps.items() if step in (None, k) for draw in draws]
    kept = draws[-limit:] if limit else draws
    return {k: frozenset(draw for at, draw in kept if at == k) for k in dict(kept)}


async def _rescored(
    store: Store, chosen: dict[int, frozenset[int]], judge: _Judge, max_steps: int
) -> list[Rescored]:
    rows: list[Rescored] = []
    try:
        for step, draws in chosen.items():
            groups = [_forgotten(group) for group in store.groups(step) if group.draw in draws]
            _check_needs(judge, [group for _, group in groups])
            scored = await gather_all(
                score_group(judge.scorer, group, step, max_steps)
                for _, group in groups
                if group.rollouts
            )
            by_draw = {group.draw: group for group in scored}
            for old, _ in groups:
                rows.extend(_ranked(_beside(step, old, by_draw.get(old.draw))))
    finally:
        await judge.scorer.close()
    return rows


def _forgotten(group: Group) -> tuple[Group, Group]:
    """The rollouts of a group that can be judged, as recorded and as if they had never been judged.

    Those that failed in an environment are left out: they never came to an end.
    """
    kept = [rollout for rollout in group.rollouts if _ended(rollout)]
    blank = [
        replace(rollout, outcome="pending", reason=None, reward=None, parts=(), notes={})
        for rollout in kept
    ]
    return replace(group, rollouts=tuple(kept)), replace(group, rollouts=tuple(blank))


def _ended(rollout: Rollout) -> bool:
    answered = any(segment.source == "environment" for segment in rollout.segments)
    return rollout.outcome == "scored" or (rollout.outcome != "pending" and not answered)


def _beside(step: int, old: Group, new: Group | None) -> list[Rescored]:
    if new is None:
        return []
    return [
        Rescored(
            step=step,
            draw=old.draw,
            member=before.member,
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
        )
        for before, after in zip(old.rollouts, new.rollouts, strict=True)
    ]


# --- old beside new ------------------------------------------------------------------------------


def _both(rows: Sequence[Rescored]) -> list[tuple[float, float]]:
    return [(row.old, row.new) for row in rows if row.old is not None and row.new is not None]


def _ranked(group: Sequence[Rescored]) -> list[Rescored]:
    """The rollouts of a group with their places."""
    pairs = _both(group)
    old, new = [x for x, _ in pairs], [y for _, y in pairs]
    return [
        row
        if row.old is None or row.new is None
        else replace(row, old_rank=_rank(row.old, old), new_rank=_rank(row.new, new))
        for row in group
    ]


def _rank(value: float, values: Sequence[float]) -> float:
    better = sum(other > value for other in values)
    return better + (1 + sum(other == value for other in values)) / 2


def _agreement(rows: Sequence[Rescored]) -> Agreement:
    pairs = _both(rows)
    old, new = [x for x, _ in pairs], [y for _, y in pairs]
    alike = list(_ordered_alike(rows))
    return Agreement(
        rollouts=len(rows),
        scored=len(pairs),
        old=fmean(old) if old else None,
        new=fmean(new) if new else None,
        correlation=_correlation(old, new),
        agreement=fmean(alike) if alike else None,
        moved=sum(row.moved > 0 for row in rows),
        failed=sum(row.new is None for row in rows),
    )


def _ordered_alike(rows: Sequence[Rescored]) -> Iterator[bool]:
    """For each pair within a group that one of the two tells apart: whether both order it alike."""
    groups: dict[int, list[Rescored]] = {}
    for row in rows:
        groups.setdefault(row.draw, []).append(row)
    for group in groups.values():
        for (x_old, x_new), (y_old, y_new) in combinations(_both(group), 2):
            before, after = _sign(x_old - y_old), _sign(x_new - y_new)
            if before or after:
                yield before == after


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    try:
        return correlation(x, y)
    except StatisticsError:  # too few, or all the same
        return None
