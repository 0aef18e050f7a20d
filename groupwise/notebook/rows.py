"""The rows of a notebook: selects the usable ones, and finds their prompts and the columns that score them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, Literal, cast

from groupwise.core.errors import TaskError
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.friendly_errors import plain_number
from groupwise.tasks.data.chat import Account, Row, Rows
from groupwise.tasks.data.messages import Unusable, messages_of
from groupwise.tasks.data.source_rows import SAME, keep_usable, question_key
from groupwise.tasks.rewards.mathematics import MathAnswer
from groupwise.tasks.rewards.overlap import RubricOverlap

Kind = Literal["numeric", "rubric"]
"""Basis of the rows' scores: an answer, or a rubric and a reference."""

RUBRIC = ("rubric", "reference")
"""Columns of a row that has no answer."""


def kind_of(rows: Sequence[Row]) -> Kind:
    """The basis of all rows' scores. Raises TaskError if there are no rows, or they have no common basis."""
    if not rows:
        raise TaskError("There are no rows: a part of the data is empty.")
    rubrics = sum(row.get("rubric") is not None for row in rows)
    answers = sum(row.get("answer") is not None for row in rows)
    if rubrics == len(rows):
        return "rubric"
    if answers == len(rows):
        return "numeric"
    columns = ", ".join(dict.fromkeys(name for row in rows for name in row))
    raise TaskError(
        f"Of {len(rows)} rows {answers} have an answer and {rubrics} a rubric. All must have a column answer, or all a rubric, since they "
        f"are scored alike. They have the columns {columns}."
    )


def usable_rows(
    rows: Sequence[Mapping[str, Any]], make: Callable[[Mapping[str, Any]], Row], source: str
) -> Rows:
    """The results of `make`, without rows for which it raises Unusable, and without repeated questions. Raises TaskError for none."""

    def why_again(earlier_row: Row, later_row: Row) -> str:
        for name in ("answer", *RUBRIC):
            if str(earlier_row.get(name)).strip() != str(later_row.get(name)).strip():
                return f"it asks an earlier row's question with another {name}"
        return SAME

    unique_rows, left_out = keep_usable(
        rows,
        make,
        key_of,
        source=source,
        strict=False,
        remedy=(
            "Expected: question (text), and rubric with reference, or answer: text or a number. A long solution marks its answer: "
            "after ####, or in \\boxed{}."
        ),
        again=why_again,
    )
    return Rows(unique_rows, Account(dict(left_out)))


def as_row_list(value: Any, source: str, also: str = "") -> list[Any]:
    """The given rows as a list; cells of a pandas table become Python values. `source` and `also` are for the message."""
    kind = type(value).__name__
    if kind == "DataFrame":
        rows = [{**row} for row in cast("list[Row]", value.to_dict("records"))]
        for row in rows:  # arrays become lists, and gaps None
            for name, cell in row.items():
                cell_value = cell.tolist() if hasattr(cell, "tolist") else cell
                gap = type(cell_value).__name__ in ("NAType", "NaTType")
                row[name] = (
                    None
                    if gap or (isinstance(cell_value, float) and cell_value != cell_value)
                    else cell_value
                )
        return rows
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        kind = "a coroutine" if inspect.iscoroutine(cast("object", value)) else kind
        raise TaskError(
            f"{source} {kind}. Expected a list of rows such as {{'question': …, 'answer': …}}{also}."
        )
    return list(cast("Iterable[Any]", value))


def key_of(row: Row) -> str:
    """Equal for two rows that ask the same: the same question, with the same prompt if they have their own."""
    prompt: Any = row.get("prompt")
    if is_chat(prompt) and not isinstance(prompt, Mapping):
        prompt = "\n".join(f"{turn['role']}: {turn['content']}" for turn in messages_of(prompt))
    parts: list[Any] = [row.get("question"), prompt]
    return question_key("\n".join(str(part) for part in parts if is_not_empty(part)))


def row_of(value: object, config: TrainingConfig) -> Row:
    """A loader's row, checked. Raises Unusable."""
    if not isinstance(value, Mapping):
        raise Unusable(f"it is {type(value).__name__} and no row with columns")
    row = cast("Mapping[str, Any]", value)
    question, chat = row.get("question"), row.get("prompt")
    if question is None and is_chat(chat):
        question = last_user_message(chat)
    if not isinstance(question, str) or not question.strip():
        raise Unusable("it has no text in the column question")
    gaps = dict.fromkeys(name for name in ("answer", *RUBRIC) if name in row)
    answers = MathAnswer("answer", answer_tag=config.tags.answer)
    # The columns among answer, rubric and reference that the row can be scored by; None, NaN and empty text do not count.
    score_columns: Row = {}
    if _accepts(refuse_odd_answer, row.get("answer")) and _accepts(answers.check_row, row):
        score_columns["answer"] = row["answer"]
    if is_not_empty(row.get("rubric")) and _accepts(RubricOverlap("reference").check_row, row):
        score_columns |= {name: row[name] for name in RUBRIC}
    if not score_columns:
        refuse_odd_answer(row.get("answer"))
        raise Unusable("it has neither an answer nor a rubric with a reference")
    return {**row, **gaps, **score_columns, "question": question.strip()}


def _accepts(check: Callable[[Any], None], value: object) -> bool:
    """True if a check accepts this."""
    try:
        check(value)
    except (ValueError, Unusable):
        return False
    return True


def refuse_odd_answer(cell: object) -> None:
    """Raise Unusable unless the cell is text, a number, a list of these, or None (a gap)."""
    for form in accepted_forms(cell):
        if form is not None and not isinstance(plain_number(form), str | Number):
            raise Unusable(
                f"its answer is {type(form).__name__}; an answer is a text, a number, or a list of forms in which it is accepted"
            )


def accepted_forms(cell: object) -> list[Any]:
    """The accepted forms of an answer: the entries of a list, or the single answer."""
    return [*cast("Sequence[Any]", cell)] if isinstance(cell, list | tuple) else [cell]


def is_chat(cell: object) -> bool:
    """True if a prompt is messages rather than a text."""
    return not isinstance(cell, str) and is_not_empty(cell)


def last_user_message(chat: object) -> str:
    """The user's last message. Raises Unusable if there is none."""
    contents = [message["content"] for message in messages_of(chat) if message["role"] == "user"]
    if not contents:
        raise Unusable("no message of its prompt is the user's")
    return contents[-1].strip()


def is_not_empty(cell: object) -> bool:
    """True for a chat, a text or a list that is not empty."""
    if isinstance(cell, str):
        return bool(cell.strip())
    return isinstance(cell, Mapping | list | tuple) and len(cast("Any", cell)) > 0
