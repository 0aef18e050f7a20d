"""Scoring what was generated with the rewards that training uses, in the same worker processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise import task_parts
from groupwise.errors import TaskError
from groupwise.generation.config import GenerateConfig
from groupwise.generation.journal import Answers, Generation
from groupwise.generation.prompts import PROMPT, Item, Prompts
from groupwise.rewards.calling import RESERVED
from groupwise.rewards.inprocess import RubricScorer
from groupwise.rewards.registry import get_reward_funcs
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.scoring import MemberScore, Scorer, ScoreRequest
from groupwise.rewards.text import as_completion
from groupwise.rewards.workers import RewardWorkers
from groupwise.rollouts.asking import gather_all

Scores = dict[str, tuple[MemberScore, ...]]
"""By the row's key, one for each of its generations."""


def build_scorer(config: GenerateConfig, prompts: Prompts) -> Scorer | None:
    """What scores, or None where nothing is scored. Raises TaskError for rewards that cannot score these rows."""
    if not config.scores:
        return None
    rows = {item.index: _columns(item) for item in prompts.items}
    if prompts.task is None or prompts.task_config is None:
        rubric = _named(config.rewards, config.answer_column)
        _check(rubric, rows)
        arguments = {"rewards": list(config.rewards), "answer_column": config.answer_column}
        return RewardWorkers("groupwise.generation.scoring:scorer_for_worker", arguments)
    if not prompts.task.has("get_reward_funcs"):
        raise TaskError(prompts.task.missing("get_reward_funcs", "rl"))
    tokenizer = task_parts.LazyTokenizer(prompts.task_config)
    rubric = task_parts.task_rubric(prompts.task_config, prompts.task, tokenizer)
    assert rubric is not None, "the hook is there"
    _check(rubric, rows)
    return task_parts.build_scorer(prompts.task_config, prompts.task, tokenizer, rubric)


def scorer_for_worker(rewards: list[str], answer_column: str | None) -> RubricScorer:
    """The factory that reward workers call."""
    return RubricScorer(_named(rewards, answer_column), _no_metrics)


async def score_all(
    scorer: Scorer, items: Sequence[Item], answers: Answers, changed: Callable[[int], None]
) -> Scores:
    """The scores of each row that has generations; `changed` hears how many rows are scored."""
    scores: Scores = {}

    async def score(item: Item, generations: Sequence[Generation]) -> None:
        group = await scorer.score(_request(item, generations))
        scores[item.key] = group.members
        changed(len(scores))

    try:
        await scorer.start()
        each = [(item, answers.of(item.key)) for item in items]
        await gather_all(score(item, generations) for item, generations in each if generations)
    finally:
        await scorer.close()
    return scores


def _named(rewards: Sequence[str], answer_column: str | None) -> Rubric:
    return Rubric(
        get_reward_funcs(rewards, {"rewards": {"answer_column": answer_column}}), where="--reward"
    )


def _check(rubric: Rubric, rows: Mapping[int, dict[str, Any]]) -> None:
    for name, function in zip(rubric.names, rubric.functions, strict=True):
        if "completion_ids" in inspect.signature(function).parameters:
            raise TaskError(
                f"The reward `{name}` asks for completion_ids, but a service gives text and no tokens. Use one that reads completions."
            )
    rubric.check_rows(rows)


def _columns(item: Item) -> dict[str, Any]:
    return {
        name: value
        for name, value in item.columns.items()
        if name != PROMPT and name not in RESERVED
    }


def _request(item: Item, generations: Sequence[Generation]) -> ScoreRequest:
    count = len(generations)
    return ScoreRequest(
        draw=item.index,
        prompts=[item.prompt] * count,
        completions=[as_completion(item.prompt, each.text) for each in generations],
        completion_ids=[[] for _ in range(count)],
        columns={name: [value] * count for name, value in _columns(item).items()},
        global_step=0,
        max_steps=1,
    )


def _no_metrics(*_: Any) -> dict[str, Any]:
    return {}
