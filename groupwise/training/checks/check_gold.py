"""Completions of known quality: right ones, made from gold answers, and wrong ones.

Only the task knows the form of a right completion. For an exact check, a task has a column `gold_completion`: the text that a perfect
model would write, or a list of such texts. It is a column and not a hook, because it belongs to a row, can come from JSONL as well as
from Python, and reaches the rewards like any other column.

Without it, the gold answer comes from the column that holds it and is written in the usual ways (plain, in tags, boxed). The way that
the rewards can read is assumed to be the task's own, and the report names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from groupwise.core.types import Example
from groupwise.tasks.rewards.gold import GOLD_COLUMNS, marked_answer
from groupwise.training.checks.check_data import prompt_as_text

GOLD_COMPLETION = "gold_completion"

LAYOUTS = {
    "as it stands in the column": "{stored}",
    "as plain text": "{answer}",
    "in answer tags": "<answer>{answer}</answer>",
    "in reasoning and answer tags": "<reasoning>\nSo it is.\n</reasoning>\n<answer>\n{answer}\n</answer>\n",
    "in think and answer tags": "<think>\nSo it is.\n</think>\n<answer>\n{answer}\n</answer>",
    "after think tags": "<think>\nSo it is.\n</think>\n{answer}",
    "in answer tags after a closing think tag": "So it is.\n</think>\n<answer>{answer}</answer>",
    "in \\boxed{}": "\\boxed{{answer}}",
    "after ####": "#### {answer}",
}
"""The ways to write an answer in a completion; `{stored}` is the column's text, `{answer}` the answer in it."""

Kind = Literal["gold", "another's gold", "empty", "garbage", "prompt echoed", "very long"]

GARBAGE = "Qzxv wkjp blorf, snerd quux."
LONG_CHARACTERS = 20_000
"""Length of a very long completion in characters, before it is cut to what a policy may write."""
MAX_WRONG_GOLDS = 2
"""Number of other rows whose gold answers are tried on each row."""


@dataclass(frozen=True, slots=True)
class Gold:
    """The source of the gold completions: a column, and how its answers are written."""

    column: str
    layout: str | None
    """A key of LAYOUTS; None if the column holds complete completions."""
    is_read: bool = field(default=True, kw_only=True)
    """True if the rewards distinguish right from wrong in this layout."""

    def texts(self, example: Example) -> tuple[str, ...]:
        """The right completions of a row, one for each accepted form; empty if the row has no gold."""
        forms = accepted_forms(example.columns.get(self.column))
        if self.layout is None:
            return forms
        return tuple(format_answer(form, self.layout) for form in forms)

    @property
    def description(self) -> str:
        """A description for the report."""
        if self.layout is None:
            return f"column `{self.column}`"
        return f"column `{self.column}`, written {self.layout}"


@dataclass(frozen=True, slots=True)
class GoldByLabel(Gold):
    """The gold of each label, if rows of several tasks have their own rewards."""

    golds: Mapping[str | None, Gold]
    label_of: Callable[[Mapping[str, Any]], str | None]

    @classmethod
    def of(
        cls, golds: Mapping[str | None, Gold], label_of: Callable[[Mapping[str, Any]], str | None]
    ) -> GoldByLabel:
        """Combine the gold of several labels; `golds` contains only labels whose rows have gold."""
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
    """The columns that may hold gold: complete completions before answers. `answer_column` is `rewards.answer_column`."""
    return (GOLD_COMPLETION, *(GOLD_COLUMNS if answer_column is None else (answer_column,)))


def gold_column(examples: Sequence[Example], answer_column: str | None = None) -> str | None:
    """The column that holds the gold; None if there is none."""
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
    """The marked answer in the column's text; without a mark, the whole text.

    A text that consists only of a box stays boxed, because rewards that compare text require the box.
    """
    text = stored.strip()
    marked = marked_answer(text, boxes=True)
    return text if marked is None or text == rf"\boxed{{{marked}}}" else marked


def format_answer(stored: str, layout: str) -> str:
    """A gold answer as a completion in this layout."""
    pattern = LAYOUTS[layout]
    return pattern.replace("{stored}", stored).replace("{answer}", answer_in(stored))


def cases_of(
    example: Example,
    other_examples: Sequence[Example],
    gold: Gold | None,
    cut: Callable[[str], str],
) -> list[Case]:
    """The right completions of an example and wrong ones: other rows' gold, nothing, nonsense, the prompt, a very long text.

    `cut` shortens a text to the longest completion that a policy may write.
    """
    gold_texts = gold.texts(example) if gold else ()
    cases = [Case("gold", text) for text in gold_texts]
    cases += [
        Case("another's gold", text) for text in _wrong_golds(gold_texts, other_examples, gold)
    ]
    cases += [
        Case("empty", ""),
        Case("garbage", GARBAGE),
        Case("prompt echoed", cut(echo(example))),
        Case("very long", cut((GARBAGE + " ") * (LONG_CHARACTERS // len(GARBAGE)))),
    ]
    gold_keys = {_normalise_case(text) for text in gold_texts}
    return [
        case for case in cases if case.kind == "gold" or _normalise_case(case.text) not in gold_keys
    ]


def echo(example: Example) -> str:
    """The completion of a model that repeats the question: the prompt, or its last user message."""
    if isinstance(example.prompt, str):
        return example.prompt
    questions = [message for message in example.prompt if message.get("role") == "user"]
    return str(questions[-1].get("content") or "") if questions else prompt_as_text(example.prompt)


def _wrong_golds(
    gold_texts: Sequence[str], other_examples: Sequence[Example], gold: Gold | None
) -> Sequence[str]:
    """Gold completions of other rows that are wrong for this row."""
    if gold is None:
        return ()
    gold_keys = {_normalise_case(text) for text in gold_texts}
    wrong_texts: dict[str, str] = {}
    for example in other_examples:
        for text in gold.texts(example)[:1]:
            if _normalise_case(text) not in gold_keys:
                wrong_texts.setdefault(_normalise_case(text), text)
        if len(wrong_texts) == MAX_WRONG_GOLDS:
            break
    return tuple(wrong_texts.values())


def _normalise_case(text: str) -> str:
    """A key that is equal for texts that differ only in case and spaces."""
    return " ".join(text.split()).casefold()
