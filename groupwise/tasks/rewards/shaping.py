"""Rewards for the form of a completion, used in addition to one for its content: repetition and length.

Lengths are numbers of sampled tokens, including special tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.core.reward_call.call import score_each_row
from groupwise.core.reward_call.tags import Tag, check_tag
from groupwise.core.reward_call.text import CompletionText, completion_text, completion_texts
from groupwise.tasks.rewards.answers import voting_key
from groupwise.tasks.rewards.extracted import LogExtra, record_answers
from groupwise.tasks.rewards.gold import gold_answers, gold_of_row
from groupwise.tasks.rewards.mathematics import answer_of, matches_any
from groupwise.tasks.rewards.registry import reward

CACHE_SHARE = 0.2
"""Default cache as a share of the longest completion: 4,096 of 20,480, as published."""


@reward("repetition")
@dataclass(frozen=True, slots=True)
class Repetition:
    """`max_penalty` × share of the n-grams of words, case ignored, that occurred before; 0 for fewer words than n.

    Words are separated by white space, so a text without any, such as Chinese, is one word.
    """

    n: int = 3
    """Words of an n-gram: pairs repeat in any good text."""
    max_penalty: float = -1.0
    """The limit that repeating one n-gram for ever approaches."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}; expected at least one word.")
        if self.max_penalty > 0:
            raise ValueError(
                f"max_penalty is {self.max_penalty:g}, which would reward repetition; expected 0 or less."
            )

    def __call__(self, completions: Sequence[CompletionText], **columns: Any) -> list[float]:
        """A reward between `max_penalty` and 0 for each completion."""
        values: list[float] = []
        for completion in completions:
            words = completion_text(completion).lower().split()
            grams = [
                tuple(words[start : start + self.n]) for start in range(len(words) - self.n + 1)
            ]
            share = 1 - len(set(grams)) / len(grams) if grams else 0.0
            values.append(self.max_penalty * share + 0.0)  # + 0.0 turns -0.0 into 0.0
        return values


@reward("length")
@dataclass(frozen=True, slots=True)
class Length:
    """A right answer earns more the shorter it is, a wrong one loses less the longer it is, along a cosine.

    See https://arxiv.org/abs/2502.03373. `math_answer` decides what is right; it compares words as well.
    """

    answer_column: str | None = None
    max_length: int = 1000
    """Tokens from which nothing changes any more."""
    right_short: float = 1.0
    """A right answer of no length."""
    right_long: float = 0.5
    """A right answer of `max_length`: still better than any wrong one."""
    wrong_short: float = -0.5
    """A wrong answer of no length: it should have thought longer."""
    wrong_long: float = 0.0
    """A wrong answer of `max_length`."""
    answer_tag: Tag = "answer"

    def __post_init__(self) -> None:
        check_tag(self.answer_tag)
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}; expected at least one token.")
        if min(self.right_short, self.right_long) < max(self.wrong_short, self.wrong_long):
            raise ValueError(
                "a wrong answer could earn more than a right one; change the four values."
            )

    def __call__(
        self,
        completions: Sequence[CompletionText],
        completion_ids: Sequence[Sequence[int]],
        log_extra: LogExtra | None = None,
        **columns: Any,
    ) -> list[float]:
        """A reward between the values above for each completion. Raises ValueError for a row without a gold answer."""
        golds = gold_answers(columns, len(completions), self.answer_column, self.answer_tag, True)
        texts = completion_texts(completions, columns)
        answers = [answer_of(text, self.answer_tag) for text in texts]
        record_answers(log_extra, (answer and voting_key(answer) for answer in answers))
        return score_each_row(self._reward_of_text, answers, map(len, completion_ids), golds)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a gold answer."""
        gold_of_row(row, self.answer_column, self.answer_tag, True)

    def _reward_of_text(self, answer: str | None, length: int, forms: Sequence[str]) -> float:
        right = answer is not None and matches_any(forms, answer)
        short, long = (
            (self.right_short, self.right_long) if right else (self.wrong_short, self.wrong_long)
        )
        progress = min(length / self.max_length, 1.0)
        return long + (short - long) * (1 + math.cos(math.pi * progress)) / 2


@reward("overlong")
@dataclass(frozen=True, slots=True)
class Overlong:
    """0 up to `max_length` − `cache` tokens, −1 from `max_length`, a straight line between: for algorithms without it.

    See https://arxiv.org/abs/2503.14476, equation 13. `dapo` has it built in and refuses a second one.
    """

    max_length: int
    """Tokens of the longest completion: the run's `sampler.max_completion_length`."""
    cache: int | None = None
    """Tokens over which the reward sinks; null: a fifth of `max_length`."""

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}; expected at least one token.")
        if self.cache is not None and not 1 <= self.cache <= self.max_length:
            raise ValueError(
                f"cache is {self.cache}; expected 1 to {self.max_length} tokens, the max_length."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """A reward between −1 and 0 for each completion."""
        cache = self.cache or max(1, round(CACHE_SHARE * self.max_length))
        begin = self.max_length - cache
        return [max(min((begin - len(ids)) / cache, 0.0), -1.0) for ids in completion_ids]
