"""Scores generations with the rewards that training uses, in the same worker processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.core.errors import TaskError
from groupwise.core.interruption import gather_all
from groupwise.core.reward_call.call import RESERVED
from groupwise.core.reward_call.request import MemberScore, Scorer, ScoreRequest
from groupwise.core.reward_call.text import as_completion
from groupwise.tasks.rewards.inprocess import RubricScorer
from groupwise.tasks.rewards.registry import named_rubric
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rewards.workers import RewardWorkers
from groupwise.training import rollout_builder
from groupwise.training.generation.config import GenerateConfig
from groupwise.training.generation.journal import Answers, Generation
from groupwise.training.generation.prompts import PROMPT, Item, Prompts

Scores = dict[str, tuple[MemberScore, ...]]
"""The scores of a row's generations, by the row's key."""
TOKENS = "completion_ids"
"""An argument of reward functions that a service cannot fill: it reports how many tokens were billed, but not their ids."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scorer, and the rewards that it leaves out."""

    scorer: Scorer
    left_out: tuple[str, ...] = ()
    """Names of the parts that need token ids; the reward is the sum of the others."""


def build_scoring(config: GenerateConfig, prompts: Prompts) -> Scoring | None:
    """Build the scorer of these rows; None if nothing is scored. Raises TaskError for rewards that cannot score them."""
    if not config.scores:
        return None
    rows = {item.index: _reward_columns(item) for item in prompts.items}
    task, settings = prompts.task, prompts.task_config
    if task is None or settings is None:
        rubric, left_out = without_tokens(
            named_rubric(config.rewards, config.answer_column, "--reward")
        )
        rubric.check_rows(rows)
        arguments = {"rewards": list(config.rewards), "answer_column": config.answer_column}
        workers = RewardWorkers(
            "groupwise.training.generation.scoring:scorer_for_worker", arguments
        )
        return Scoring(workers, left_out)
    if not task.has("get_reward_funcs"):
        raise TaskError(task.missing("get_reward_funcs", "rl"))
    tokenizer = rollout_builder.LazyTokenizer(settings)
    full_rubric = rollout_builder.task_rubric(settings, task, tokenizer)
    assert full_rubric is not None, "the hook is there"
    rubric, left_out = without_tokens(full_rubric)
    rubric.check_rows(rows)
    if not rollout_builder.scores_in_workers(settings, task, rubric):
        scorer = rollout_builder.build_scorer(settings, task, tokenizer, rubric)
    else:
        scorer = RewardWorkers(
            "groupwise.training.generation.scoring:task_scorer_for_worker",
            {"config": settings.model_dump(mode="json"), "task": task.spec},
            workers=settings.rewards.workers,
            time_limit=settings.rewards.time_limit,
            start_limit=settings.rewards.start_limit,
        )
    return Scoring(scorer, left_out)


def scorer_for_worker(rewards: list[str], answer_column: str | None) -> RubricScorer:
    """The factory that reward workers call for rewards by name."""
    return RubricScorer(without_tokens(named_rubric(rewards, answer_column, "--reward"))[0])


def task_scorer_for_worker(config: Mapping[str, Any], task: str) -> RubricScorer:
    """The factory that reward workers call for a task's rewards."""
    scorer = rollout_builder.scorer_for_worker(config, task)
    assert scorer.rubric is not None, "the hook is there"
    return replace(scorer, rubric=without_tokens(scorer.rubric)[0])


def without_tokens(rubric: Rubric) -> tuple[Rubric, tuple[str, ...]]:
    """The rewards that need only text, and the names of the others. Raises TaskError if none of the former has any weight."""
    token_rewards = tuple(
        name
        for name, function in zip(rubric.names, rubric.functions, strict=True)
        if TOKENS in inspect.signature(function).parameters
    )
    if not token_rewards:
        return rubric, ()
    try:
        return rubric.without(token_rewards), token_rewards
    except TaskError as nothing_left:
        names = ", ".join(f"`{name}`" for name in token_rewards)
        raise TaskError(
            f"{names} {'asks' if len(token_rewards) == 1 else 'ask'} for {TOKENS}, but a service gives text and no tokens. "
            f"{nothing_left} Use rewards that read completions."
        ) from nothing_left


async def score_all(
    scorer: Scorer, items: Sequence[Item], answers: Answers, on_change: Callable[[int], None]
) -> Scores:
    """Score each row that has generations; `on_change` is called with the number of scored rows."""
    scores: Scores = {}

    async def score(item: Item, generations: Sequence[Generation]) -> None:
        count = len(generations)
        group = await scorer.score(
            ScoreRequest(
                draw=item.index,
                prompts=[item.prompt] * count,
                completions=[
                    as_completion(item.prompt, generation.text) for generation in generations
                ],
                completion_ids=[[] for _ in range(count)],
                columns={name: [value] * count for name, value in _reward_columns(item).items()},
                global_step=0,
                max_steps=1,
            )
        )
        scores[item.key] = group.members
        on_change(len(scores))

    try:
        await scorer.start()
        pairs = [(item, answers.of(item.key)) for item in items]
        await gather_all(score(item, generations) for item, generations in pairs if generations)
    finally:
        await scorer.close()
    return scores


def _reward_columns(item: Item) -> dict[str, Any]:
    return {
        name: value
        for name, value in item.columns.items()
        if name != PROMPT and name not in RESERVED
    }
