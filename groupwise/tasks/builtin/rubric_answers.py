"""Questions with a rubric and a reference answer: what a good answer mentions, and one that does.

    task:
      source: anisha2102/RaR-Science    # a hub id or a file; without it, 87 questions of general knowledge that come with the package

Columns go by the names that such sets give them (`COLUMNS`), or as `task.columns` says. A rubric may be text, a list of criteria, or a
list of criteria with weights. The reward is `rubric_overlap`, 15 at most, unless `rewards.reward_funcs` names others; with `judge` a model
reads rubric and answer.

The rubric stays out of the prompt. `task.rubric_in_prompt` puts it there, with a warning: `rubric_overlap` then counts no word of the
prompt, because a policy would learn to repeat it, and pays for the likeness of the other words to those of the reference.

One source gives all three splits. No question occurs twice, neither in a split nor in two of them. Rows that cannot be used are left
out and counted by the reason, or refused with `task.strict`.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from pydantic import BaseModel

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.call import RewardCallable
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.core.settings.schema import setting
from groupwise.core.settings.view import TaskSection
from groupwise.tasks.data.chat import Account, Rows
from groupwise.tasks.data.messages import Unusable
from groupwise.tasks.data.order import Stream
from groupwise.tasks.data.source_rows import keep_usable, question_key
from groupwise.tasks.data.sources import read_source
from groupwise.tasks.rewards.registry import get_reward_funcs as rewards_named

INCLUDED = Path(__file__).parent / "questions" / "plain_facts.jsonl"
"""Questions written for this project."""
COLUMNS = {
    "question": ("prompt", "question", "instruction", "query", "student_input"),
    "rubric": ("rubric", "rubrics", "grading_rubric", "rubric_text"),
    "reference": (
        "reference", "reference_answer", "reference_response", "response", "answer", "gold", "solution",
    ),
    "score": ("score",),
}  # fmt: skip
"""Accepted names of each of our columns; the first that exists is used."""
OPTIONAL = ("score",)
CRITERION = ("description", "criterion", "content", "requirement", "text", "title")
"""Keys of a criterion's text, in rubrics that are lists of records; the first that exists is used."""
OVERLAP = "rubric_overlap"
INSTRUCTION = "Answer the question in one or two sentences."
WARNING = (
    "task.rubric_in_prompt: the model reads the rubric by which its answer is rewarded. So rubric_overlap ignores all words of the prompt, "
    "and rewards how similar the other words are to the reference. To reward by a rubric that the model reads, use a judge."
)


class TaskConfig(TaskSection):
    """The `task:` section of a config for this task."""

    source: str | None = setting(
        None,
        "Hub id, file or folder with questions, rubrics and references; null: those that come with the package.",
    )
    source_config: str | None = setting(None, "Configuration of a dataset on the hub.")
    source_split: str = setting("train", "Split of the source, or a slice of one: train[:1000].")
    source_revision: str | None = setting(None, "Commit, tag or branch of a dataset on the hub.")
    columns: dict[str, str] = setting(
        {}, "Names of columns: question, rubric, reference or score, then the source's name for it."
    )
    system_prompt: str | None = setting(
        INSTRUCTION, "System message before each question; null: none."
    )
    strict: bool = setting(
        False, "Refuse a row that cannot be used, instead of leaving it out and counting it."
    )
    rubric_in_prompt: bool = setting(
        False, "Show the rubric to the model, which may then learn to repeat it."
    )
    train_size: int | None = setting(
        None, "Training questions; null: all that the other splits leave.", ge=1
    )
    validation_size: int = setting(8, "Held-out questions of a supervised run.", ge=1)
    eval_size: int = setting(24, "Held-out questions of evaluations.", ge=1)
    seed: int = setting(0, "Seed of the splits; the run has a seed of its own.", ge=0)


@dataclass(frozen=True, slots=True)
class Splits:
    """The rows of a source, divided; each split reports which rows of the source were left out."""

    test: Rows
    validation: Rows
    train: Rows


def get_config_schema() -> type[BaseModel]:
    """The config's `task:` section."""
    return TaskConfig


def get_rl_dataset(config: Any) -> Rows:
    """The training rows, with the columns `question`, `rubric`, `reference` and, if the source has it, `score`."""
    task_config = TaskConfig.of(config)
    if task_config.rubric_in_prompt:
        warnings.warn(WARNING, UserWarning, stacklevel=2)
    return _make_splits(task_config).train


def get_eval_dataset(config: Any) -> Rows:
    """The test rows."""
    return _make_splits(TaskConfig.of(config)).test


def get_sft_dataset(config: Any, tokenizer: Any) -> Rows:
    """The training rows with the reference as completion."""
    return _with_completions(_make_splits(TaskConfig.of(config)).train)


def get_sft_eval_dataset(config: Any, tokenizer: Any) -> Rows:
    """The validation rows with the reference as completion."""
    return _with_completions(_make_splits(TaskConfig.of(config)).validation)


def get_reward_funcs(config: Any, tokenizer: Any) -> list[tuple[RewardCallable, float]]:
    """`rubric_overlap`."""
    return rewards_named([OVERLAP], config)


def compute_metrics(
    prompts: Sequence[Any],
    completions: Sequence[CompletionText],
    dataset_rows: Sequence[dict[str, Any]],
    config: Any,
    tokenizer: Any,
) -> dict[str, Any]:
    """Mean of `rubric_overlap`, even if the config uses other rewards, and mean length in words."""
    [(overlap, _)] = rewards_named([OVERLAP], config)
    scores = overlap(
        prompts=prompts,
        completions=completions,
        rubric=[row["rubric"] for row in dataset_rows],
        reference=[row["reference"] for row in dataset_rows],
    )
    words = [len(completion_text(completion).split()) for completion in completions]
    return {
        "metrics": {OVERLAP: fmean(scores), "words": fmean(words)},
        "scores": list(scores),
    }


def rubric_text(value: Any) -> str:
    """A rubric as text, a line for each criterion. Raises ValueError if it is not a rubric."""
    if isinstance(value, str):
        parsed = _parse_rubric(value)
        return value.strip() if parsed is None else rubric_text(parsed)
    if isinstance(value, Mapping):
        record = cast("Mapping[str, Any]", value)
        for name in CRITERION:
            if isinstance(record.get(name), str):
                return str(record[name]).strip()
        raise ValueError(f"a criterion has none of {', '.join(CRITERION)}, but {', '.join(record)}")
    if isinstance(value, list | tuple):
        return "\n".join(rubric_text(criterion) for criterion in cast("Sequence[Any]", value))
    raise ValueError(f"{type(value).__name__} is not a rubric")


def _parse_rubric(text: str) -> list[Any] | None:
    """A rubric that a table stores as JSON text; None if it is not JSON."""
    if not text.lstrip().startswith("["):
        return None
    try:
        rubric = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("list[Any]", rubric) if isinstance(rubric, list) else None


# --- rows ----------------------------------------------------------------------------------------


def _make_splits(task_config: TaskConfig) -> Splits:
    """Splits the source. Test and validation come first, so they do not depend on the number of training rows."""
    source_rows = read_source(
        task_config.source or str(INCLUDED),
        task_config.source_config,
        task_config.source_split,
        revision=task_config.source_revision,
    )
    rows, left_out = rows_of(source_rows, task_config)
    held_out, train_size = (
        task_config.eval_size + task_config.validation_size,
        task_config.train_size,
    )
    if len(rows) < held_out + (train_size or 1):
        training_part = "what is left" if train_size is None else f"train_size {train_size}"
        raise TaskError(
            f"{_source_name(task_config)} has {len(rows)} usable questions, too few for eval_size {task_config.eval_size}, validation_size "
            f"{task_config.validation_size} and {training_part} to train on. Make the splits smaller, or name a larger source."
        )
    shuffled = Stream("rubric_answers", task_config.seed).sample(rows, len(rows))
    parts = (
        shuffled[: task_config.eval_size],
        shuffled[task_config.eval_size : held_out],
        shuffled[held_out:][:train_size],
    )
    return Splits(*(Rows(part, Account(dict(left_out))) for part in parts))


def rows_of(
    source_rows: Sequence[Mapping[str, Any]], task_config: TaskConfig
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The usable rows of a source, each question once, and counts of the other rows by reason."""
    available = dict.fromkeys(name for row in source_rows for name in row)
    for column, source_column in task_config.columns.items():
        if column not in COLUMNS:
            raise TaskError(f"task.columns: {column!r} is none of {', '.join(COLUMNS)}.")
        if source_column not in available:
            raise TaskError(
                f"task.columns: {_source_name(task_config)} has no column {source_column!r}. {_columns_text(available)}"
            )
    names = {
        column: next((name for name in aliases if name in available), None)
        for column, aliases in COLUMNS.items()
    } | task_config.columns
    for column, source_column in names.items():
        if source_column is None and column not in OPTIONAL:
            raise TaskError(
                f"{_source_name(task_config)} has no column for the {column}: looked for {', '.join(COLUMNS[column])}. "
                f"{_columns_text(available)} Name it: task.columns.{column}=NAME"
            )
    names = {
        column: source_column
        for column, source_column in names.items()
        if source_column is not None
    }
    return keep_usable(
        source_rows,
        lambda row: row_of(
            task_config, {column: row.get(source_column) for column, source_column in names.items()}
        ),
        lambda row: question_key(row["question"]),
        source=_source_name(task_config),
        strict=task_config.strict,
        remedy="task.columns says which of them are question, rubric and reference.",
    )


def row_of(task_config: TaskConfig, cells: Mapping[str, Any]) -> dict[str, Any]:
    """The row made of a source row: `question`, `rubric`, `reference` and perhaps `score`. Raises Unusable."""
    question = _text_of_cell(cells["question"], "question", "user")
    reference = _text_of_cell(cells["reference"], "reference", "assistant")
    if cells["rubric"] is None:
        raise Unusable("the rubric is missing")
    try:
        rubric = rubric_text(cells["rubric"])
    except ValueError as wrong:
        raise Unusable(f"the rubric cannot be read: {wrong}") from wrong
    for name, text in {"question": question, "rubric": rubric, "reference": reference}.items():
        if not text:
            raise Unusable(f"the {name} is empty")
    content = (
        f"{question}\n\nA good answer mentions:\n{rubric}"
        if task_config.rubric_in_prompt
        else question
    )
    system = (
        [{"role": "system", "content": task_config.system_prompt}]
        if task_config.system_prompt
        else []
    )
    score = {"score": cells["score"]} if "score" in cells else {}
    return {
        "prompt": [*system, {"role": "user", "content": content}],
        "question": question,
        "rubric": rubric,
        "reference": reference,
        **score,
    }


def _text_of_cell(value: Any, name: str, role: str) -> str:
    """The text, or the text of the last message with this role."""
    if value is None:
        raise Unusable(f"the {name} is missing")
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list | tuple):
        messages = cast(
            "list[dict[str, Any]]", [m for m in cast("list[Any]", value) if isinstance(m, dict)]
        )
        contents = [message.get("content") for message in messages if message.get("role") == role]
        if contents and isinstance(contents[-1], str):
            return contents[-1].strip()
    raise Unusable(f"the {name} is neither text nor messages of which one has the role {role}")


def _with_completions(rows: Rows) -> Rows:
    return Rows([{**row, "completion": row["reference"]} for row in rows], rows.account)


def _source_name(task_config: TaskConfig) -> str:
    return f"The source {task_config.source!r}" if task_config.source else "The included source"


def _columns_text(columns: Mapping[str, Any]) -> str:
    return f"It has: {', '.join(columns)}."
