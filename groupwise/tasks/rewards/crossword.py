"""Rewards for crosswords: they look for the letters of the gold answer anywhere in the completion, or only in the answer tag.

Texts are compared by their letters A–Z: accents go (é is E, æ is AE), & is AND, case, spaces and punctuation do not matter. Digits
and other alphabets cannot be compared in this way, so a gold answer with any of these is refused, and an answer tag with any of
them in addition to the gold answer is wrong.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from groupwise.core.reward_call.call import score_each_row
from groupwise.core.reward_call.tags import THINK, Tag, Tags, after_reasoning, last_tagged
from groupwise.core.reward_call.text import CompletionText, completion_texts
from groupwise.tasks.rewards.extracted import LogExtra, record_answers
from groupwise.tasks.rewards.formats import without_empty_pairs
from groupwise.tasks.rewards.gold import gold_answers, gold_of_row
from groupwise.tasks.rewards.registry import reward

_LATIN = str.maketrans({"Æ": "AE", "Œ": "OE", "Ø": "O", "Ł": "L", "Đ": "D", "Ð": "D", "Þ": "TH"})
"""Letters that are not formed with an accent."""

Mode: TypeAlias = Literal["any", "contiguous", "word"]

ENUMERATIONS = ("enumeration", "lengths", "expected_len", "n_letters")
"""Columns that may state the number of letters of the answer (a number, a list, or text such as `(3,4)`); the first that does is used."""


@reward("crossword_accuracy")
@dataclass(frozen=True, slots=True)
class CrosswordAccuracy:
    """1 if the gold answer occurs in the completion, else 0; `scaled` multiplies by tag share and length ramp."""

    answer_column: str | None = None
    mode: Mode = "any"
    """any: the letters follow each other, with anything but letters between them. contiguous: the words follow each other, perhaps inside
    longer ones. word: they are words of their own."""
    scaled: bool = False
    """Multiply by the share of the four tags that occur and by the ramp, so that blurting the answer out earns little."""
    min_words: int = 25
    """Words up to which the ramp is 0: shorter completions hold no reasoning."""
    full_words: int = 80
    """Words from which the ramp is 1; more earn no more."""
    reasoning_tag: Tag = THINK.reasoning
    answer_tag: Tag = THINK.answer

    def __post_init__(self) -> None:
        _check_ramp(self.min_words, self.full_words)
        Tags(self.reasoning_tag, self.answer_tag)
        if not self.scaled:
            # These parameters do nothing unless `scaled`.
            names = ("min_words", "full_words", "reasoning_tag")
            idle = [
                f.name
                for f in fields(self)
                if f.name in names and getattr(self, f.name) != f.default
            ]
            if idle:
                raise ValueError(
                    f"{' and '.join(idle)} can have no effect unless scaled is true. Set it, or leave them out."
                )

    def __call__(
        self,
        completions: Sequence[CompletionText],
        log_extra: LogExtra | None = None,
        **columns: Any,
    ) -> list[float]:
        """A reward between 0 and 1 for each completion. Raises ValueError for a row without a gold answer in letters."""
        golds = _gold_forms(columns, len(completions), self.answer_column, self.answer_tag)
        texts = completion_texts(completions, columns, self.reasoning_tag)
        record_answers(log_extra, map(self._answer_in, texts))
        return score_each_row(self.value, texts, golds)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a gold answer in letters."""
        _check_letters(gold_of_row(row, self.answer_column, self.answer_tag))

    def value(self, text: str, forms: Sequence[str]) -> float:
        """The reward of a completion, given the accepted forms of its gold answer."""
        answer_text = text if self.scaled else after_reasoning(text, self.reasoning_tag)
        is_present = any(occurs(form, answer_text, self.mode) for form in forms)
        if not (is_present and self.scaled):
            return float(is_present)
        tags = Tags(self.reasoning_tag, self.answer_tag)
        return tag_share(tags, text) * length_ramp(text, self.min_words, self.full_words)

    def _answer_in(self, text: str) -> str:
        """The content of the answer tags; without any, all text after the reasoning."""
        tagged = last_tagged(text, self.answer_tag)
        return one_spelling(after_reasoning(text) if tagged is None else tagged)


@reward("pure_accuracy")
@dataclass(frozen=True, slots=True)
class PureAccuracy:
    """A sum of at most 1: the gold answer alone in the tag (1), the answer as a word, the answer in reasoning of some length."""

    answer_column: str | None = None
    word_bonus: float = 0.02
    """Times the tag share, if the gold answer occurs as a word: only breaks ties among wrong answers."""
    occurrence: float = 0.25
    """Times `crossword_accuracy` with `scaled`: a quarter of a right answer for having thought of it."""
    mode: Mode = "any"
    min_words: int = 25
    full_words: int = 80
    reasoning_tag: Tag = THINK.reasoning
    answer_tag: Tag = THINK.answer

    def __post_init__(self) -> None:
        _check_ramp(self.min_words, self.full_words)
        Tags(self.reasoning_tag, self.answer_tag)

    def __call__(
        self,
        completions: Sequence[CompletionText],
        log_extra: LogExtra | None = None,
        **columns: Any,
    ) -> list[float]:
        """A reward between 0 and 1 for each completion, if the bonuses are not negative.

        Raises ValueError for a row without a gold answer in letters, and for one whose enumeration fits no gold answer.
        """
        golds = _gold_forms(columns, len(completions), self.answer_column, self.answer_tag)
        enumerations = {name: columns[name] for name in ENUMERATIONS if name in columns}
        lengths = [
            _forms_of_length(
                forms,
                _stated_length({name: values[index] for name, values in enumerations.items()}),
            )
            for index, forms in enumerate(golds)
        ]
        texts = completion_texts(completions, columns, self.reasoning_tag)
        answers = (last_tagged(text, self.answer_tag) or "" for text in texts)
        record_answers(log_extra, map(one_spelling, answers))
        return score_each_row(self._reward_of_text, texts, golds, lengths)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row that `__call__` would refuse."""
        _forms_of_length(gold_of_row(row, self.answer_column, self.answer_tag), _stated_length(row))

    def _reward_of_text(self, text: str, forms: Sequence[str], exact: frozenset[str]) -> float:
        tags = Tags(self.reasoning_tag, self.answer_tag)
        answer = tags.last_answer(text) or ""
        right = letters(answer) in exact and not _other_signs(answer)
        word = any(occurs(form, text, "word") for form in forms)
        scaled = CrosswordAccuracy(
            mode=self.mode,
            scaled=True,
            min_words=self.min_words,
            full_words=self.full_words,
            reasoning_tag=self.reasoning_tag,
            answer_tag=self.answer_tag,
        )
        thought = scaled.value(text, forms)
        bonuses = self.word_bonus * tag_share(tags, text) * word + self.occurrence * thought
        return min(1.0, right + bonuses)


def letters(text: str) -> str:
    """The letters A–Z of a text: `Crème & Co.` is CREMEANDCO."""
    return re.sub("[^A-Z]", "", _plain_capitals(text))


def one_spelling(answer: str) -> str:
    """All letters and digits of an answer, including those that `letters` leaves out."""
    return "".join(sign for sign in _plain_capitals(answer) if sign.isalnum())


def occurs(gold: str, text: str, mode: Mode) -> bool:
    """True if a gold answer occurs in a text. Raises ValueError if its letters do not identify it."""
    gold_letters = _gold_letters(gold)
    if mode == "any":
        return gold_letters in letters(text)
    spaced_text = " ".join(_letter_runs(text))
    spellings = {" ".join(_letter_runs(gold)), gold_letters}
    if mode == "contiguous":
        return any(words in spaced_text for words in spellings)
    return any(f" {words} " in f" {spaced_text} " for words in spellings)


def tag_share(tags: Tags, text: str) -> float:
    """The share of the four tags that occur; those of an empty pair do not count."""
    return tags.share(without_empty_pairs(tags, text))


def length_ramp(text: str, min_words: int, full_words: int) -> float:
    """Rises in a straight line from 0 at `min_words` words to 1 at `full_words`."""
    progress = (len(text.split()) - min_words) / (full_words - min_words)
    return min(max(progress, 0.0), 1.0)


def _plain_capitals(text: str) -> str:
    """The text in capitals without accents, and with AND as a separate word for &."""
    decomposed = unicodedata.normalize("NFKD", text.replace("&", " AND "))
    unaccented = "".join(sign for sign in decomposed if not unicodedata.combining(sign))
    return unaccented.upper().translate(_LATIN)


def _other_signs(text: str) -> bool:
    """True if there are digits, or letters of another alphabet."""
    return any(sign.isalnum() and not "A" <= sign <= "Z" for sign in _plain_capitals(text))


def _letter_runs(text: str) -> list[str]:
    """Runs of letters of any alphabet; an apostrophe within belongs to the word."""
    return re.findall(r"[^\W\d_]+", re.sub("['’‘]", "", _plain_capitals(text)))


def _gold_forms(
    columns: Mapping[str, Any], count: int, answer_column: str | None, tag: Tag
) -> list[tuple[str, ...]]:
    """The accepted forms of each row, all of which must consist of letters."""
    golds = gold_answers(columns, count, answer_column, tag)
    for forms in golds:
        _check_letters(forms)
    return golds


def _check_letters(forms: Sequence[str]) -> None:
    for form in forms:
        _gold_letters(form)


def _gold_letters(gold: str) -> str:
    """The letters of a gold answer, which must consist only of letters."""
    spelling = letters(gold)
    if not spelling or _other_signs(gold):
        raise ValueError(
            f"the gold answer {gold!r:.60} cannot be told by its letters A–Z; expected words. "
            "For numbers take math_answer or pure_accuracy_math"
        )
    return spelling


def _forms_of_length(forms: Sequence[str], length: int | None) -> frozenset[str]:
    """The letters of the accepted forms that have the expected length."""
    spellings = {_gold_letters(form) for form in forms}
    matches = frozenset(
        spelling for spelling in spellings if length is None or len(spelling) == length
    )
    if not matches:
        lengths = " or ".join(str(len(spelling)) for spelling in sorted(spellings))
        raise ValueError(
            f"the row's enumeration asks for {length} letters, but its gold answer {forms[0]!r:.60} "
            f"has {lengths}; nothing could be right. Fix the row"
        )
    return matches


def _stated_length(row: Mapping[str, Any]) -> int | None:
    """The number of letters that the row states for its answer; None if it states none."""
    for name in ENUMERATIONS:
        value = row.get(name)
        # Tables with gaps store floats.
        enumeration = "" if value is None else str(value).removesuffix(".0")
        numbers = [int(number) for number in re.findall(r"[0-9]+", enumeration)]
        if numbers:
            return sum(numbers)
    return None


def _check_ramp(min_words: int, full_words: int) -> None:
    if not 0 <= min_words < full_words:
        raise ValueError(
            f"the ramp goes from {min_words} to {full_words} words; expected 0 ≤ min_words < full_words."
        )
