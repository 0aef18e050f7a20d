"""The tags that a completion is asked to write its reasoning and its answer in, `<reasoning>…</reasoning><answer>…</answer>`.

Names of tags are text, whatever signs are in them, and case does not matter. The answer is what stands in the last pair of answer
tags that is closed and has no answer tag within.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


def check_name(name: str) -> None:
    """Raise ValueError for what cannot be the name of a tag."""
    if not name.strip() or set(name) & set("<>/"):
        raise ValueError(
            f"{name!r} cannot be the name of a tag. Give it without brackets, for example `think`."
        )


@dataclass(frozen=True, slots=True)
class Tags:
    """The names of both tags, without their brackets. Raises ValueError for names that could not be told apart."""

    reasoning: str = "reasoning"
    answer: str = "answer"

    def __post_init__(self) -> None:
        check_name(self.reasoning)
        check_name(self.answer)
        if self.reasoning.lower() == self.answer.lower():
            raise ValueError(f"both tags are called {self.answer!r}. Give them different names.")

    @property
    def four(self) -> tuple[str, str, str, str]:
        """The tags as they are written: reasoning opens, reasoning closes, answer opens, answer closes."""
        return (
            f"<{self.reasoning}>",
            f"</{self.reasoning}>",
            f"<{self.answer}>",
            f"</{self.answer}>",
        )

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


def last_tagged(text: str, name: str) -> str | None:
    """What stands in the last pair of tags of this name, without the white space around it; None where there is no pair."""
    tag = re.escape(name)
    # Neither tag within: `<a>1<a>2</a>` says 2, and a stray closing tag after a pair spoils nothing.
    inside = rf"<{tag}>((?:(?!</?{tag}>).)*)</{tag}>"
    found = re.findall(inside, text, re.DOTALL | re.IGNORECASE)
    return found[-1].strip() if found else None


def _count(tag: str, text: str) -> int:
    return len(re.findall(re.escape(tag), text, re.IGNORECASE))
