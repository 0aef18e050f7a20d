"""Which rewards can score a service's text, and which are left out because they judge tokens."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.core.errors import TaskError
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.training.generation.config import read_options
from groupwise.training.generation.prompts import read_prompts
from groupwise.training.generation.scoring import (
    Scoring,
    build_scoring,
    task_scorer_for_worker,
    without_tokens,
)


def text(completions: Any, **_: Any) -> list[float]:
    return [1.0] * len(completions)


def tokens(completion_ids: Any, **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def refused(rubric: Rubric) -> str:
    with pytest.raises(TaskError) as caught:
        without_tokens(rubric)
    return str(caught.value)


def test_where_none_is_left_or_none_counts_it_is_refused() -> None:
    message = refused(Rubric([tokens], where="Task t"))
    assert message.startswith("`tokens` asks for completion_ids, but a service gives text")
    assert "Task t: no other reward" in message
    assert "every weight is 0" in refused(Rubric([tokens, (text, 0.0)]))


def test_each_label_has_to_keep_a_reward() -> None:
    router = Router({"a": Rubric([text, tokens]), "b": Rubric([(text, 3.0)])})
    left, out = without_tokens(router)
    assert out == ("a/tokens",)
    assert isinstance(left, Router)
    assert (left.names, left.weights) == (("a/text", "b/text"), (1.0, 3.0))
    assert left.label_of({"task": "b"}) == "b"
    assert "no other reward" in refused(Router({"a": Rubric([text]), "b": Rubric([tokens])}))


def scoring(**options: Any) -> Scoring:
    config = read_options({"output": "o", **options})
    made = build_scoring(config, read_prompts(config, {"model": "m"}))
    assert made is not None
    return made


def test_wordle_is_scored_without_its_part_for_length() -> None:
    made = scoring(task_module="wordle", min_reward=0.5)
    assert made.left_out == ("over_length",)
    worker = task_scorer_for_worker({"model": {"name": "tiny"}}, "wordle")
    assert worker.rubric is not None
    assert worker.rubric.names == (
        "format", "dictionary", "repeated", "constraints", "all_satisfied",
    )  # fmt: skip
