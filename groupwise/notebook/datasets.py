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

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, Literal, TypeAlias, cast

from groupwise.data.chat import Account, Row, Rows, Unusable, messages_of
from groupwise.data.order import Stream
from groupwise.data.sources import ENDINGS, is_local, read_source, sample
from groupwise.errors import TaskError, UsageError
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.prompts import format_prompt
from groupwise.notebook.worded import plain_number
from groupwise.plugins import nearest, run_user_code
from groupwise.rewards.mathematics import MathAnswer
from groupwise.rewards.overlap import RubricOverlap
from groupwise.tasks import math, rubric_answers
from groupwise.tasks.source_rows import SAME, question_key, usable

Kind = Literal["numeric", "rubric"]
"""What rows are scored by: an answer, or a rubric and a reference."""

Loaded: TypeAlias = (
    Iterable[Mapping[str, Any]] | tuple[Iterable[Mapping[str, Any]], Iterable[Mapping[str, Any]]]
)
"""What a loader gives: rows, or those to train on and those of the test part."""
Loader: TypeAlias = Callable[[TrainingConfig], Loaded]

OPENRUBRICS = "OpenRubrics/OpenRubrics"
GSM8K = "openai/gsm8k"
RUBRIC = ("rubric", "reference")
"""What a row has that has no answer."""
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
"""Of its problems: sums and differences of numbers up to 50."""

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
    train, test = _divided(_loaded(config), config)
    return with_prompts(train, config), with_prompts(test, config)


def kind_of(rows: Sequence[Row]) -> Kind:
    """What all of the rows are scored by. Raises TaskError where there are none, or no one thing."""
    if not rows:
        raise TaskError("There are no rows: a part of the data is empty.")
    rubrics = sum(row.get("rubric") is not None for row in rows)
    answers = sum(row.get("answer") is not None for row in rows)
    if rubrics == len(rows):
        return "rubric"
    if answers == len(rows):
        return "numeric"
    raise TaskError(
        f"Of {len(rows)} rows {answers} have an answer and {rubrics} a rubric. All must have an answer, or all a rubric, since they are "
        "scored alike."
    )


def _known(name: str) -> str:
    if name in dataset_names() or is_local(name) or "/" in name:
        return name
    near = nearest(name, dataset_names())
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise TaskError(
        f"There is no dataset {name!r}.{hint} There are: {', '.join(dataset_names())}; a hub id (owner/name) or a file; and what "
        "register_dataset(name, loader) makes known."
    )


# --- loading -------------------------------------------------------------------------------------


def _openrubrics(config: TrainingConfig) -> Rows:
    """Instructions with rubrics. The reference is the better of two responses, where a row has those."""
    rows = [
        _with_winner(row)
        for row in read_source(OPENRUBRICS, limit=config.openrubrics_max, seed=config.seed)
    ]
    return _only(_of_rubrics(rows, OPENRUBRICS), "question", *RUBRIC)


def _with_winner(row: Row) -> Row:
    better = {"a": "response_a", "b": "response_b"}.get(str(row.get("winner")).strip().lower()[-1:])
    return {**row, "reference": row[better]} if better and better in row else row


def _gsm8k(config: TrainingConfig) -> Rows:
    rows = read_source(GSM8K, "main", "train", limit=config.dataset_max, seed=config.seed)
    return _only(_of_answers(rows, GSM8K), "question", "answer")


def _only(rows: Rows, *columns: str) -> Rows:
    return Rows([{name: row[name] for name in columns} for row in rows], rows.account)


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
    """With `question` for `Question`, where there is no column of that name."""
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
        _refuse_odd_answer(row.get(names["answer"]))
        problem = math.problem_of(own, row.get(names["question"]), row.get(names["answer"]), None)
        return {"question": problem.question, "answer": problem.answer}

    return _renamed(rows, names, made, name)


def _names(
    rows: Sequence[Row], name: str, known: Mapping[str, Sequence[str]], wanted: Sequence[str]
) -> dict[str, str]:
    """What the wanted columns are called there. `prompt` is the question where nothing else is."""
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
        asked = {"prompt": chat} if _is_chat(chat) else {}
        made = make({**row, "prompt": _said_last(chat)} if asked else {**row})
        others = {column: value for column, value in row.items() if column not in names.values()}
        return {**others, **asked, **{ours: made[ours] for ours in names}}

    return _usable(rows, whole, f"The dataset {name!r}")


def _usable(
    rows: Sequence[Mapping[str, Any]], make: Callable[[Mapping[str, Any]], Row], where: str
) -> Rows:
    found, left_out = usable(
        rows,
        make,
        lambda row: question_key(row["question"]),
        source=where,
        strict=False,
        remedy=(
            "Expected: question (text), and rubric with reference, or answer: text or a number. A long solution marks its answer: "
            "after ####, or in \\boxed{}."
        ),
        again=_again,
    )
    return Rows(found, Account(dict(left_out)))


def _again(earlier: Row, later: Row) -> str:
    for name in ("answer", *RUBRIC):
        if str(earlier.get(name)).strip() != str(later.get(name)).strip():
            return f"it asks an earlier row's question with another {name}"
    return SAME


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
        lambda: _listed(given, f"{where} gave", ", or two of them, (train, test)"),
        what=f"{where} failed",
    )
    drawn = [rows[place] for place in sample(len(rows), config.dataset_max, config.seed)]
    return _usable(drawn, lambda row: _row(row, config), where)


def _listed(given: Any, told: str, also: str = "") -> list[Any]:
    """What is given as rows, a table of pandas too; of that the cells as Python has them. `told` and `also` are for the message."""
    kind = type(given).__name__
    if kind == "DataFrame":
        records = cast("list[Row]", given.to_dict("records"))
        return [{name: _cell(value) for name, value in row.items()} for row in records]
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        kind = "a coroutine" if inspect.iscoroutine(cast("object", given)) else kind
        raise TaskError(
            f"{told} {kind}. Expected a list of rows such as {{'question': …, 'answer': …}}{also}."
        )
    return list(cast("Iterable[Any]", given))


def _cell(value: Any) -> Any:
    """Arrays as lists, and gaps as None."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    gap = type(plain).__name__ in ("NAType", "NaTType") or (
        isinstance(plain, float) and plain != plain
    )
    return None if gap else plain


def _row(given: object, config: TrainingConfig) -> Row:
    if not isinstance(given, Mapping):
        raise Unusable(f"it is {type(given).__name__} and no row with columns")
    row = cast("Mapping[str, Any]", given)
    question, chat = row.get("question"), row.get("prompt")
    if question is None and _is_chat(chat):
        question = _said_last(chat)
    if not isinstance(question, str) or not question.strip():
        raise Unusable("it has no text in the column question")
    gaps = dict.fromkeys(name for name in ("answer", *RUBRIC) if name in row)
    scored = _scored(row, config)
    if not scored:
        _refuse_odd_answer(row.get("answer"))
        raise Unusable("it has neither an answer nor a rubric with a reference")
    return {**row, **gaps, **scored, "question": question.strip()}


def _scored(row: Mapping[str, Any], config: TrainingConfig) -> Row:
    """Of answer, rubric and reference those that can be scored by; None, NaN and empty text are nothing."""
    answers = MathAnswer("answer", answer_tag=config.tags.answer)
    found = (
        ["answer"]
        if _reads(_refuse_odd_answer, row.get("answer")) and _reads(answers.check_row, row)
        else []
    )
    if _holds(row.get("rubric")) and _reads(RubricOverlap("reference").check_row, row):
        found += RUBRIC
    return {name: row[name] for name in found}


def _reads(check: Callable[[Any], None], given: object) -> bool:
    try:
        check(given)
    except (ValueError, Unusable):
        return False
    return True


def _refuse_odd_answer(cell: object) -> None:
    """Raise Unusable for what is neither a text nor a number; None is a gap."""
    plain = plain_number(cell)
    if plain is not None and not isinstance(plain, str | Number):
        raise Unusable(f"its answer is {type(plain).__name__}; an answer is a text or a number")


def _is_chat(cell: object) -> bool:
    return not isinstance(cell, str) and _holds(cell)


def _said_last(chat: object) -> str:
    """What the user says last. Raises Unusable where no message is the user's."""
    said = [message["content"] for message in messages_of(chat) if message["role"] == "user"]
    if not said:
        raise Unusable("no message of its prompt is the user's")
    return said[-1].strip()


def _holds(cell: object) -> bool:
    """Whether it is a text or a list with something in it, or a chat."""
    if isinstance(cell, str):
        return bool(cell.strip())
    return isinstance(cell, Mapping | list | tuple) and len(cast("Any", cell)) > 0


# --- dividing ------------------------------------------------------------------------------------


def _divided(found: Rows | tuple[Rows, Rows], config: TrainingConfig) -> tuple[Rows, Rows]:
    stream = Stream("notebook", config.seed)
    if isinstance(found, tuple):
        train, test = found
        tested = {question_key(row["question"]) for row in test}
        alone = [row for row in train if question_key(row["question"]) not in tested]
        if not alone:
            raise TaskError(
                f"The dataset {dataset_of(config)!r}: all questions of the train part stand in the test part, too, so that none is left to "
                "train on. Return two parts without a common question, or one list, which is divided here."
            )
        shared = Counter({"the test part has the question": len(train) - len(alone)})
        left_out = Counter(train.account.left_out) + shared
        return (
            Rows(stream.sample(alone, len(alone)), Account(dict(left_out))),
            Rows(stream.sample(test, len(test)), test.account),
        )
    rows = stream.sample(_enough(found, config), len(found))
    count = min(max(int(len(rows) * config.train_fraction + 1e-9), 1), len(rows) - 1)
    return Rows(rows[:count], found.account), Rows(rows[count:], Account())


def _enough(rows: Sequence[Row], config: TrainingConfig) -> Sequence[Row]:
    if len(rows) < 2:
        raise TaskError(
            f"The dataset {dataset_of(config)!r} has {len(rows)} usable row{'s' * (len(rows) != 1)}; at least two are needed, one to train "
            "on and one to test."
        )
    return rows


def in_place_of(part: str, given: object, config: TrainingConfig) -> Rows:
    """Rows that somebody puts in place of a part, whose name is for messages: as `with_prompts` makes them."""
    rows = given if isinstance(given, Rows) else _listed(given, f"{part} was given")
    if not rows:
        raise TaskError(f"{part} was given no rows. Expected at least one.")
    return with_prompts(rows, config)


def refuse_shared(train: Sequence[Row], test: Sequence[Row]) -> None:
    """Raise UsageError where a question is in both parts."""
    tested = {_key(row) for row in test}
    shared = [row.get("question") or row.get("prompt") for row in train if _key(row) in tested]
    if shared:
        raise UsageError(
            f"{len(shared)} of {len(train)} rows to train on ask what the test part asks, first {shared[0]!r:.200}. An evaluation would "
            "measure what was learnt by heart: take them out of session.train_dataset or session.test_dataset."
        )


def _key(row: Row) -> str:
    question = row.get("question")
    return question_key(question) if isinstance(question, str) else repr(row.get("prompt"))


def with_prompts(rows: Sequence[Row], config: TrainingConfig) -> Rows:
    """The rows, each with what the model is given: its own prompt, else one made of its question."""

    def asked(given: object) -> Row:
        if not isinstance(given, dict):
            raise TaskError(
                f"A row is {type(given).__name__}. Expected rows such as {{'question': …, 'answer': …}}."
            )
        row = cast("Row", given)
        if _holds(row.get("prompt")) or not _holds(row.get("question")):
            return row
        text = format_prompt(row["question"], config)
        return {**row, "prompt": [{"role": "user", "content": text}]}

    account = rows.account if isinstance(rows, Rows) else Account({})
    return Rows([asked(row) for row in rows], account)
