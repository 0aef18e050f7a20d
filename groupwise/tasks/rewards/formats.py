"""Rewards for layout: reasoning in one pair of tags, the answer in another, in that order.

Tags that enclose nothing earn nothing: `<answer></answer>` is as good as no tag at all, and so are tags around nothing but such
tags. White space and invisible characters count as nothing. Case matters only in the strict layout.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.core.reward_call.call import score_each_row
from groupwise.core.reward_call.tags import Tag, Tags, check_tag, marks
from groupwise.core.reward_call.text import CompletionText, completion_texts
from groupwise.tasks.rewards.registry import reward

BLANK = r"[\s\u200b\u200c\u200d\u2060\ufeff]"
"""A pattern for characters that are not content: white space and zero-width characters."""


@dataclass(frozen=True, slots=True)
class _Layout(ABC):
    """Rewards whose tags can be renamed."""

    reasoning_tag: Tag = "reasoning"
    answer_tag: Tag = "answer"

    def __post_init__(self) -> None:
        Tags(self.reasoning_tag, self.answer_tag)

    @property
    def tags(self) -> Tags:
        """Both tags."""
        return Tags(self.reasoning_tag, self.answer_tag)

    def __call__(self, completions: Sequence[CompletionText], **columns: Any) -> list[float]:
        """A reward for each completion, which depends only on its text."""
        texts = completion_texts(completions, columns, self.reasoning_tag)
        return score_each_row(self._reward_of_text, texts)

    @abstractmethod
    def _reward_of_text(self, text: str) -> float:
        """The reward of one completion."""


@reward("strict_format")
@dataclass(frozen=True, slots=True)
class StrictFormat(_Layout):
    """`right` for exactly the layout below, from the first character to the last but for one line break; else 0.

    <reasoning>
    …
    </reasoning>
    <answer>
    …
    </answer>
    """

    right: float = 0.5

    def _reward_of_text(self, text: str) -> float:
        think_open, think_close, answer_open, answer_close = map(re.escape, self.tags.four)
        layout = (
            rf"{think_open}\n{_content_pattern(self.tags)}\n{think_close}\n"
            rf"{answer_open}\n{_content_pattern(self.tags)}\n{answer_close}\n?"
        )
        match = re.fullmatch(layout, text, re.DOTALL)
        is_filled = match is not None and not any(map(_is_blank, match.groups()))
        return self.right if is_filled else 0.0


@reward("soft_format")
@dataclass(frozen=True, slots=True)
class SoftFormat(_Layout):
    """`right` if a pair of reasoning tags and after it a pair of answer tags occur anywhere, both with content; else 0."""

    right: float = 0.5

    def _reward_of_text(self, text: str) -> float:
        return self.right if both_pairs(self.tags, text) else 0.0


@reward("xml_count")
@dataclass(frozen=True, slots=True)
class XmlCount(_Layout):
    """`each` for every one of the four tags that occurs exactly once and belongs to no empty pair."""

    each: float = 0.125
    """An eighth: the four together earn as much as the layout."""

    def _reward_of_text(self, text: str) -> float:
        count_pairs = zip(
            self.tags.counts(text),
            self.tags.counts(without_empty_pairs(self.tags, text)),
            strict=True,
        )
        return self.each * sum(
            count == nonempty_count == 1 for count, nonempty_count in count_pairs
        )


@reward("match_format")
@dataclass(frozen=True, slots=True)
class MatchFormat(_Layout):
    """`right` for both pairs as in `soft_format`; `begun` if there is at least an opening tag; else `wrong`."""

    right: float = 2.0
    begun: float = 0.5
    wrong: float = -1.0
    """Below 0, so that a model which ignores the layout notices even if no completion of the group has it."""

    def _reward_of_text(self, text: str) -> float:
        if both_pairs(self.tags, text):
            return self.right
        think_opens, _, answer_opens, _ = self.tags.counts(without_empty_pairs(self.tags, text))
        return self.begun if think_opens or answer_opens else self.wrong


@reward("think_format")
@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """`right` for reasoning in one pair of tags at the start and something after it, which needs no tags; else 0. As in TRL."""

    reasoning_tag: Tag = "think"
    right: float = 1.0

    def __post_init__(self) -> None:
        check_tag(self.reasoning_tag)

    def __call__(self, completions: Sequence[CompletionText], **columns: Any) -> list[float]:
        """A reward for each completion, which depends only on its text."""
        texts = completion_texts(completions, columns, self.reasoning_tag)
        return [self.right if self._is_one(text) else 0.0 for text in texts]

    def _is_one(self, text: str) -> bool:
        opening, closing = marks(self.reasoning_tag)
        starts_with_tag = text.startswith(opening) and text.count(opening) == 1
        inside, _, rest = text.removeprefix(opening).partition(closing)
        return starts_with_tag and not _is_blank(inside) and not _is_blank(rest)


def both_pairs(tags: Tags, text: str) -> bool:
    """True if a pair of reasoning tags with content is followed, anywhere, by one of answer tags with content."""
    reasoned = _non_empty_block(tags, tags.reasoning).search(text)
    return reasoned is not None and bool(
        _non_empty_block(tags, tags.answer).search(text, pos=reasoned.end())
    )


def without_empty_pairs(tags: Tags, text: str) -> str:
    """The text without pairs of tags that enclose nothing, or nothing but tags."""
    matches = list(
        re.finditer("|".join(f"({re.escape(tag)})" for tag in tags.four), text, re.IGNORECASE)
    )
    open_pairs: tuple[list[int], list[int]] = ([], [])
    empty: set[int] = set()
    end = 0
    for index, tag in enumerate(matches):
        if not _is_blank(text[end : tag.start()]):
            for stack in open_pairs:
                stack.clear()  # the open pairs have content
        end = tag.end()
        pair, closes = divmod((tag.lastindex or 1) - 1, 2)
        if not closes:
            open_pairs[pair].append(index)
        elif open_pairs[pair]:
            empty |= {index, open_pairs[pair].pop()}
    edges = [0, *(edge for index in sorted(empty) for edge in matches[index].span()), len(text)]
    return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


def _is_blank(text: str) -> bool:
    return re.fullmatch(f"{BLANK}*", text) is not None


def _non_empty_block(tags: Tags, tag: Tag) -> re.Pattern[str]:
    opening, closing = map(re.escape, marks(tag))
    pair = rf"{opening}(?!{BLANK}*{closing}){_content_pattern(tags)}{closing}"
    return re.compile(pair, re.DOTALL | re.IGNORECASE)


def _content_pattern(tags: Tags) -> str:
    """A pattern for the content of a pair: anything but one of the four tags, which keeps each search linear."""
    four = "|".join(re.escape(tag) for tag in tags.four)
    return rf"((?:(?!{four}).)+)"


def starts_with_both_pairs(tags: Tags, text: str) -> bool:
    """True if only white space precedes the pair of reasoning tags and separates it from the pair of answer tags."""
    reasoned = _non_empty_block(tags, tags.reasoning).match(text.lstrip())
    if reasoned is None:
        return False
    rest = text.lstrip()[reasoned.end() :]
    return _non_empty_block(tags, tags.answer).match(rest.lstrip()) is not None
