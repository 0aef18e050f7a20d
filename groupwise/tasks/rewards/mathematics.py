r"""Rewards for mathematical answers.

The answer is the content of the last answer tag; without a tag, the content of the last `\boxed{}`, or the text after `####` or
`Answer:` in the last line. It is right if it matches the gold answer; see `answers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from groupwise.core.reward_call.call import score_each_row
from groupwise.core.reward_call.tags import (
    THINK,
    Tag,
    Tags,
    after_reasoning,
    check_tag,
    last_tagged,
    marks,
)
from groupwise.core.reward_call.text import CompletionText, completion_texts
from groupwise.tasks.rewards.answers import (
    answer_matches,
    final_line_answer,
    literal_number,
    matches_literally,
    voting_key,
)
from groupwise.tasks.rewards.boxes import last_boxed
from groupwise.tasks.rewards.extracted import LogExtra, record_answers
from groupwise.tasks.rewards.formats import starts_with_both_pairs
from groupwise.tasks.rewards.gold import gold_answers, gold_of_row
from groupwise.tasks.rewards.registry import reward

_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt min max gcd lcm mod".split()
)


@reward("math_answer")
@dataclass(frozen=True, slots=True)
class MathAnswer:
    """1 for a right answer, else 0. With `tolerant`, one value for each way of being more or less right."""

    answer_column: str | None = None
    untagged: bool = True
    """Whether a completion without an answer tag may give its answer in a box, or in a last line `#### 72` or `Answer: 72`."""
    tolerant: bool = False
    """Grade by how near the answer comes, for models that are seldom right."""
    exact: float = 3.0
    """Tolerant: the tag holds a gold answer character for character."""
    trimmed: float = 1.5
    """Tolerant: right, but with white space around it or written otherwise."""
    within_10_percent: float = 0.5
    """Tolerant: a number that is off by at most a tenth of the gold one."""
    within_20_percent: float = 0.25
    """Tolerant: a number that is off by at most a fifth of the gold one."""
    wrong: float = -1.0
    """Tolerant: any other number."""
    not_numeric: float = -0.5
    """Tolerant: there is no answer, or it or the gold answer is not a number, so that they have no distance."""
    answer_tag: Tag = "answer"
    reasoning_tag: Tag | None = None
    """A reasoning tag in addition to the usual ones, which are known."""

    def __post_init__(self) -> None:
        check_tag(self.answer_tag)
        if self.reasoning_tag is not None:
            Tags(self.reasoning_tag, self.answer_tag)
        grades = (self.exact, self.trimmed, self.within_10_percent, self.within_20_percent)
        if (
            sorted(grades, reverse=True) != list(grades)
            or max(self.wrong, self.not_numeric) > grades[-1]
        ):
            raise ValueError(
                "a better answer would earn less. Expected exact ≥ trimmed ≥ within_10_percent ≥ within_20_percent ≥ "
                "wrong and not_numeric."
            )
        if not self.tolerant and (*grades, self.wrong, self.not_numeric) != _GRADES:
            raise ValueError(
                "its grades have no effect unless tolerant is true. Set it, or leave them out."
            )

    def __call__(
        self,
        completions: Sequence[CompletionText],
        log_extra: LogExtra | None = None,
        **columns: Any,
    ) -> list[float]:
        """One of the values above for each completion. Raises ValueError for a row without a gold answer."""
        golds = gold_answers(columns, len(completions), self.answer_column, self.answer_tag, True)
        reasoning_tags = () if self.reasoning_tag is None else (self.reasoning_tag,)
        texts = completion_texts(completions, columns, *reasoning_tags)
        answers = [
            answer_of(text, self.answer_tag, *reasoning_tags, untagged=self.untagged)
            for text in texts
        ]
        record_answers(log_extra, (answer and voting_key(answer) for answer in answers))
        return score_each_row(self._reward_of_text, texts, answers, golds)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a gold answer."""
        gold_of_row(row, self.answer_column, self.answer_tag, True)

    def _reward_of_text(self, text: str, answer: str | None, forms: Sequence[str]) -> float:
        right = answer is not None and matches_any(forms, answer)
        if not self.tolerant:
            return float(right)
        if answer is None or not right:
            number = literal_number(answer or "")
            golds = [gold for gold in map(literal_number, forms) if gold is not None]
            if number is None or not golds:
                return self.not_numeric
            # Relative distance from the nearest gold number; for a gold 0, every other number has distance 1.
            distance = min(
                abs(number - gold) / abs(gold) if gold else Fraction(number != 0) for gold in golds
            )
            if distance <= Fraction(1, 10):
                return self.within_10_percent
            return self.within_20_percent if distance <= Fraction(1, 5) else self.wrong
        return (
            self.exact if answer in forms and self._is_exact_in_tag(answer, text) else self.trimmed
        )

    def _is_exact_in_tag(self, answer: str, text: str) -> bool:
        """True if the last answer tag holds exactly the answer, without white space around it."""
        opening, closing = marks(self.answer_tag)
        openings = [*re.finditer(re.escape(opening), text, re.IGNORECASE)]
        pair = re.compile(re.escape(opening + answer + closing), re.IGNORECASE)
        return bool(openings) and pair.match(text, openings[-1].start()) is not None


_GRADES = (3.0, 1.5, 0.5, 0.25, -1.0, -0.5)


@reward("pure_accuracy_math")
@dataclass(frozen=True, slots=True)
class PureAccuracyMath:
    """1 if the completion starts with reasoning and answer in their tags and the answer answer_matches with the gold one, else 0.

    Nothing is worked out: the answer is the same number in digits, or the same characters.
    """

    answer_column: str | None = None
    reasoning_opened: bool = False
    """Whether prompt or chat template end with the opening reasoning tag, so that completions start after it."""
    reasoning_tag: Tag = THINK.reasoning
    answer_tag: Tag = THINK.answer

    def __post_init__(self) -> None:
        Tags(self.reasoning_tag, self.answer_tag)

    def __call__(
        self,
        completions: Sequence[CompletionText],
        log_extra: LogExtra | None = None,
        **columns: Any,
    ) -> list[float]:
        """1 or 0 for each completion. Raises ValueError for a row without a gold answer."""
        golds = gold_answers(columns, len(completions), self.answer_column, self.answer_tag, True)
        texts = completion_texts(completions, columns, self.reasoning_tag)
        answers = (last_tagged(text, self.answer_tag) or "" for text in texts)
        record_answers(log_extra, map(voting_key, answers))
        return score_each_row(self._reward_of_text, texts, golds)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a gold answer."""
        gold_of_row(row, self.answer_column, self.answer_tag, True)

    def _reward_of_text(self, text: str, forms: Sequence[str]) -> float:
        tags = Tags(self.reasoning_tag, self.answer_tag)
        prefix = tags.four[0] if self.reasoning_opened else ""
        full_text = text if text.startswith(prefix) else prefix + text
        answer = tags.last_answer(full_text) or ""
        right = any(matches_literally(form, answer) for form in forms)
        return float(right and starts_with_both_pairs(tags, full_text))


def answer_of(text: str, tag: Tag, *reasoning: Tag, untagged: bool = True) -> str | None:
    """A completion's answer: in the last answer tag; if it has none and `untagged` is set, in the last box or announced by the last
    line.

    Text inside `reasoning` tags, or the reasoning tags that models commonly use, is never an answer. None if there is no answer, or
    it is empty.
    """
    answer_text = after_reasoning(text, *reasoning)
    answer = last_tagged(answer_text, tag, listed=True)
    if answer is None and untagged:
        answer = (
            final_line_answer(answer_text) if (inner := last_boxed(answer_text)) is None else inner
        )
    return (answer or "").strip() or None


def matches_any(golds: Sequence[str], answer: str) -> bool:
    """True if an answer matches one of the accepted ones."""
    return any(answer_matches(gold, answer) for gold in golds)


def in_words(text: str) -> bool:
    """True if the text consists only of letters, or has a word among its symbols."""
    unstyled = re.sub(r"\\text\{[^{}]*\}", " text ", text)
    plain = re.sub(r"\\(?:begin|end)\{[^{}]*\}|\\[a-zA-Z]+", " ", unstyled)
    words = set(re.findall(r"[^\W\d_]{3,}", plain)) - _FUNCTIONS
    return bool(words) or (re.search(r"[\d\\+*/^<>=|-]", text) is None and "," not in text)
