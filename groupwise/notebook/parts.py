"""The train and the test part of a notebook's rows: no question is in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from groupwise.core.errors import TaskError, UsageError
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.prompts import format_prompt
from groupwise.notebook.rows import holds, key_of, listed
from groupwise.tasks.data.chat import Account, Row, Rows
from groupwise.tasks.data.order import Stream


def divided(
    found: Rows | tuple[Rows, Rows], dataset: str, config: TrainingConfig
) -> tuple[Rows, Rows]:
    """Both parts of a dataset, shuffled by the seed; of two lists, the first without what the second has. Raises TaskError."""
    stream = Stream("notebook", config.seed)
    if isinstance(found, tuple):
        train, test = found
        tested = {key_of(row) for row in test}
        alone = [row for row in train if key_of(row) not in tested]
        if not alone:
            raise TaskError(
                f"The dataset {dataset!r}: all questions of the train part stand in the test part, too, so that none is left to "
                "train on. Return two parts without a common question, or one list, which is divided here."
            )
        shared = Counter({"the test part has the question": len(train) - len(alone)})
        left_out = Counter(train.account.left_out) + shared
        return (
            Rows(stream.sample(alone, len(alone)), Account(dict(left_out))),
            Rows(stream.sample(test, len(test)), test.account),
        )
    rows = stream.sample(_enough(found, dataset), len(found))
    count = min(max(int(len(rows) * config.train_fraction + 1e-9), 1), len(rows) - 1)
    return Rows(rows[:count], found.account), Rows(rows[count:], Account())


def _enough(rows: Sequence[Row], dataset: str) -> Sequence[Row]:
    if len(rows) < 2:
        raise TaskError(
            f"The dataset {dataset!r} has {len(rows)} usable row{'s' * (len(rows) != 1)}; at least two are needed, one to train "
            "on and one to test."
        )
    return rows


def in_place_of(part: str, given: object, config: TrainingConfig) -> Rows:
    """Rows that the user assigns to a part, as `with_prompts` makes them; the part's name is for messages."""
    rows = given if isinstance(given, Rows) else listed(given, f"{part} was given")
    if not rows:
        raise TaskError(f"{part} was given no rows. Expected at least one.")
    return with_prompts(rows, config)


def refuse_shared(train: Sequence[Row], test: Sequence[Row]) -> None:
    """Raise UsageError where a question is in both parts."""
    tested = {key_of(row) for row in test}
    shared = [row.get("question") or row.get("prompt") for row in train if key_of(row) in tested]
    if shared:
        raise UsageError(
            f"{len(shared)} of {len(train)} rows to train on ask what the test part asks, first {shared[0]!r:.200}. An evaluation would "
            "measure what was learnt by heart: take them out of session.train_dataset or session.test_dataset."
        )


def with_prompts(rows: Sequence[Row], config: TrainingConfig) -> Rows:
    """The rows, each with what the model is given: its own prompt, else one made of its question."""

    def asked(given: object) -> Row:
        if not isinstance(given, dict):
            raise TaskError(
                f"A row is {type(given).__name__}. Expected rows such as {{'question': …, 'answer': …}}."
            )
        row = cast("Row", given)
        if holds(row.get("prompt")):
            return row
        if not holds(row.get("question")):
            raise TaskError(
                f"A row has neither a question nor a prompt, but {', '.join(map(str, row)) or 'nothing'}. Rename the column that asks to "
                "question."
            )
        text = format_prompt(row["question"], config)
        return {**row, "prompt": [{"role": "user", "content": text}]}

    account = rows.account if isinstance(rows, Rows) else Account({})
    return Rows([asked(row) for row in rows], account)
