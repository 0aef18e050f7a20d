"""The rows that a notebook trains on: datasets by name, their train and test parts, and the prompts made of their questions.

    def load_capitals(config):
        return [{"question": "Capital of France?", "answer": "Paris"}, …]

    register_dataset("capitals", load_capitals)
    config = TrainingConfig(dataset="capitals")

A row has a `question` with an `answer`, or with a `rubric` and a `reference` answer; further columns are passed to the rewards, and
a column `prompt` is used as the model's prompt. Files and hub datasets may have other names for the first ones. If there is no
question and the prompt is a chat, the question is the last user message. Rows that cannot be used are left out and counted. No
question is in both parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from groupwise.core.errors import TaskError, UsageError
from groupwise.core.plugins import nearest, run_user_code
from groupwise.notebook.config import OWN_ROWS, TrainingConfig
from groupwise.notebook.rows import (
    RUBRIC,
    accepted_forms,
    as_row_list,
    is_chat,
    is_not_empty,
    key_of,
    kind_of,
    last_user_message,
    refuse_odd_answer,
    row_of,
    usable_rows,
)
from groupwise.tasks.builtin import math, rubric_answers
from groupwise.tasks.data.chat import Account, Row, Rows
from groupwise.tasks.data.order import Stream
from groupwise.tasks.data.sources import ENDINGS, is_local, read_source, sample

Loaded: TypeAlias = (
    Iterable[Mapping[str, Any]] | tuple[Iterable[Mapping[str, Any]], Iterable[Mapping[str, Any]]]
)
"""The result of a loader: rows, or a pair of training rows and test rows."""
Loader: TypeAlias = Callable[[TrainingConfig], Loaded]

OPENRUBRICS = "OpenRubrics/OpenRubrics"
GSM8K = "openai/gsm8k"
KNOWN = {
    name
    for columns in (math.COLUMNS, rubric_answers.COLUMNS)
    for aliases in columns.values()
    for name in aliases
}
"""Columns that are recognised in upper or lower case."""
GENERATED = 2000
"""Number of problems of `arithmetic` if dataset_max is not set."""
LEVEL = 1
"""Level of these problems: sums and differences of numbers up to 50."""

_REGISTERED: dict[str, Loader] = {}


def register_dataset(name: str, loader: Loader) -> None:
    """Make a dataset known under a name. A second one of that name replaces the first, as when its cell is run again."""
    if not callable(loader):
        raise TaskError(
            f"register_dataset({name!r}): {type(loader).__name__} is not a function. Give one that takes the config and returns rows."
        )
    if not (
        isinstance(cast("object", name), str)
        and bool(name.strip())
        and not set(name) & set("/\\")
        and not name.startswith((".", "~"))
        and not name.endswith(ENDINGS)
    ):
        raise TaskError(
            f"{name!r} cannot name a dataset. Give a text that looks like no file: without / and \\, without . or ~ at the start, and not "
            f"ending with {', '.join(ENDINGS)}."
        )
    if name in _BUILT_IN:
        raise TaskError(f"There is a built-in dataset {name!r}; choose another name.")
    _REGISTERED[name] = loader


def dataset_of(config: TrainingConfig) -> str:
    """The dataset that the config means. Raises TaskError if it names none, or an unknown one."""
    names, name = [*_BUILT_IN, *_REGISTERED], config.dataset
    if name is None and config.use_openrubrics:
        return "openrubrics"
    if name is None:
        raise TaskError(
            f"No dataset: dataset is None and use_openrubrics is false. Name one: {', '.join(names)}, a hub id (owner/name), a file. "
            f"{OWN_ROWS}"
        )
    if name in names or is_local(name) or "/" in name:
        return name
    close_matches = nearest(name, names)
    hint = f" Did you mean {' or '.join(close_matches)}?" if close_matches else ""
    raise TaskError(
        f"There is no dataset {name!r}.{hint} There are: {', '.join(names)}; a hub id (owner/name) or a file; and what "
        "register_dataset(name, loader) makes known."
    )


def prepare_datasets(config: TrainingConfig) -> tuple[Rows, Rows]:
    """The train and the test part: rows with a `prompt`, their `question`, and the columns that score them.

    Shuffled by the seed; train_fraction of the rows are trained on, at least one and all but one.
    """
    name = dataset_of(config)
    if name in _BUILT_IN:
        rows = _BUILT_IN[name](config)
    elif name in _REGISTERED:
        loader = _REGISTERED[name]
        source = f"The dataset {name!r}"
        loaded = run_user_code(lambda: loader(config), what=f"{source} failed")
        if type(loaded) is tuple and len(cast("tuple[Any, ...]", loaded)) == 2:
            train, test = cast("tuple[Any, Any]", loaded)
            rows = (
                _check_rows(train, f"The train part of the dataset {name!r}", config),
                _check_rows(test, f"The test part of the dataset {name!r}", config),
            )
        else:
            rows = _check_rows(loaded, source, config)
    else:
        source_rows = read_source(name, limit=config.dataset_max, seed=config.seed)
        column_names = list(dict.fromkeys(column for row in source_rows for column in row))
        # Known columns are renamed to lower case, such as `Question` to `question`, unless a column has that name.
        column_by_lower = {column.lower(): column for column in reversed(column_names)}
        renames = {
            column_by_lower[name]: name for name in KNOWN & column_by_lower.keys() - {*column_names}
        }
        source_rows = [
            {renames.get(column, column): cell for column, cell in row.items()}
            for row in source_rows
        ]
        columns = {renames.get(column, column) for column in column_names}
        by_rubric = columns.intersection(rubric_answers.COLUMNS["rubric"])
        rows = _rubric_rows(source_rows, name) if by_rubric else _answer_rows(source_rows, name)
    train, test = split_rows(rows, name, config)
    return with_prompts(train, config), with_prompts(test, config)


def _openrubrics(config: TrainingConfig) -> Rows:
    """Instructions with rubrics. The reference is the better of two responses, if a row has them."""
    rows: list[Row] = []
    for row in read_source(OPENRUBRICS, limit=config.openrubrics_max, seed=config.seed):
        winner = str(row.get("winner")).strip().lower()[-1:]  # A or B, or Response A
        better = {"a": "response_a", "b": "response_b"}.get(winner)
        rows.append({**row, "reference": row[better]} if better and better in row else row)
    return _rubric_rows(rows, OPENRUBRICS)


def _gsm8k(config: TrainingConfig) -> Rows:
    rows = read_source(GSM8K, "main", "train", limit=config.dataset_max, seed=config.seed)
    return _answer_rows(rows, GSM8K)


def _arithmetic(config: TrainingConfig) -> Rows:
    task_config = math.TaskConfig(min_level=LEVEL, max_level=LEVEL, seed=config.seed)
    problems = math.generate(task_config, config.dataset_max or GENERATED)
    return Rows(
        [{"question": problem.question, "answer": problem.answer} for problem in problems],
        Account(),
    )


_BUILT_IN: dict[str, Callable[[TrainingConfig], Rows]] = {
    "openrubrics": _openrubrics,
    "gsm8k": _gsm8k,
    "arithmetic": _arithmetic,
}


def _rubric_rows(rows: Sequence[Row], name: str) -> Rows:
    task_config = rubric_answers.TaskConfig(source=name)
    names = _source_columns(rows, name, rubric_answers.COLUMNS, ("question", *RUBRIC))

    def to_row(row: Row) -> Row:
        return rubric_answers.row_of(task_config, {field: row.get(names[field]) for field in names})

    return _rename_columns(rows, names, to_row, name)


def _answer_rows(rows: Sequence[Row], name: str) -> Rows:
    task_config = math.TaskConfig(source=name)
    names = _source_columns(rows, name, math.COLUMNS, ("question", "answer"))

    def to_row(row: Row) -> Row:
        answer = row.get(names["answer"])
        refuse_odd_answer(answer)
        problems = [
            math.problem_of(task_config, row.get(names["question"]), form, None)
            for form in accepted_forms(answer) or [None]
        ]
        answers = [problem.answer for problem in problems]
        return {
            "question": problems[0].question,
            "answer": answers if isinstance(answer, list | tuple) else answers[0],
        }

    return _rename_columns(rows, names, to_row, name)


def _source_columns(
    rows: Sequence[Row], name: str, aliases: Mapping[str, Sequence[str]], columns: Sequence[str]
) -> dict[str, str]:
    """The source's names of the wanted columns. `prompt` is used as the question only if there is no other."""
    available = dict.fromkeys(column for row in rows for column in row)
    source_names: dict[str, str] = {}
    for field in columns:
        names = sorted(
            (column_name for column_name in aliases[field] if column_name in available),
            key="prompt".__eq__,
        )
        if not names:
            raise TaskError(
                f"The dataset {name!r} has no column for the {field}: looked for {', '.join(aliases[field])}. "
                f"It has: {', '.join(available)}. Rename its columns to question and answer, or to question, rubric and reference; "
                "or register_dataset(name, loader), with a function that returns such rows."
            )
        source_names[field] = names[0]
    return source_names


def _rename_columns(
    rows: Sequence[Row], names: Mapping[str, str], make: Callable[[Row], Row], name: str
) -> Rows:
    """The rows with the result of `make` for the named columns and with their other columns. A prompt used as the question is kept
    only if it is a chat.
    """

    def full_row(row: Mapping[str, Any]) -> Row:
        chat = row.get("prompt") if names["question"] == "prompt" else None
        prompt_column = {"prompt": chat} if is_chat(chat) else {}
        mapped_row = make({**row, "prompt": last_user_message(chat)} if prompt_column else {**row})
        other_columns = {
            name: cell for name, cell in row.items() if (name, names["question"]) != ("prompt",) * 2
        }
        return {**other_columns, **prompt_column, **{field: mapped_row[field] for field in names}}

    return usable_rows(rows, full_row, f"The dataset {name!r}")


def _check_rows(loaded: Any, source: str, config: TrainingConfig) -> Rows:
    """The rows of a loader, limited to dataset_max."""
    rows = run_user_code(
        lambda: as_row_list(loaded, f"{source} gave", ", or two of them, (train, test)"),
        what=f"{source} failed",
    )
    sampled_rows = [rows[index] for index in sample(len(rows), config.dataset_max, config.seed)]
    return usable_rows(sampled_rows, lambda row: row_of(row, config), source)


def format_prompt(question: str, config: TrainingConfig, rubric: str | None = None) -> str:
    """The user's message: the system prompt and the question. The model's chat template is applied later.

    The system prompt is part of the user message, because Gemma's template has no system role. `rubric`, if given, is shown to the
    model. Nothing passes it by default, because a reward for the rubric's words could then be earned by repeating them. Raises
    UsageError if `question` is not text or `config` is not a TrainingConfig.
    """
    usage = "format_prompt(question, config)"
    if not isinstance(cast("object", question), str):
        raise UsageError(
            f"The question is of the type {type(question).__name__}; give a text: {usage}."
        )
    if not isinstance(cast("object", config), TrainingConfig):
        raise UsageError(f"Expected a TrainingConfig second, got {type(config).__name__}: {usage}.")
    content = f"{question}\n\nA good answer mentions:\n{rubric}" if rubric else question
    return f"{config.system_prompt}\n\n{content}" if config.system_prompt else content


def split_rows(
    data: Rows | tuple[Rows, Rows], dataset: str, config: TrainingConfig
) -> tuple[Rows, Rows]:
    """Both parts of a dataset, shuffled by the seed; of two given lists, the first without the rows of the second. Raises TaskError."""
    stream = Stream("notebook", config.seed)
    if isinstance(data, tuple):
        train, test = data
        test_keys = {key_of(row) for row in test}
        train_only = [row for row in train if key_of(row) not in test_keys]
        if not train_only:
            raise TaskError(
                f"The dataset {dataset!r}: all questions of the train part stand in the test part, too, so that none is left to "
                "train on. Return two parts without a common question, or one list, which is divided here."
            )
        shared = Counter({"the test part has the question": len(train) - len(train_only)})
        left_out = Counter(train.account.left_out) + shared
        return (
            Rows(stream.sample(train_only, len(train_only)), Account(dict(left_out))),
            Rows(stream.sample(test, len(test)), test.account),
        )
    if len(data) < 2:
        raise TaskError(
            f"The dataset {dataset!r} has {len(data)} usable row{'s' * (len(data) != 1)}; at least two are needed, one to train "
            "on and one to test."
        )
    rows = stream.sample(data, len(data))
    count = min(max(int(len(rows) * config.train_fraction + 1e-9), 1), len(rows) - 1)
    return Rows(rows[:count], data.account), Rows(rows[count:], Account())


def replacement_rows(part: str, value: object, config: TrainingConfig) -> Rows:
    """Rows that the user assigns to a part, with prompts as from `with_prompts`; `part` is its name in messages.

    Raises TaskError if there are none, or some cannot be scored.
    """
    rows = value if isinstance(value, Rows) else as_row_list(value, f"{part} was given")
    if not rows:
        raise TaskError(f"{part} was given no rows. Expected at least one.")
    rows_with_prompts = with_prompts(rows, config)
    kind_of(rows_with_prompts)  # refuses rows that cannot be scored
    return rows_with_prompts


def refuse_shared(train: Sequence[Row], test: Sequence[Row]) -> None:
    """Raise UsageError if a question is in both parts."""
    test_keys = {key_of(row) for row in test}
    shared = [row.get("question") or row.get("prompt") for row in train if key_of(row) in test_keys]
    if shared:
        raise UsageError(
            f"{len(shared)} of {len(train)} rows to train on ask what the test part asks, first {shared[0]!r:.200}. An evaluation would "
            "measure what was learnt by heart: take them out of session.train_dataset or session.test_dataset."
        )


def with_prompts(rows: Sequence[Row], config: TrainingConfig) -> Rows:
    """The rows with the prompt for the model: their own, else one made of the question."""

    def with_prompt(value: object) -> Row:
        if not isinstance(value, dict):
            raise TaskError(
                f"A row is {type(value).__name__}. Expected rows such as {{'question': …, 'answer': …}}."
            )
        row = cast("Row", value)
        if is_not_empty(row.get("prompt")):
            return row
        if not is_not_empty(row.get("question")):
            raise TaskError(
                f"A row has neither a question nor a prompt, but {', '.join(map(str, row)) or 'nothing'}. Rename the column that asks to "
                "question."
            )
        text = format_prompt(row["question"], config)
        return {**row, "prompt": [{"role": "user", "content": text}]}

    account = rows.account if isinstance(rows, Rows) else Account({})
    return Rows([with_prompt(row) for row in rows], account)
