"""Crossword clues: the prompt gives a clue and how many letters the words of the answer have, `(3,4)`.

    task:
      source: my_clues.jsonl    # or a hub id; without it, 185 clues of general knowledge that come with the package

Rows have the columns `clue`, `answer` and perhaps `enumeration`; `task.columns` maps other column names. Without the
column, the enumeration is read from the end of the clue, or else counted from the answer. Rows that cannot be used are left
out and counted by the reason, or refused with `task.strict`.

The reward is `pure_accuracy`, 1 for the answer alone between its tags. No answer and no clue occurs in two
splits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from pydantic import BaseModel

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.call import RewardCallable
from groupwise.core.reward_call.tags import THINK
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.core.settings.schema import setting
from groupwise.core.settings.view import TaskSection
from groupwise.tasks.data.chat import Account, Rows
from groupwise.tasks.data.messages import Unusable
from groupwise.tasks.data.order import Stream
from groupwise.tasks.data.source_rows import keep_usable
from groupwise.tasks.data.sources import read_source
from groupwise.tasks.rewards.crossword import PureAccuracy, letters
from groupwise.tasks.rewards.registry import get_reward_funcs as rewards_named

INCLUDED = Path(__file__).parent / "clues" / "general_knowledge.jsonl"
"""Clues written for this project."""
COLUMNS = ("clue", "answer", "enumeration")
INSTRUCTION = (
    "Solve the crossword clue. The numbers in brackets say how many letters each word of the answer has. Think between <think> and "
    "</think>, then write nothing but the answer between <answer> and </answer>."
)

_AT_THE_END = re.compile(r"\(((?:[\s,'’-]*[0-9]{1,2})(?:[\s,'’-]+[0-9]{1,2})*[\s,'’-]*)\)\s*$")
"""An enumeration in brackets after a clue. Numbers have at most two digits, so `(1984)` does not match."""


class TaskConfig(TaskSection):
    """The `task:` section of a config for this task."""

    source: str | None = setting(
        None,
        "Hub id, file or folder with clues and answers; null: those that come with the package.",
    )
    source_config: str | None = setting(None, "Configuration of a dataset on the hub.")
    source_split: str = setting("train", "Split of the source, or a slice of one: train[:1000].")
    source_revision: str | None = setting(None, "Commit, tag or branch of a dataset on the hub.")
    columns: dict[str, str] = setting(
        {}, "Names of columns: clue, answer or enumeration, then the source's name for it."
    )
    choices: int | None = setting(
        None,
        "Number of answers shown in the prompt, in lower case and about equally long, one of them right, for models that know few "
        "words; null: none.",
        ge=2,
        le=20,
    )
    strict: bool = setting(
        False, "Refuse a row that cannot be used, instead of leaving it out and counting it."
    )
    train_size: int | None = setting(
        None, "Training clues; null: all that the other splits leave.", ge=1
    )
    validation_size: int = setting(16, "Held-out clues of a supervised run.", ge=1)
    eval_size: int = setting(32, "Held-out clues of evaluations.", ge=1)
    seed: int = setting(0, "Seed of the splits; the run has a seed of its own.", ge=0)


def get_config_schema() -> type[BaseModel]:
    """The config's `task:` section."""
    return TaskConfig


def get_rl_dataset(config: Any) -> Rows:
    """The training rows, with the columns `clue`, `answer` and `enumeration`."""
    return _rows_of_split(TaskConfig.of(config), "train")


def get_eval_dataset(config: Any) -> Rows:
    """The held-out rows. They are drawn first, so they do not depend on the sizes of the other splits."""
    return _rows_of_split(TaskConfig.of(config), "eval")


def get_sft_dataset(config: Any, tokenizer: Any) -> Rows:
    """The training rows with a completion that states the number of letters of the answer, then the answer."""
    return _with_completions(get_rl_dataset(config))


def get_sft_eval_dataset(config: Any, tokenizer: Any) -> Rows:
    """The validation rows, with completions in the same form."""
    return _with_completions(_rows_of_split(TaskConfig.of(config), "validation"))


def get_reward_funcs(config: Any, tokenizer: Any) -> list[tuple[RewardCallable, float]]:
    """`pure_accuracy`, which knows the number of letters from the column `enumeration`.

    If the prompt lists answers to choose from, merely mentioning the right one earns nothing.
    """
    unpaid = {} if TaskConfig.of(config).choices is None else {"word_bonus": 0.0, "occurrence": 0.0}
    return rewards_named([{"name": "pure_accuracy", **unpaid}], config)


def compute_metrics(
    prompts: Sequence[Any],
    completions: Sequence[CompletionText],
    dataset_rows: Sequence[Mapping[str, Any]],
    config: Any,
    tokenizer: Any,
) -> dict[str, Any]:
    """Shares of answers that are correct (as judged by the reward), that have the right number of letters, and that are present at all."""
    answers = [
        letters(THINK.last_answer(completion_text(completion)) or "") for completion in completions
    ]
    golds = [letters(row["answer"]) for row in dataset_rows]
    pairs = list(zip(answers, golds, strict=True))
    exact = PureAccuracy(word_bonus=0.0, occurrence=0.0)
    enumerations = [row["enumeration"] for row in dataset_rows]
    values = exact(
        completions, answer=[row["answer"] for row in dataset_rows], enumeration=enumerations
    )
    correct = [value == 1 for value in values]
    return {
        "metrics": {
            "accuracy": fmean(correct),
            "length_accuracy": fmean(len(answer) == len(gold) for answer, gold in pairs),
            "answered": fmean(answer != "" for answer in answers),
        },
        "correct": correct,
    }


# --- splits --------------------------------------------------------------------------------------


def _rows_of_split(task_config: TaskConfig, split_name: str) -> Rows:
    """The rows of one split. Rows with the same answer stay together, and a clue that is in an earlier split is left out."""
    for column in task_config.columns:
        if column not in COLUMNS:
            raise TaskError(f"task.columns: {column!r} is none of {', '.join(COLUMNS)}.")
    source_rows = read_source(
        task_config.source or str(INCLUDED),
        task_config.source_config,
        task_config.source_split,
        task_config.columns,
        revision=task_config.source_revision,
    )
    rows, left_out = keep_usable(
        source_rows,
        _clue_row,
        lambda row: (_normalise_case(row["clue"]), letters(row["answer"])),
        source=_source_name(task_config),
        strict=task_config.strict,
        remedy="Name those of clue and answer with task.columns.clue=NAME and task.columns.answer=NAME.",
    )
    by_answer: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_answer.setdefault(letters(row["answer"]), []).append(row)
    groups = iter(
        Stream("crossword", task_config.seed).sample(list(by_answer.values()), len(by_answer))
    )
    sizes = {
        "eval": task_config.eval_size,
        "validation": task_config.validation_size,
        "train": task_config.train_size,
    }
    used_clues: set[str] = set()
    for split, size in sizes.items():
        split_rows: list[dict[str, Any]] = []
        while (size is None or len(split_rows) < size) and (group := next(groups, None)):
            fresh = [row for row in group if _normalise_case(row["clue"]) not in used_clues]
            left_out["another split has the clue, with another answer"] += len(group) - len(fresh)
            split_rows.extend(fresh)
        if len(split_rows) < (size or 1):
            count = len(rows)
            training_part = (
                "what is left"
                if task_config.train_size is None
                else f"train_size {task_config.train_size}"
            )
            raise TaskError(
                f"{_source_name(task_config)} has {count} usable clues, too few for eval_size {task_config.eval_size}, "
                f"validation_size {task_config.validation_size} and {training_part} to train on; clues with the same "
                "answer go together. Make the splits smaller, or name a larger source."
            )
        if split == split_name:
            return Rows(_with_choices(split_rows[:size], task_config), Account(dict(+left_out)))
        used_clues.update(_normalise_case(row["clue"]) for row in split_rows[:size])
    raise AssertionError(split_name)


def _with_choices(rows: list[dict[str, Any]], task_config: TaskConfig) -> list[dict[str, Any]]:
    """The rows; if `task.choices` is set, each prompt also lists answers of the same split, one of which is right.

    The wrong ones are about as long as the right one, so counting letters does not reveal the answer.
    """
    if task_config.choices is None:
        return rows
    answers = list(dict.fromkeys(row["answer"].lower() for row in rows))
    rows_with_choices: list[dict[str, Any]] = []
    for row in rows:
        stream = Stream("crossword choices", task_config.seed, row["clue"])
        answer = row["answer"].lower()
        wrong_answers = stream.sample(
            [other for other in answers if other != answer], len(answers) - 1
        )
        wrong_answers.sort(key=lambda other: abs(len(letters(other)) - len(letters(answer))))
        choices = stream.among(
            answer, wrong_answers[: task_config.choices - 1], task_config.choices
        )
        system, question = row["prompt"]
        content = f"{question['content']}\nOne of: {', '.join(choices)}"
        rows_with_choices.append(
            {**row, "prompt": [system, {**question, "content": content}], "choices": choices}
        )
    return rows_with_choices


def _normalise_case(text: str) -> str:
    return " ".join(text.split()).casefold()


# --- rows ----------------------------------------------------------------------------------------


def _clue_row(source_row: Mapping[str, Any]) -> dict[str, Any]:
    clue, answer = _required_text(source_row, "clue"), _required_text(source_row, "answer")
    if unscorable := _unscorable({"answer": answer}):
        raise Unusable("the answer is not made of letters A–Z") from unscorable
    ending = _AT_THE_END.search(clue)
    clue = clue[: ending.start()].rstrip() if ending else clue
    if not clue:
        raise Unusable("the clue is empty")
    enumeration_cell = _cell_text(source_row.get("enumeration"))
    enumeration = enumeration_cell or (
        ending.group(1).strip() if ending else _letter_counts(answer)
    )
    if unscorable := _unscorable({"answer": answer, "enumeration": enumeration}):
        raise Unusable("the enumeration does not fit the answer") from unscorable
    return {
        "prompt": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": f"{clue} ({enumeration})"},
        ],
        "clue": clue,
        "answer": answer,
        "enumeration": enumeration,
    }


def _unscorable(row: Mapping[str, Any]) -> ValueError | None:
    """The reason why the reward cannot score a row; None if it can."""
    try:
        PureAccuracy().check_row(row)
    except ValueError as reason:
        return reason
    return None


def _required_text(source_row: Mapping[str, Any], column: str) -> str:
    value = source_row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise Unusable(f"the {column} is {'not text' if value else 'empty or missing'}")
    return value.strip()


def _cell_text(value: Any) -> str:
    """A column's enumeration as text, from text, a number or a list of numbers; empty if the cell is empty."""
    if isinstance(value, list | tuple):
        return ",".join(_cell_text(item) for item in cast("Sequence[Any]", value))
    if isinstance(value, float):  # tables turn an integer column with gaps into floats
        return str(int(value)) if value.is_integer() else ""
    return "" if value is None else str(value).strip().strip("()[]").strip()


def _letter_counts(answer: str) -> str:
    """`3,4` for two words, `4-4` for a word with a hyphen."""
    words = re.split(r"([\s-]+)", answer)
    parts = [
        ("-" if "-" in word else ",") if index % 2 else str(len(letters(word)))
        for index, word in enumerate(words)
    ]
    return "".join(parts)


def _with_completions(rows: Rows) -> Rows:
    return Rows([{**row, "completion": _gold_completion(row)} for row in rows], rows.account)


def _gold_completion(row: Mapping[str, Any]) -> str:
    answer = row["answer"].lower() if "choices" in row else row["answer"].upper()
    thought = f"{len(letters(answer))} letters: {answer}."
    return f"<think>\n{thought}\n</think>\n<answer>{answer}</answer>"


def _source_name(task_config: TaskConfig) -> str:
    return f"The source {task_config.source!r}" if task_config.source else "The included source"
