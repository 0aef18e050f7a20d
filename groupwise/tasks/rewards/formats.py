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
        return score_each_row(self._value, texts)

    @abstractmethod
    def _value(self, text: str) -> float:
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

    def _value(self, text: str) -> float:
        opened, closed, answered, ended = map(re.escape, self.tags.four)
        layout = (
            rf"{opened}\n{_inside(self.tags)}\n{closed}\n"
            rf"{answered}\n{_inside(self.tags)}\n{ended}\n?"
        )
        found = re.fullmatch(layout, text, re.DOTALL)
        filled = found is not None and not any(map(_is_blank, found.groups()))
        return self.right if filled else 0.0


@reward("soft_format")
@dataclass(frozen=True, slots=True)
class SoftFormat(_Layout):
    """`right` if a pair of reasoning tags and after it a pair of answer tags stand anywhere, both with content; else 0."""

    right: float = 0.5

    def _value(self, text: str) -> float:
        return self.right if both_pairs(self.tags, text) else 0.0


@reward("xml_count")
@dataclass(frozen=True, slots=True)
class XmlCount(_Layout):
    """`each` for every one of the four tags that occurs exactly once and belongs to no empty pair."""

    each: float = 0.125
    """An eighth: the four together earn as much as the layout."""

    def _value(self, text: str) -> float:
        once = zip(
            self.tags.counts(text),
            self.tags.counts(without_empty_pairs(self.tags, text)),
            strict=True,
        )
        return self.each * sum(count == filled == 1 for count, filled in once)


@reward("match_format")
@dataclass(frozen=True, slots=True)
class MatchFormat(_Layout):
    """`right` for both pairs as in `soft_format`; `begun` where at least an opening tag stands; else `wrong`."""

    right: float = 2.0
    begun: float = 0.5
    wrong: float = -1.0
    """Below 0, so that a model which ignores the layout notices even if no completion of the group has it."""

    def _value(self, text: str) -> float:
        if both_pairs(self.tags, text):
            return self.right
        opened, _, answered, _ = self.tags.counts(without_empty_pairs(self.tags, text))
        return self.begun if opened or answered else self.wrong


@reward("think_format")
@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """`right` for reasoning in one pair of tags at the beginning and something behind it, which needs no tags; else 0. As in TRL."""

    reasoning_tag: Tag = "think"
    right: float = 1.0

    def __post_init__(self) -> None:
        check_tag(self.reasoning_tag)

    def __call__(self, completions: Sequence[CompletionText], **columns: Any) -> list[float]:
        """A reward for each completion, which depends only on its text."""
        texts = completion_texts(completions, columns, self.reasoning_tag)
        return [self.right if self._is_one(text) else 0.0 for text in texts]

    def _is_one(self, text: str) -> bool:
        opened, closed = marks(self.reasoning_tag)
        begins = text.startswith(opened) and text.count(opened) == 1
        inside, _, behind = text.removeprefix(opened).partition(closed)
        return begins and not _is_blank(inside) and not _is_blank(behind)


def both_pairs(tags: Tags, text: str) -> bool:
    """True if a pair of reasoning tags with content is followed, anywhere, by one of answer tags with content."""
    reasoned = _non_empty_block(tags, tags.reasoning).search(text)
    return reasoned is not None and bool(
        _non_empty_block(tags, tags.answer).search(text, pos=reasoned.end())
    )


def without_empty_pairs(tags: Tags, text: str) -> str:
    """The text without pairs of tags that enclose nothing, or nothing but tags."""
    found = list(
        re.finditer("|".join(f"({re.escape(tag)})" for tag in tags.four), text, re.IGNORECASE)
    )
    opened: tuple[list[int], list[int]] = ([], [])
    empty: set[int] = set()
    end = 0
    for place, tag in enumerate(found):
        if not _is_blank(text[end : tag.start()]):
            for waiting in opened:
                waiting.clear()  # the open pairs have content
        end = tag.end()
        pair, closes = divmod((tag.lastindex or 1) - 1, 2)
        if not closes:
            opened[pair].append(place)
        elif opened[pair]:
            empty |= {place, opened[pair].pop()}
    edges = [0, *(edge for place in sorted(empty) for edge in found[place].span()), len(text)]
    return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


def _is_blank(text: str) -> bool:
    return re.fullmatch(f"{BLANK}*", text) is not None


def _non_empty_block(tags: Tags, tag: Tag) -> re.Pattern[str]:
    opened, closed = map(re.escape, marks(tag))
    pair = rf"{opened}(?!{BLANK}*{closed}){_inside(tags)}{closed}"
    return re.compile(pair, re.DOTALL | re.IGNORECASE)


def _inside(tags: Tags) -> str:
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
