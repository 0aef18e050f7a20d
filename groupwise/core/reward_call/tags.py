"""The tags around reasoning and answer that prompts ask completions for, `<reasoning>…</reasoning><answer>…</answer>`.

A tag is given by its name, or by its two marks if they are of another kind, such as `[START, END]`. Names and marks may contain any
characters (they are not patterns), and case does not matter. The answer is the content of the last closed pair of answer tags that has
no answer tag inside. Tags within the reasoning do not count (see `after_reasoning`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import TypeAlias

from groupwise.core.types import Prompt

Tag: TypeAlias = str | tuple[str, str]
"""A name, `answer` for `<answer>…</answer>`, or both marks: `("<SOLUTION>", "</SOLUTION>")`."""


def marks(tag: Tag) -> tuple[str, str]:
    """The opening and the closing mark of a tag, as text."""
    return (f"<{tag}>", f"</{tag}>") if isinstance(tag, str) else (tag[0], tag[1])


def check_tag(tag: Tag) -> None:
    """Raise ValueError if this cannot be a tag."""
    if isinstance(tag, str):
        if not tag.strip() or set(tag) & set("<>/"):
            raise ValueError(
                f"{tag!r} cannot be the name of a tag. Give it without brackets, for example `think`, or give both marks as a list."
            )
    else:
        _check_distinct(tag)


def _check_distinct(all_marks: tuple[str, ...]) -> None:
    if not all(mark.strip() for mark in all_marks):
        raise ValueError(f"{all_marks} cannot be the marks of tags: one of them is empty.")
    for first, second in permutations(all_marks, 2):
        if first.lower() in second.lower():
            raise ValueError(
                f"the marks of tags {first!r} and {second!r} cannot be distinguished: one contains the other. Choose others."
            )


@dataclass(frozen=True, slots=True)
class Tags:
    """Both tags. Raises ValueError if one mark contains another."""

    reasoning: Tag = "reasoning"
    answer: Tag = "answer"

    def __post_init__(self) -> None:
        check_tag(self.reasoning)
        check_tag(self.answer)
        if self.reasoning == self.answer:
            raise ValueError(f"both tags are {self.answer!r}. Give them different names.")
        _check_distinct(self.four)

    @property
    def four(self) -> tuple[str, str, str, str]:
        """The four marks: reasoning opens, reasoning closes, answer opens, answer closes."""
        return (*marks(self.reasoning), *marks(self.answer))

    def counts(self, text: str) -> tuple[int, int, int, int]:
        """How often each of the four tags occurs, in the order of `four`."""
        reasoning_opened, reasoning_closed, answer_opened, answer_closed = self.four
        return (
            _count_mark(reasoning_opened, text),
            _count_mark(reasoning_closed, text),
            _count_mark(answer_opened, text),
            _count_mark(answer_closed, text),
        )

    def share(self, text: str) -> float:
        """The share of the four marks that occur, 0 to 1."""
        return sum(count > 0 for count in self.counts(text)) / 4

    def last_answer(self, text: str) -> str | None:
        """The content of the last pair of answer tags, stripped of white space; None if there is no pair."""
        return last_tagged(after_reasoning(text, self.reasoning), self.answer)


REASONING = Tags()
THINK = Tags(reasoning="think")


REASONING_NAMES = (
    "think",
    "thinking",
    "reasoning",
    "thought",
    "thoughts",
    "reason",
    "scratchpad",
    "analysis",
    "reflection",
)
REASONING_TAGS: tuple[Tag, ...] = (
    *REASONING_NAMES,
    ("[THINK]", "[/THINK]"),
    ("[REASONING]", "[/REASONING]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<|think|>", "<|/think|>"),
    ("<|thinking|>", "<|/thinking|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<start_working_out>", "<end_working_out>"),
    ("<unused94>", "<unused95>"),
)
"""Tags in which models write their reasoning."""

# The channels of gpt-oss, with its special tokens, and without them, which is how completions are decoded.
_CHANNEL_OPENS = (
    r"<\|channel\|>(?:analysis|commentary)(?:<\|message\|>)?|(?-i:\Aanalysis(?=[^\s:.,]|\n))"
)
_CHANNEL_CLOSES = r"<\|channel\|>final(?:<\|message\|>)?|(?-i:assistantfinal)"


def after_reasoning(text: str, *more: Tag) -> str:
    """The part of a completion after its reasoning: after the last closing tag, and before a reasoning tag that is opened and not closed.

    Reasoning is in `REASONING_TAGS`, in tags given as `more`, and in channels before the final one. The opening tag may be in the prompt.
    """
    opening, closing = _reasoning_patterns(*map(marks, more))
    ends = [match.end() for match in closing.finditer(text)]
    return opening.split(text[ends[-1] :] if ends else text, maxsplit=1)[0]


def opened_reasoning(prompt: Prompt, *more: Tag) -> str:
    """The end of a prompt, from the reasoning tag on that it opens for the assistant; empty if it opens none.

    In a chat, the assistant's last message may have text after the tag; in a text prompt, the tag must come last.
    """
    opening, closing = _reasoning_patterns(*map(marks, more))
    if isinstance(prompt, str):
        match = re.search(rf"(?:{opening.pattern})\s*$", prompt, re.IGNORECASE)
        return "" if match is None else match.group()
    last_message = prompt[-1] if prompt else {}
    content = last_message.get("content")
    if last_message.get("role") != "assistant" or not isinstance(content, str):
        return ""
    starts = [match.start() for match in opening.finditer(content)]
    return content[starts[-1] :] if starts and not closing.search(content, starts[-1]) else ""


# Compiled once for all rows of a dataset: making the text of these patterns takes longer than searching a completion.
@lru_cache(maxsize=64)
def _reasoning_patterns(*more: tuple[str, str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns that open and close any reasoning tag, a tag with one of these pairs of marks, or a reasoning channel."""
    opening_marks, closing_marks = zip(*map(marks, REASONING_TAGS), *more, strict=True)
    return _any_mark_pattern(opening_marks, _CHANNEL_OPENS), _any_mark_pattern(
        closing_marks, _CHANNEL_CLOSES
    )


def _any_mark_pattern(texts: Sequence[str], pattern: str) -> re.Pattern[str]:
    spaced = [re.escape(text).replace(">", r"\s*>") for text in texts]  # `<think >` opens, too
    return re.compile("|".join([*spaced, pattern]), re.IGNORECASE)


def last_tagged(text: str, tag: Tag, *, listed: bool = False) -> str | None:
    """The content of this tag's last pair after the reasoning, stripped of white space; None if there is no pair.

    With `listed`, pairs with only a comma, `and` or `or` between them are one answer, joined as a list.
    """
    answer_text = text if tag in REASONING_TAGS else after_reasoning(text)
    matches = list(_pair_pattern(*marks(tag)).finditer(answer_text))
    if not matches:
        return None
    answers = [matches[-1][1].strip()]
    for earlier, later in zip(matches[-2::-1], matches[:0:-1], strict=False):
        if not listed or not _IN_A_LIST.fullmatch(answer_text, earlier.end(), later.start()):
            break
        answers.insert(0, earlier[1].strip())
    return ", ".join(answers)


@lru_cache(maxsize=64)
def _pair_pattern(opening: str, closing: str) -> re.Pattern[str]:
    """No mark stands inside a pair: `<a>1<a>2</a>` gives 2, and a stray closing tag after a pair does no harm."""
    opening, closing = re.escape(opening), re.escape(closing)
    return re.compile(
        rf"{opening}((?:(?!{opening}|{closing}).)*){closing}", re.DOTALL | re.IGNORECASE
    )


_IN_A_LIST = re.compile(r"\s*(?:[,;]\s*(?:and|or)?|and|or)\s*", re.IGNORECASE)
"""The text allowed between pairs that are one answer together."""


def _count_mark(tag: str, text: str) -> int:
    return len(re.findall(re.escape(tag), text, re.IGNORECASE))
