"""Completions whose worth is known in advance: right ones made from gold answers, and wrong ones.

What a right completion looks like is known to the task alone. A task that wants to be checked exactly has a column
`gold_completion`: the text that a perfect model would write, or a list of several such. It is a column and not a hook, because it
belongs to a row, comes out of JSONL as well as out of Python, and reaches the rewards like any other column.

Without it the gold answer is taken from the column that holds it and is written in the usual ways (plain, in tags, boxed); the one that
the rewards read is taken for the task's own, and the report says which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from groupwise.core.types import Example
from groupwise.tasks.rewards.gold import GOLD_COLUMNS, marked_answer
from groupwise.training.checks.check_data import written

GOLD_COMPLETION = "gold_completion"

LAYOUTS = {
    "as it stands in the column": "{stored}",
    "plain": "{answer}",
    "answer tags": "<answer>{answer}</answer>",
    "reasoning and answer tags": "<reasoning>\nSo it is.\n</reasoning>\n<answer>\n{answer}\n</answer>\n",
    "think and answer tags": "<think>\nSo it is.\n</think>\n<answer>\n{answer}\n</answer>",
    "think tags": "<think>\nSo it is.\n</think>\n{answer}",
    "closing think tag and answer tags": "So it is.\n</think>\n<answer>{answer}</answer>",
    "boxed": "\\boxed{{answer}}",
    "after ####": "#### {answer}",
}
"""How a completion may hold its answer; `{stored}` is the column's text, `{answer}` the answer in it."""

Kind = Literal["gold", "another's gold", "empty", "garbage", "prompt echoed", "very long"]

GARBAGE = "Qzxv wkjp blorf, snerd quux."
LONG_CHARACTERS = 20_000
"""More than any limit of tokens lets through in practice."""
OTHERS = 2
"""Gold answers of other rows that are tried on each row."""


@dataclass(frozen=True, slots=True)
class Gold:
    """The source of the gold completions: a column and how its answers are written."""

    column: str
    layout: str | None
    """A key of LAYOUTS; None where the column holds whole completions."""
    is_read: bool = field(default=True, kw_only=True)
    """True if the rewards tell right from wrong in this layout."""

    def texts(self, example: Example) -> tuple[str, ...]:
        """The right completions of a row, one for each accepted form; empty where the row has no gold."""
        forms = accepted_forms(example.columns.get(self.column))
        if self.layout is None:
            return forms
        return tuple(laid_out(form, self.layout) for form in forms)

    @property
    def described(self) -> str:
        """A description for the report."""
        if self.layout is None:
            return f"column `{self.column}`"
        return f"column `{self.column}`, written {self.layout}"


@dataclass(frozen=True, slots=True)
class GoldByLabel(Gold):
    """The gold of each label, if the rows of several tasks have rewards of their own."""

    golds: Mapping[str | None, Gold]
    label_of: Callable[[Mapping[str, Any]], str | None]

    @classmethod
    def of(
        cls, golds: Mapping[str | None, Gold], label_of: Callable[[Mapping[str, Any]], str | None]
    ) -> GoldByLabel:
        """`golds` has only the labels whose rows have gold."""
        columns = dict.fromkeys(gold.column for gold in golds.values())
        layouts = dict.fromkeys(gold.layout for gold in golds.values() if gold.layout)
        is_read = any(gold.is_read for gold in golds.values())
        return cls(", ".join(columns), ", ".join(layouts) or None, golds, label_of, is_read=is_read)

    def texts(self, example: Example) -> tuple[str, ...]:
        """See `Gold.texts`."""
        gold = self.golds.get(self.label_of(example.columns))
        return gold.texts(example) if gold else ()


@dataclass(frozen=True, slots=True)
class Case:
    """One completion of one example, of known kind."""

    kind: Kind
    text: str


def gold_columns(answer_column: str | None = None) -> tuple[str, ...]:
    """The columns that may hold gold, whole completions before answers; `answer_column` is `rewards.answer_column`."""
    return (GOLD_COMPLETION, *(GOLD_COLUMNS if answer_column is None else (answer_column,)))


def gold_column(examples: Sequence[Example], answer_column: str | None = None) -> str | None:
    """The column that holds the gold; None where there is none."""
    for name in gold_columns(answer_column):
        if any(accepted_forms(example.columns.get(name)) for example in examples):
            return name
    return None


def accepted_forms(value: Any) -> tuple[str, ...]:
    """The texts that count as right, the preferred one first."""
    if isinstance(value, list | tuple):
        entries = cast("Sequence[Any]", value)
        return tuple(form for entry in entries for form in accepted_forms(entry))
    if isinstance(value, float) and value.is_integer():
        return (str(int(value)),)
    if isinstance(value, str | int | float):
        return (str(value),)
    return ()


def answer_in(stored: str) -> str:
    """The answer within the column's text where it is marked there, else all of it.

    A text that is a box and nothing else stays one, as rewards that compare text ask for it.
    """
    whole = stored.strip()
    marked = marked_answer(whole, boxes=True)
    return whole if marked is None or whole == rf"\boxed{{{marked}}}" else marked


def laid_out(stored: str, layout: str) -> str:
    """A gold answer as a completion."""
    pattern = LAYOUTS[layout]
    return pattern.replace("{stored}", stored).replace("{answer}", answer_in(stored))


def cases_of(example: Example, others: Sequence[Example], gold: Gold | None) -> list[Case]:
    """The right completions of an example, and wrong ones: other rows' gold, nothing, nonsense, the prompt, too much."""
    right = gold.texts(example) if gold else ()
    cases = [Case("gold", text) for text in right]
    cases += [Case("another's gold", text) for text in _wrong_golds(right, others, gold)]
    cases += [
        Case("empty", ""),
        Case("garbage", GARBAGE),
        Case("prompt echoed", echo(example)),
        Case("very long", (GARBAGE + " ") * (LONG_CHARACTERS // len(GARBAGE))),
    ]
    known = {_normalise_case(text) for text in right}
    return [
        case for case in cases if case.kind == "gold" or _normalise_case(case.text) not in known
    ]


def echo(example: Example) -> str:
    """The completion of a model that repeats the question: the prompt, or its last user message."""
    if isinstance(example.prompt, str):
        return example.prompt
    questions = [message for message in example.prompt if message.get("role") == "user"]
    return str(questions[-1].get("content") or "") if questions else written(example.prompt)


def _wrong_golds(
    right: Sequence[str], others: Sequence[Example], gold: Gold | None
) -> Sequence[str]:
    """Gold completions of other rows that are none here."""
    if gold is None:
        return ()
    known = {_normalise_case(text) for text in right}
    found: dict[str, str] = {}
    for other in others:
        for text in gold.texts(other)[:1]:
            if _normalise_case(text) not in known:
                found.setdefault(_normalise_case(text), text)
        if len(found) == OTHERS:
            break
    return tuple(found.values())


def _normalise_case(text: str) -> str:
    """Equal for texts that differ in case and spaces only."""
    return " ".join(text.split()).casefold()
