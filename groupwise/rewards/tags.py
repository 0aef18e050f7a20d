"""The tags that a completion is asked to write its reasoning and its answer in, `<reasoning>…</reasoning><answer>…</answer>`.

A tag is given by its name, or by the two marks that open and close it where they are of another kind, such as `[START, END]`. Names and
marks are text, whatever signs are in them, and case does not matter. The answer is what stands in the last pair of answer tags that is
closed and has no answer tag within.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import permutations
from typing import TypeAlias

Tag: TypeAlias = str | tuple[str, str]
"""A name, `answer` for `<answer>…</answer>`, or both marks: `("<SOLUTION>", "</SOLUTION>")`."""


def marks(tag: Tag) -> tuple[str, str]:
    """What opens a tag and what closes it, as they are written."""
    return (f"<{tag}>", f"</{tag}>") if isinstance(tag, str) else tag


def check_tag(tag: Tag) -> None:
    """Raise ValueError for what cannot be a tag."""
    if isinstance(tag, str):
        if not tag.strip() or set(tag) & set("<>/"):
            raise ValueError(
                f"{tag!r} cannot be the name of a tag. Give it without brackets, for example `think`, or give both marks as a list."
            )
    else:
        _check_apart(tag)


def _check_apart(all_marks: tuple[str, ...]) -> None:
    if not all(mark.strip() for mark in all_marks):
        raise ValueError(f"{all_marks} cannot be the marks of tags: one of them is empty.")
    for one, other in permutations(all_marks, 2):
        if one.lower() in other.lower():
            raise ValueError(
                f"the marks of tags {one!r} and {other!r} cannot be told apart: one stands in the other. Give others."
            )


@dataclass(frozen=True, slots=True)
class Tags:
    """Both tags. Raises ValueError for tags that could not be told apart."""

    reasoning: Tag = "reasoning"
    answer: Tag = "answer"

    def __post_init__(self) -> None:
        check_tag(self.reasoning)
        check_tag(self.answer)
        if self.reasoning == self.answer:
            raise ValueError(f"both tags are {self.answer!r}. Give them different names.")
        _check_apart(self.four)

    @property
    def four(self) -> tuple[str, str, str, str]:
        """The tags as they are written: reasoning opens, reasoning closes, answer opens, answer closes."""
        return (*marks(self.reasoning), *marks(self.answer))

    def counts(self, text: str) -> tuple[int, int, int, int]:
        """How often each of the four tags occurs, in the order of `four`."""
        opened, closed, answered, ended = self.four
        return (
            _count(opened, text),
            _count(closed, text),
            _count(answered, text),
            _count(ended, text),
        )

    def share(self, text: str) -> float:
        """How many of the four tags occur, of four."""
        return sum(count > 0 for count in self.counts(text)) / 4

    def last_answer(self, text: str) -> str | None:
        """What stands in the last pair of answer tags, without the white space around it; None where there is no pair."""
        return last_tagged(text, self.answer)


REASONING = Tags()
THINK = Tags(reasoning="think")


def last_tagged(text: str, tag: Tag) -> str | None:
    """What stands in the last pair of this tag, without the white space around it; None where there is no pair."""
    opened, closed = map(re.escape, marks(tag))
    # Neither mark within: `<a>1<a>2</a>` says 2, and a stray closing tag after a pair spoils nothing.
    inside = rf"{opened}((?:(?!{opened}|{closed}).)*){closed}"
    found = re.findall(inside, text, re.DOTALL | re.IGNORECASE)
    return found[-1].strip() if found else None


def _count(tag: str, text: str) -> int:
    return len(re.findall(re.escape(tag), text, re.IGNORECASE))
