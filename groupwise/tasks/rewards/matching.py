"""Rewards that compare text with text: the whole completion, the answer in its tag, keywords, digits.

White space around a text never matters here; case does, except for keywords. An answer tag with nothing in it equals nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from groupwise.core.reward_call.tags import Tag, after_reasoning, check_tag, last_tagged
from groupwise.core.reward_call.text import CompletionText, completion_text, completion_texts
from groupwise.tasks.rewards.extracted import LogExtra, record_answers
from groupwise.tasks.rewards.gold import gold_answers
from groupwise.tasks.rewards.registry import reward


@reward("correctness")
@dataclass(frozen=True, slots=True)
class Correctness:
    """1 if the whole completion is the gold answer, else 0: for tasks that want the answer and nothing else."""

    answer_column: str | None = None

    def __call__(self, completions: Sequence[CompletionText], **columns: Any) -> list[float]:
        """1 or 0 for each completion. Raises ValueError for a row without a gold answer."""
        golds = gold_answers(columns, len(completions), self.answer_column)
        pairs = zip(completions, golds, strict=True)
        return [float(completion_text(c).strip() in forms) for c, forms in pairs]


@reward("correctness_xml")
@dataclass(frozen=True, slots=True)
class CorrectnessXml:
    """`right` if the last answer tag holds the gold answer, else 0."""

    answer_column: str | None = None
    right: float = 2.0
    """The most that `strict_format`, `soft_format`, `xml_count` and `int_reward` can earn together."""
    answer_tag: Tag = "answer"

    def __post_init__(self) -> None:
        check_tag(self.answer_tag)

    def __call__(
        self,
        completions: Sequence[CompletionText],
        log_extra: LogExtra | None = None,
        **columns: Any,
    ) -> list[float]:
        """`right` or 0 for each completion. Raises ValueError for a row without a gold answer."""
        golds = gold_answers(columns, len(completions), self.answer_column, self.answer_tag)
        texts = completion_texts(completions, columns)
        answers = [last_tagged(text, self.answer_tag) for text in texts]
        record_answers(log_extra, map(_first_form, answers, golds))
        pairs = zip(answers, golds, strict=True)
        return [self.right if answer in forms else 0.0 for answer, forms in pairs]


def _first_form(answer: str | None, forms: Sequence[str]) -> str | None:
    """The first of the accepted forms, for each of them, because majority voting must count them as one answer."""
    return forms[0] if answer in forms else answer


@reward("int_reward")
@dataclass(frozen=True, slots=True)
class IntReward:
    """`right` if the last answer tag holds digits 0–9 and nothing else, whether or not they are the gold answer."""

    right: float = 0.5
    """Less than a right answer earns, so that digits alone never win."""
    answer_tag: Tag = "answer"

    def __post_init__(self) -> None:
        check_tag(self.answer_tag)

    def __call__(self, completions: Sequence[CompletionText], **columns: Any) -> list[float]:
        """`right` or 0 for each completion."""
        texts = completion_texts(completions, columns)
        answers = (last_tagged(text, self.answer_tag) or "" for text in texts)
        return [self.right if re.fullmatch("[0-9]+", answer) else 0.0 for answer in answers]


@reward("keyword_match")
def keyword_match(
    completions: Sequence[CompletionText], keywords: Sequence[Any], **columns: Any
) -> list[float | None]:
    """Share of the row's keywords that the completion has after its reasoning, ignoring case; None for a row that has none.

    The column `keywords` holds a list, or text with commas between them.
    """
    texts = map(after_reasoning, completion_texts(completions, columns))
    pairs = zip(texts, keywords, strict=True)
    return [keyword_share(text, _parse_keywords(value)) for text, value in pairs]


def keyword_share(text: str, keywords: Iterable[str]) -> float | None:
    """Share of the keywords that a text contains, ignoring case; None if there are none."""
    folded_keywords, folded_text = {word.casefold() for word in keywords}, text.casefold()
    return (
        sum(word in folded_text for word in folded_keywords) / len(folded_keywords)
        if folded_keywords
        else None
    )


def _parse_keywords(value: Any) -> set[str]:
    plain = value.tolist() if hasattr(value, "tolist") else value
    if plain is None:
        return set()
    if isinstance(plain, str):
        items: Iterable[Any] = plain.split(",")
    elif isinstance(plain, list | tuple | set):
        items = cast("Iterable[Any]", plain)
    else:
        raise ValueError(
            f"the column `keywords` holds {type(plain).__name__} {plain!r:.60}; "
            "expected a list, or text with commas between the keywords"
        )
    words = (str(item).strip() for item in items if item is not None)
    return {word for word in words if word}
