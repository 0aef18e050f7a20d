"""Measures answers, independently of their rewards.

Rewards require the config's marks; a metric should distinguish a model that does not know from one that writes no marks. So the answer is
the text between the marks (or in a \\boxed{}). If there is none, it is the last number of the text if the gold answer is a number, else
the last line. A gold answer in words is also right if the text ends with it, as in `The capital is Tokyo.`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.core.reward_call.tags import Tags, after_reasoning, marks
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.tasks.rewards.answers import last_number, literal_number
from groupwise.tasks.rewards.gold import gold_answers, gold_of_row
from groupwise.tasks.rewards.mathematics import MathAnswer, answer_of, in_words
from groupwise.tasks.rewards.overlap import words


def grades(
    tags: Tags, completions: Sequence[CompletionText], *, tolerant: bool, **columns: Any
) -> list[float]:
    """The grades of `math_answer`."""
    golds = gold_answers(columns, len(completions), tag=tags.answer, boxes=True)
    said = zip(completions, golds, strict=True)
    grade = MathAnswer(tolerant=tolerant, answer_tag=tags.answer)
    return grade([with_marks(tags, each, forms) for each, forms in said], **columns)


def is_numeric(tags: Tags, answer: Any) -> bool:
    """True if a gold answer is a number."""
    return _has_number(gold_of_row({"answer": answer}, tag=tags.answer, boxes=True))


def with_marks(tags: Tags, completion: CompletionText, forms: Sequence[str]) -> str:
    """The text with its answer between marks; `forms` are those in which the gold answer is accepted."""
    text = after_reasoning(completion_text(completion), tags.reasoning)
    marked = answer_of(text, tags.answer)
    if (told := _at_the_end(marked or _last_line(text), forms)) is not None:
        answer = told
    elif marked is not None:
        return text
    else:
        answer = last_number(text) if _has_number(forms) else _last_line(text)
    opened, closed = marks(tags.answer)
    return f"{opened}{answer}{closed}" if answer else text


def _at_the_end(said: str, forms: Sequence[str]) -> str | None:
    """The gold answer in words that ends what is said, as whole words."""
    heard = words(said)
    for form in forms:
        end = words(form)
        if end and literal_number(form) is None and in_words(form) and heard[-len(end) :] == end:
            return form
    return None


def _has_number(forms: Sequence[str]) -> bool:
    return any(literal_number(form) is not None for form in forms)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
