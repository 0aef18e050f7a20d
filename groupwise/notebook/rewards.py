"""What a notebook rewards: functions that the config makes, and those that somebody gives instead or beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from groupwise.data.chat import Row
from groupwise.errors import TaskError
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.datasets import Kind, dataset_of, kind_of, prepare_datasets
from groupwise.notebook.grading import grades
from groupwise.rewards.calling import check_function, name_of
from groupwise.rewards.nesting import standing_for
from groupwise.rewards.registry import get_reward_funcs
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.tags import Tag
from groupwise.rewards.text import CompletionText, completion_text
from groupwise.types import Prompt

Reward: TypeAlias = Callable[..., Any]
"""f(prompts, completions, **columns) -> list of numbers, None where it does not apply. Prompts and completions are texts."""
Given: TypeAlias = Sequence[Reward | tuple[Reward, float]]
"""Rewards, some of them with a weight."""

ACCURACY = "accuracy"
"""The part that says whether an answer is right, recorded beside the others and not counted."""
NO_CHAT = "string indices must be integers"
"""What Python says to `completion[0]["content"]`."""
TEXTS = "Prompts and completions are texts in a notebook, no chats: take `completion`, not `completion[0]['content']`."
_KINDS: dict[str, Kind] = {"openrubrics": "rubric", "gsm8k": "numeric", "arithmetic": "numeric"}


def create_reward_functions(
    config: TrainingConfig, rows: Sequence[Row] | None = None
) -> list[Reward]:
    """The rewards of a config: `match_format`, and by its dataset `rubric_overlap` or `math_answer`.

    `rows` says what kind of data they are for; without it, that is known of built-in datasets, and looked up for others.
    """
    kind = _kind(config) if rows is None else kind_of(rows)
    tags = config.tags
    layout = {
        "name": "match_format",
        "reasoning_tag": _listed(tags.reasoning),
        "answer_tag": _listed(tags.answer),
    }
    answers = {"name": "math_answer", "tolerant": True, "answer_tag": _listed(tags.answer)}
    overlap = {"name": "rubric_overlap", "answer_column": "reference"}
    second = answers if kind == "numeric" else overlap
    return [function for function, _ in get_reward_funcs([layout, second])]


def rewards_of(
    config: TrainingConfig,
    rows: Sequence[Row],
    reward_functions: Given | None = None,
    extra_reward_functions: Given | None = (),
) -> Rubric:
    """What a training rewards: `reward_functions` instead of those of the config, `extra_reward_functions` beside either."""
    if reward_functions is None:
        chosen = create_reward_functions(config, rows)
    else:
        chosen = _given("reward_functions", reward_functions)
    counted = [*chosen, *_given("extra_reward_functions", extra_reward_functions)]
    if not counted:
        raise TaskError(
            "There is no reward function: reward_functions is empty. Give at least one, or leave it out."
        )
    measured = _accuracy(config, rows)
    if measured and any(name_of(_function(each)) == ACCURACY for each in counted):
        raise TaskError(
            f"A reward function is called {ACCURACY!r}, as is what is measured beside the rewards, the share of right answers. Give it "
            "another name: right, for example."
        )
    return Rubric([*counted, *measured], where="reward_functions")


def _given(name: str, given: object) -> list[Any]:
    if given is None:
        return []
    if callable(given):
        raise TaskError(
            f"{name} is one function; give a list, {name}=[{getattr(given, '__name__', 'f')}]."
        )
    if not isinstance(given, list | tuple):
        raise TaskError(f"{name} is of the type {type(given).__name__}; give a list of functions.")
    return [_on_texts(each) for each in cast("Sequence[Any]", given)]


def _function(given: Any) -> Any:
    return cast("tuple[Any, float]", given)[0] if isinstance(given, tuple) else given


def _on_texts(given: Any) -> Any:
    """A reward that is given texts where the core has chats: prompts and completions are text in a notebook."""
    if isinstance(given, list | tuple):
        pair = cast("Sequence[Any]", given)
        if len(pair) != 2:
            raise TaskError(f"A reward is {pair!r}; give a function, or (function, weight).")
        return _on_texts(pair[0]), pair[1]
    check_function(given, "reward_functions")
    function = given

    def reward(**columns: Any) -> Any:
        for name in {"prompts", "completions"} & columns.keys():
            columns[name] = [_text(each) for each in columns[name]]
        try:
            return function(**columns)
        except TypeError as error:
            if NO_CHAT in str(error):
                error.add_note(TEXTS)
            raise

    return standing_for(function, reward, name_of(function))


def _text(said: Prompt | CompletionText) -> str:
    """A text as it is; of a chat what was said last."""
    return said if isinstance(said, str) else completion_text([{**said[-1], "role": "assistant"}])


def _accuracy(config: TrainingConfig, rows: Sequence[Row]) -> list[tuple[Reward, float]]:
    if kind_of(rows) == "rubric":
        return []
    tags = config.tags

    def accuracy(completions: Sequence[CompletionText], **columns: Any) -> list[float]:
        return grades(tags, completions, tolerant=False, **columns)

    return [(accuracy, 0.0)]


def _kind(config: TrainingConfig) -> Kind:
    name = dataset_of(config)
    return _KINDS[name] if name in _KINDS else kind_of(prepare_datasets(config)[0])


def _listed(tag: Tag) -> str | list[str]:
    return tag if isinstance(tag, str) else list(tag)
