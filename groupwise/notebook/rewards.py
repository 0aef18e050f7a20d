"""The rewards of a notebook: functions made from the config, and functions that the user passes instead or in addition."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from groupwise.core.construct import accepted_parameters
from groupwise.core.errors import TaskError
from groupwise.core.reward_call.call import check_function, name_of
from groupwise.core.reward_call.tags import Tag, Tags, after_reasoning, marks
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import ACCURACY
from groupwise.notebook.datasets import dataset_of, prepare_datasets
from groupwise.notebook.rows import Kind, kind_of
from groupwise.notebook.rubrics import Rubric as Criteria
from groupwise.notebook.rubrics import RubricSet
from groupwise.tasks.data.chat import Row
from groupwise.tasks.rewards.answers import last_number, literal_number
from groupwise.tasks.rewards.gold import gold_answers, gold_of_row
from groupwise.tasks.rewards.mathematics import MathAnswer, answer_of, in_words
from groupwise.tasks.rewards.nesting import update_reward_wrapper
from groupwise.tasks.rewards.overlap import words
from groupwise.tasks.rewards.registry import get_reward_funcs, registered_rewards
from groupwise.tasks.rewards.registry import reward as entered
from groupwise.tasks.rewards.rubric import Rubric

Reward: TypeAlias = Callable[..., Any]
"""f(prompts, completions, **columns) -> list of numbers, None for rows to which it does not apply. Prompts and completions are text."""
RewardSpec: TypeAlias = Reward | str | Mapping[str, Any] | Criteria | RubricSet
"""A function, the name of one (with its parameters, in a mapping), or rubrics."""
RewardList: TypeAlias = Sequence[RewardSpec | tuple[RewardSpec, float]]
"""Rewards, some of them with a weight."""

NO_CHAT = "string indices must be integers"
"""Python's error message for `completion[0]["content"]`."""
TEXTS = "Prompts and completions are texts in a notebook, no chats: take `completion`, not `completion[0]['content']`."
_KINDS: dict[str, Kind] = {"openrubrics": "rubric", "gsm8k": "numeric", "arithmetic": "numeric"}


def register_reward(name: str, function: Reward) -> None:
    """Register a reward under a name that can then be used in lists of rewards. Raises TaskError if another reward has the name."""
    if not isinstance(cast("object", name), str) or not name.isidentifier():
        raise TaskError(
            f"A reward cannot be called {name!r}: give a name of letters, digits and underscores."
        )
    check_function(function, "register_reward")

    def reward(**columns: Any) -> Any:
        return function(**columns)

    try:
        entered(name)(update_reward_wrapper(function, reward, name))
    except ValueError as error:
        raise TaskError(f"{error}. Choose another name.") from error


def create_reward_functions(
    config: TrainingConfig, rows: Sequence[Row] | None = None
) -> list[Reward]:
    """The rewards of a config: `match_format`, and by its dataset `rubric_overlap` or `math_answer`.

    The kind of data is taken from `rows`; without them it is known for built-in datasets and looked up for others.
    """
    tags = config.tags
    if rows is not None:
        kind = kind_of(rows)
    elif (name := dataset_of(config)) in _KINDS:
        kind = _KINDS[name]
    else:
        kind = kind_of(prepare_datasets(config)[0])
    layout = {
        "name": "match_format",
        "reasoning_tag": _plain_tag(tags.reasoning),
        "answer_tag": _plain_tag(tags.answer),
    }
    answers = {"name": "math_answer", "tolerant": True, "answer_tag": _plain_tag(tags.answer)}
    overlap = {"name": "rubric_overlap", "answer_column": "reference"}
    second = answers if kind == "numeric" else overlap
    return [function for function, _ in get_reward_funcs([layout, second])]


def rewards_of(
    config: TrainingConfig,
    rows: Sequence[Row],
    reward_functions: RewardList | None = None,
    extra_reward_functions: RewardList | None = (),
) -> Rubric:
    """The rewards of a training: `reward_functions` replace those of the config; `extra_reward_functions` are added in either case."""
    if reward_functions is None:
        base_rewards = create_reward_functions(config, rows)
    else:
        base_rewards = _check_rewards("reward_functions", reward_functions, config)
    rewards = [
        *base_rewards,
        *_check_rewards("extra_reward_functions", extra_reward_functions, config),
    ]
    if not rewards:
        raise TaskError(
            "There is no reward function: reward_functions is empty. Give at least one, or leave it out."
        )
    if kind_of(rows) == "rubric":
        return Rubric(rewards, where="reward_functions")
    if any(name_of(_function_of(reward)) == ACCURACY for reward in rewards):
        raise TaskError(
            f"A reward function is called {ACCURACY!r}, as is what is measured beside the rewards, the share of right answers. Give it "
            "another name: right, for example."
        )
    tags = config.tags

    def accuracy(completions: Sequence[CompletionText], **columns: Any) -> list[float]:
        return grades(tags, completions, tolerant=False, **columns)

    return Rubric([*rewards, (accuracy, 0.0)], where="reward_functions")


def _check_rewards(parameter_name: str, rewards: object, config: TrainingConfig) -> list[Any]:
    if rewards is None:
        return []
    if callable(rewards) or isinstance(rewards, str):
        reward_text = (
            repr(rewards) if isinstance(rewards, str) else getattr(rewards, "__name__", "f")
        )
        raise TaskError(
            f"{parameter_name} is one reward; give a list, {parameter_name}=[{reward_text}]."
        )
    if not isinstance(rewards, list | tuple):
        raise TaskError(
            f"{parameter_name} is of the type {type(rewards).__name__}; give a list of functions, or of names of rewards."
        )
    return [
        _make_reward(parameter_name, reward, config.tags)
        for reward in cast("Sequence[Any]", rewards)
    ]


def _make_reward(parameter_name: str, reward: Any, tags: Tags) -> Any:
    """A function on texts, or a pair with its weight."""
    if isinstance(reward, list | tuple):
        pair = cast("Sequence[Any]", reward)
        if len(pair) != 2:
            raise TaskError(
                f"A reward is {pair!r}; give a function or a name, or a pair with its weight."
            )
        made_reward = _make_reward(parameter_name, pair[0], tags)
        return _function_of(made_reward), pair[1]
    if isinstance(reward, str | Mapping):
        section: dict[str, Any] = {"name": reward} if isinstance(reward, str) else {**reward}
        kind = registered_rewards().get(str(section.get("name")))
        if inspect.isclass(kind):
            # A reward that looks for marks uses those of the config, unless other marks are passed to it.
            accepted = {parameter.name for parameter in accepted_parameters(kind)}
            config_tags = {"reasoning_tag": tags.reasoning, "answer_tag": tags.answer}
            default_tags = {
                name: _plain_tag(tag) for name, tag in config_tags.items() if name in accepted
            }
            section = {**default_tags, **section}
        [(function, weight)] = get_reward_funcs([section], where=parameter_name)
        return _on_texts(function), weight
    return _on_texts(reward.reward() if isinstance(reward, Criteria | RubricSet) else reward)


def _function_of(reward: Any) -> Any:
    return cast("tuple[Any, float]", reward)[0] if isinstance(reward, tuple) else reward


def _on_texts(given: Any) -> Any:
    """Adapts a reward that expects text: in a notebook, prompts and completions are text where the core has chats."""
    check_function(given, "reward_functions")
    function = given

    def reward(**columns: Any) -> Any:
        for name in {"prompts", "completions"} & columns.keys():
            # A text stays as it is; a chat becomes the text of its last message.
            columns[name] = [
                content
                if isinstance(content, str)
                else completion_text([{**content[-1], "role": "assistant"}])
                for content in columns[name]
            ]
        try:
            return function(**columns)
        except TypeError as error:
            if NO_CHAT in str(error):
                error.add_note(TEXTS)
            raise

    return update_reward_wrapper(function, reward, name_of(function))


def _plain_tag(tag: Tag) -> str | list[str]:
    return tag if isinstance(tag, str) else list(tag)


def grades(
    tags: Tags, completions: Sequence[CompletionText], *, tolerant: bool, **columns: Any
) -> list[float]:
    """How correct each completion is, on the scale of `math_answer`, independently of its rewards.

    Rewards require the config's marks; a metric should distinguish a model that does not know from one that writes no marks. So the
    answer is the text between the marks (or in a \\boxed{}). If there is none, it is the last number of the text if the gold answer
    is a number, else the last line. A gold answer in words is also right if the text ends with it, as in `The capital is Tokyo.`
    """
    golds = gold_answers(columns, len(completions), tag=tags.answer, boxes=True)
    pairs = zip(completions, golds, strict=True)
    grade = MathAnswer(tolerant=tolerant, answer_tag=tags.answer)
    return grade([with_marks(tags, completion, forms) for completion, forms in pairs], **columns)


def is_numeric(tags: Tags, answer: Any) -> bool:
    """True if a gold answer is a number."""
    return _has_number(gold_of_row({"answer": answer}, tag=tags.answer, boxes=True))


def with_marks(tags: Tags, completion: CompletionText, forms: Sequence[str]) -> str:
    """The text with its answer between marks; `forms` are those in which the gold answer is accepted."""
    text = after_reasoning(completion_text(completion), tags.reasoning)
    marked_answer = answer_of(text, tags.answer)
    lines = text.strip().splitlines()
    last_line = lines[-1].strip() if lines else ""
    last_words = words(marked_answer or last_line)
    for form in forms:  # a gold answer in words at the end of the text, as whole words
        end = words(form)
        if (
            end
            and literal_number(form) is None
            and in_words(form)
            and last_words[-len(end) :] == end
        ):
            answer = form
            break
    else:
        if marked_answer is not None:
            return text
        answer = last_number(text) if _has_number(forms) else last_line
    opening, closing = marks(tags.answer)
    return f"{opening}{answer}{closing}" if answer else text


def _has_number(forms: Sequence[str]) -> bool:
    return any(literal_number(form) is not None for form in forms)
