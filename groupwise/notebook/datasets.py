"""The rows that a notebook trains on: datasets by name, and how they are divided into a train and a test part.

    def load_capitals(config):
        return [{"question": "Capital of France?", "answer": "Paris"}, …]

    register_dataset("capitals", load_capitals)
    config = TrainingConfig(dataset="capitals")

A row has a `question` with an `answer`, or with a `rubric` and a `reference` answer; further columns reach the rewards, and one called
`prompt` is what the model is given. Files and hub sets may call the first by other names. Where there is no question and the prompt is a
chat, the question is what the user says last in it. Rows that cannot be used are left out and counted. No question is in both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from groupwise.core.errors import TaskError
from groupwise.core.plugins import nearest, run_user_code
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.parts import divided, with_prompts
from groupwise.notebook.rows import (
    RUBRIC,
    accepted_forms,
    is_chat,
    listed,
    refuse_odd_answer,
    row_of,
    said_last,
    usable_rows,
)
from groupwise.tasks.builtin import math, rubric_answers
from groupwise.tasks.data.chat import Account, Row, Rows
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
    for each in columns.values()
    for name in each
}
"""Columns that are found in whatever case."""
GENERATED = 2000
"""Problems of `arithmetic`, where dataset_max does not say how many."""
LEVEL = 1
"""Level of its problems: sums and differences of numbers up to 50."""

_REGISTERED: dict[str, Loader] = {}


def register_dataset(name: str, loader: Loader) -> None:
    """Make a dataset known under a name. A second one of that name replaces the first, as when its cell is run again."""
    if not callable(loader):
        raise TaskError(
            f"register_dataset({name!r}): {type(loader).__name__} is no function. Give one that takes the config and returns rows."
        )
    if not _is_a_name(name):
        raise TaskError(
            f"{name!r} cannot name a dataset. Give a text that looks like no file: without / and \\, without . or ~ at the start, and not "
            f"ending with {', '.join(ENDINGS)}."
        )
    if name in _BUILT_IN:
        raise TaskError(f"There is a built-in dataset {name!r}; choose another name.")
    _REGISTERED[name] = loader


def _is_a_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and bool(name.strip())
        and not set(name) & set("/\\")
        and not name.startswith((".", "~"))
        and not name.endswith(ENDINGS)
    )


def dataset_names() -> list[str]:
    """All names that `dataset` may have, besides hub ids and files."""
    return [*_BUILT_IN, *_REGISTERED]


def dataset_of(config: TrainingConfig) -> str:
    """The dataset that the config means. Raises TaskError where it names none, or one that is not there."""
    if config.dataset is not None:
        return _known(config.dataset)
    if config.use_openrubrics:
        return "openrubrics"
    raise TaskError(
        f"No dataset: dataset is None and use_openrubrics is false. Name one: {', '.join(dataset_names())}, a hub id (owner/name), a file."
    )


def prepare_datasets(config: TrainingConfig) -> tuple[Rows, Rows]:
    """The train and the test part: rows with a `prompt`, their `question`, and what they are scored by.

    Shuffled by the seed; train_fraction of the rows are trained on, at least one and all but one.
    """
    train, test = divided(_loaded(config), dataset_of(config), config)
    return with_prompts(train, config), with_prompts(test, config)


def _known(name: str) -> str:
    if name in dataset_names() or is_local(name) or "/" in name:
        return name
    near = nearest(name, dataset_names())
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise TaskError(
        f"There is no dataset {name!r}.{hint} There are: {', '.join(dataset_names())}; a hub id (owner/name) or a file; and what "
        "register_dataset(name, loader) makes known."
    )


def _openrubrics(config: TrainingConfig) -> Rows:
    """Instructions with rubrics. The reference is the better of two responses, where a row has those."""
    rows = [
        _with_winner(row)
        for row in read_source(OPENRUBRICS, limit=config.openrubrics_max, seed=config.seed)
    ]
    return _of_rubrics(rows, OPENRUBRICS)


def _with_winner(row: Row) -> Row:
    better = {"a": "response_a", "b": "response_b"}.get(str(row.get("winner")).strip().lower()[-1:])
    return {**row, "reference": row[better]} if better and better in row else row


def _gsm8k(config: TrainingConfig) -> Rows:
    rows = read_source(GSM8K, "main", "train", limit=config.dataset_max, seed=config.seed)
    return _of_answers(rows, GSM8K)


def _arithmetic(config: TrainingConfig) -> Rows:
    asked = math.TaskConfig(min_level=LEVEL, max_level=LEVEL, seed=config.seed)
    problems = math.generate(asked, config.dataset_max or GENERATED)
    return Rows(
        [{"question": each.question, "answer": each.answer} for each in problems], Account()
    )


_BUILT_IN: dict[str, Callable[[TrainingConfig], Rows]] = {
    "openrubrics": _openrubrics,
    "gsm8k": _gsm8k,
    "arithmetic": _arithmetic,
}


def _loaded(config: TrainingConfig) -> Rows | tuple[Rows, Rows]:
    name = dataset_of(config)
    if name in _BUILT_IN:
        return _BUILT_IN[name](config)
    if name in _REGISTERED:
        return _of_loader(name, _REGISTERED[name], config)
    rows = read_source(name, limit=config.dataset_max, seed=config.seed)
    return _of_source(_in_lower_case(rows), name)


def _in_lower_case(rows: Sequence[Row]) -> list[Row]:
    """Renames known columns to lower case, such as `Question` to `question`, unless a column has that name."""
    there = list(dict.fromkeys(column for row in rows for column in row))
    first = {column.lower(): column for column in reversed(there)}
    ours = {first[name]: name for name in KNOWN & first.keys() - {*there}}
    return [{ours.get(column, column): cell for column, cell in row.items()} for row in rows]


def _of_source(rows: Sequence[Row], name: str) -> Rows:
    """Rows of a hub id or a file, by the columns that they have."""
    there = {column for row in rows for column in row}
    rubric = there.intersection(rubric_answers.COLUMNS["rubric"])
    return _of_rubrics(rows, name) if rubric else _of_answers(rows, name)


def _of_rubrics(rows: Sequence[Row], name: str) -> Rows:
    own = rubric_answers.TaskConfig(source=name)
    names = _names(rows, name, rubric_answers.COLUMNS, ("question", *RUBRIC))

    def made(row: Row) -> Row:
        return rubric_answers.row_of(own, {ours: row.get(names[ours]) for ours in names})

    return _renamed(rows, names, made, name)


def _of_answers(rows: Sequence[Row], name: str) -> Rows:
    own = math.TaskConfig(source=name)
    names = _names(rows, name, math.COLUMNS, ("question", "answer"))

    def made(row: Row) -> Row:
        given = row.get(names["answer"])
        refuse_odd_answer(given)
        read = [
            math.problem_of(own, row.get(names["question"]), form, None)
            for form in accepted_forms(given) or [None]
        ]
        answers = [each.answer for each in read]
        return {
            "question": read[0].question,
            "answer": answers if isinstance(given, list | tuple) else answers[0],
        }

    return _renamed(rows, names, made, name)


def _names(
    rows: Sequence[Row], name: str, known: Mapping[str, Sequence[str]], wanted: Sequence[str]
) -> dict[str, str]:
    """The wanted columns' names there. `prompt` is the question only if nothing else is."""
    there = dict.fromkeys(column for row in rows for column in row)
    found: dict[str, str] = {}
    for ours in wanted:
        names = sorted((each for each in known[ours] if each in there), key="prompt".__eq__)
        if not names:
            raise TaskError(
                f"The dataset {name!r} has no column for the {ours}: looked for {', '.join(known[ours])}. It has: {', '.join(there)}. "
                "Rename its columns to question and answer, or to question, rubric and reference; or register_dataset(name, loader), "
                "with a function that returns such rows."
            )
        found[ours] = names[0]
    return found


def _renamed(
    rows: Sequence[Row], names: Mapping[str, str], make: Callable[[Row], Row], name: str
) -> Rows:
    """The rows with what `make` makes of the named columns, and with their other columns and a chat that holds the question."""

    def whole(row: Mapping[str, Any]) -> Row:
        chat = row.get("prompt") if names["question"] == "prompt" else None
        asked = {"prompt": chat} if is_chat(chat) else {}
        made = make({**row, "prompt": said_last(chat)} if asked else {**row})
        others = {
            name: cell for name, cell in row.items() if (name, names["question"]) != ("prompt",) * 2
        }
        return {**others, **asked, **{ours: made[ours] for ours in names}}

    return usable_rows(rows, whole, f"The dataset {name!r}")


def _of_loader(name: str, loader: Loader, config: TrainingConfig) -> Rows | tuple[Rows, Rows]:
    where = f"The dataset {name!r}"
    given = run_user_code(lambda: loader(config), what=f"{where} failed")
    if type(given) is tuple and len(cast("tuple[Any, ...]", given)) == 2:
        train, test = cast("tuple[Any, Any]", given)
        name = where.replace("The", "the", 1)
        return (
            _checked(train, f"The train part of {name}", config),
            _checked(test, f"The test part of {name}", config),
        )
    return _checked(given, where, config)


def _checked(given: Any, where: str, config: TrainingConfig) -> Rows:
    """The rows of a loader, dataset_max of them."""
    rows = run_user_code(
        lambda: listed(given, f"{where} gave", ", or two of them, (train, test)"),
        what=f"{where} failed",
    )
    drawn = [rows[place] for place in sample(len(rows), config.dataset_max, config.seed)]
    return usable_rows(drawn, lambda row: row_of(row, config), where)
