r"""Rewards for mathematical answers.

An answer is what stands in the last answer tag, or in the last `\boxed{}` of a completion without answer tags. It is right if it
agrees with the gold answer as `canonical` compares them, or if math-verify finds both to be the same expression, set or interval.

math-verify is asked about expressions only. It takes letters for factors, so that `even` would be `neve`: words are compared as they
are written. Its own time limits need signals, which a thread cannot have, and what they do depends on the machine's speed; so it is
given what it can read quickly, by bounds that depend on the text alone, and a longer or deeper answer has to agree as it is written.
"""

from __future__ import annotations

import cmath
import logging
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from groupwise.rewards.canonical import (
    LONGEST,
    Number,
    agree,
    bare_maths,
    boxed,
    number,
    one_spelling,
)
from groupwise.rewards.extracted import LogExtra, record_answers
from groupwise.rewards.formats import starts_with_both_pairs
from groupwise.rewards.gold import gold_answers, gold_of_row
from groupwise.rewards.registry import reward
from groupwise.rewards.tags import THINK, Tag, Tags, check_tag, last_tagged, marks
from groupwise.rewards.text import CompletionText, completion_text

MOST_CHARACTERS = 120
"""Of an expression that math-verify is given."""

MOST_NESTED = 6
"""Brackets within brackets there: reading takes exponential time in them."""

MOST_POWER = 1_000
"""Product of all whole exponents of a number there: larger powers fill the memory."""

MOST_EXPANDED = 10
"""The same where letters occur: such powers are multiplied out."""

APART = 1e-3
"""Share by which values differ that cannot be one number rounded."""

_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt min max gcd lcm mod".split()
)
_SLOW = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim|binom)(?![a-zA-Z])|!\s*!|[)}\]]\s*!|\d{4,}\s*!"
)


@reward("math_answer")
@dataclass(frozen=True, slots=True)
class MathAnswer:
    """1 for a right answer, else 0. With `tolerant`, one value for each way of being more or less right."""

    answer_column: str | None = None
    tolerant: bool = False
    """Grade by how near the answer comes, for models that are seldom right."""
    exact: float = 3.0
    """Tolerant: the tag holds a gold answer sign by sign."""
    trimmed: float = 1.5
    """Tolerant: right, but with white space around it or written otherwise."""
    within_10_percent: float = 0.5
    """Tolerant: a number that is off by at most a tenth of the gold one."""
    within_20_percent: float = 0.25
    """Tolerant: a number that is off by at most a fifth of the gold one."""
    wrong: float = -1.0
    """Tolerant: any other number."""
    not_numeric: float = -0.5
    """Tolerant: there is no answer, or it or the gold answer is no number, so that no distance can be told."""
    answer_tag: Tag = "answer"

    def __post_init__(self) -> None:
        check_tag(self.answer_tag)
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
        texts = [completion_text(each) for each in completions]
        record_answers(log_extra, (spelt_answer(text, self.answer_tag) for text in texts))
        return [self._value(text, forms) for text, forms in zip(texts, golds, strict=True)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a gold answer."""
        gold_of_row(row, self.answer_column, self.answer_tag, True)

    def _value(self, text: str, forms: Sequence[str]) -> float:
        answer = answer_of(text, self.answer_tag)
        right = answer is not None and is_right(answer, forms)
        if not self.tolerant:
            return float(right)
        if answer is None or not right:
            return self._distance(answer or "", forms)
        return self.exact if answer in forms and self._stands(answer, text) else self.trimmed

    def _stands(self, answer: str, text: str) -> bool:
        """Whether the last answer tag holds the answer with no white space around it."""
        opened, closed = map(re.escape, marks(self.answer_tag))
        pair = rf"{opened}{re.escape(answer)}{closed}(?!.*{opened})"
        return re.search(pair, text, re.DOTALL | re.IGNORECASE) is not None

    def _distance(self, answer: str, forms: Sequence[str]) -> float:
        given = number(answer) if len(answer) <= LONGEST else None
        golds = [gold for gold in map(number, forms) if gold is not None]
        if given is None or not golds:
            return self.not_numeric
        off = min(_off(gold, given) for gold in golds)
        if off <= Fraction(1, 10):
            return self.within_10_percent
        return self.within_20_percent if off <= Fraction(1, 5) else self.wrong


_GRADES = (3.0, 1.5, 0.5, 0.25, -1.0, -0.5)


@reward("pure_accuracy_math")
@dataclass(frozen=True, slots=True)
class PureAccuracyMath:
    """1 if the completion starts with reasoning and answer in their tags and the answer agrees with the gold one, else 0.

    Canonical forms are compared (see `canonical`), math-verify is not asked.
    """

    answer_column: str | None = None
    reasoning_opened: bool = False
    """Whether prompt or chat template end with the opening reasoning tag, so that completions start behind it."""
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
        texts = [completion_text(each) for each in completions]
        tagged = (last_tagged(text, self.answer_tag) or "" for text in texts)
        record_answers(log_extra, map(one_spelling, tagged))
        return [float(self._right(text, forms)) for text, forms in zip(texts, golds, strict=True)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a gold answer."""
        gold_of_row(row, self.answer_column, self.answer_tag, True)

    def _right(self, text: str, forms: Sequence[str]) -> bool:
        tags = Tags(self.reasoning_tag, self.answer_tag)
        whole = tags.four[0] + text if self.reasoning_opened else text
        answer = tags.last_answer(whole) or ""
        return starts_with_both_pairs(tags, whole) and any(agree(form, answer) for form in forms)


def answer_of(text: str, tag: Tag) -> str | None:
    """A completion's answer: in the last answer tag, else in the last box; None where there is none or nothing is in it."""
    tagged = last_tagged(text, tag)
    found = boxed(text) if tagged is None else tagged
    return found.strip() or None if found is not None else None


def spelt_answer(text: str, tag: Tag) -> str | None:
    """The same in one spelling; see `one_spelling`."""
    answer = answer_of(text, tag)
    return None if answer is None else one_spelling(answer)


def is_right(answer: str, forms: Sequence[str]) -> bool:
    """Whether an answer is one of the accepted forms, written in whatever way."""
    return any(agree(form, answer) for form in forms) or any(_verified(f, answer) for f in forms)


def _verified(gold: str, answer: str) -> bool:
    """What math-verify says of two expressions. Its verdict is not symmetric: the gold answer comes first."""
    if number(gold) is not None and number(answer) is not None:
        return False  # `agree` has decided that
    expected, given = _expression(gold), _expression(answer)
    if expected is None or given is None:
        return False
    parse, verify = _math_verify()
    # None: no time limits, as they would need signals; the bounds of `_expression` stand for them.
    golds = parse(f"${expected}$", parsing_timeout=None)
    answers = parse(f"${given}$", parsing_timeout=None)
    if "%" not in expected + given and _apart(golds, answers):
        return False
    return bool(verify(golds, answers, timeout_seconds=None))


def _apart(golds: Sequence[Any], answers: Sequence[Any]) -> bool:
    """Whether two expressions have other values where their letters are numbers; then nobody need simplify them, which takes long."""
    if not golds or not answers:
        return True
    gold, answer = golds[0], answers[0]
    if not all(getattr(each, "is_Expr", False) for each in (gold, answer)):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: 1.37 + 0.61 * place for place, symbol in enumerate(symbols)}
    try:
        one, other = (complex(each.evalf(15, subs=point)) for each in (gold, answer))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False  # no number there
    if not cmath.isfinite(one) or not cmath.isfinite(other):
        return cmath.isfinite(one)
    return abs(one - other) > APART * max(abs(one), abs(other))


def _expression(text: str) -> str | None:
    """The text as math-verify is given it; None for words, and for what it may not read quickly."""
    if len(text) > LONGEST:
        return None
    bare = bare_maths(text).replace("$", "")
    if not bare or len(bare) > MOST_CHARACTERS or in_words(bare) or _SLOW.search(bare):
        return None
    if _has_unread_signs(bare):
        return None
    return bare if _depth(bare) <= MOST_NESTED and _powers_are_small(bare) else None


def _has_unread_signs(text: str) -> bool:
    """Whether there are roots, or numbers that are no plain digits: math-verify would leave them out, and read `2½` as 2."""
    return any(sign in "√∛∜" or unicodedata.category(sign) == "No" for sign in text)


def in_words(text: str) -> bool:
    """Whether it is written in letters alone, or has a word among its signs."""
    spelt = re.sub(r"\\text\{[^{}]*\}", " text ", text)
    plain = re.sub(r"\\(?:begin|end)\{[^{}]*\}|\\[a-zA-Z]+", " ", spelt)
    words = set(re.findall(r"[^\W\d_]{3,}", plain)) - _FUNCTIONS
    return bool(words) or (re.search(r"[\d\\+*/^<>=|-]", text) is None and "," not in text)


def _depth(text: str) -> int:
    """How many brackets are open at once."""
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _powers_are_small(text: str) -> bool:
    exponents = re.findall(r"\^\s*(\{[^{}]*\}?|\S)", text)
    if any("^" in exponent for exponent in exponents) or re.search(r"\^[^\s+\-*/(){}]*\^", text):
        return False
    sizes = [max(1, int(digits)) for each in exponents for digits in re.findall(r"\d+", each)]
    symbols = re.search(r"[a-zA-Z]", re.sub(r"\\(?:[dt]?frac|cdot|times)(?![a-zA-Z])", "", text))
    return math.prod(sizes) <= (MOST_EXPANDED if symbols else MOST_POWER)


def _off(gold: Number, answer: Number) -> Fraction:
    """How far a number is from the gold one, as a share of that; 1 for all but 0 itself where the gold one is 0."""
    if gold.value == 0:
        return Fraction(answer.value != 0)
    return abs(answer.value - gold.value) / abs(gold.value)


@cache
def _math_verify() -> tuple[Any, Any]:
    """Its functions, imported when they are first needed: it brings sympy, which takes half a second."""
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ImportError(
            "Mathematical expressions are compared by the package math-verify, which is not installed: "
            "pip install 'groupwise[train]'."
        ) from error
    # It warns of the time limits that it is told to leave out, and of every text that it cannot read.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return parse, verify
