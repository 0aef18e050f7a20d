"""A task's examples with their prompts as token ids, limited in length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Any

from groupwise.core.errors import TaskError
from groupwise.core.types import Example, Group
from groupwise.engine.models.control_tokens import special_texts
from groupwise.engine.models.tokens import render_prompt, rendered_ids
from groupwise.tasks.data.messages import looks_like_messages
from groupwise.tasks.rollouts.dialogue import first_text
from groupwise.tasks.tools import Schema

MEASURED = 64
"""Prompts that a check tokenises to find the longest one: those with the longest texts."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Examples and their prompts, in parallel sequences."""

    examples: tuple[Example, ...]
    prompts: tuple[tuple[int, ...], ...]
    """Empty tokens: a check did not tokenise the prompt, because it fits in any case."""
    dropped: int = 0
    """Examples left out because their prompts are longer than allowed."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that was tokenised; 0 for an empty set."""
        return max(map(len, self.prompts), default=0)

    @property
    def tokenised(self) -> int:
        """Number of prompts that were tokenised."""
        return sum(map(bool, self.prompts))

    def at(self, index: int) -> tuple[Example, tuple[int, ...]]:
        """One of the examples, with its prompt."""
        return self.examples[index], self.prompts[index]


def tokenise(
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    max_prompt_length: int | None,
    room: int,
    where: str,
    tools: Sequence[Schema] = (),
    strict: bool = False,
    check_only: bool = False,
) -> PromptSet:
    """Tokenise all prompts, leaving out those longer than `max_prompt_length` tokens, or refusing them with `strict`.

    `tools` are described in chat prompts. `room` is the number of tokens that the model's context leaves for a prompt in addition
    to the longest completion. With `check_only`, all prompts are rendered, but only those are tokenised that may be too long, and
    the `MEASURED` longest texts. Raises `TaskError`, naming the hook `where` the examples came from, if a prompt does not fit, or
    if no example is left.
    """
    if room < 1:
        raise TaskError(
            f"sampler.max_completion_length (or eval.max_completion_length) leaves no room for a prompt: it exceeds the "
            f"longest text of the model by {1 - room} tokens. Shorten it, or with another rollout.type its limits."
        )
    ids = _tokenise_examples(
        tokenizer, examples, tools, where, min(room, max_prompt_length or room) if check_only else 0
    )
    limit = max_prompt_length or max(map(len, ids))
    indices = [index for index, prompt in enumerate(ids) if len(prompt) <= limit]
    longest = max(map(len, ids))
    if not indices:
        raise TaskError(
            f"{where}: all {len(ids)} prompts are longer than data.max_prompt_length = {max_prompt_length} tokens; "
            f"the shortest has {min(map(len, ids))}, the longest {longest} (the model tiny counts characters). "
            "Raise the limit, or set data.max_prompt_length=null to have none."
        )
    if strict and len(indices) < len(ids):
        raise TaskError(
            f"{where}: {len(ids) - len(indices)} of {len(ids)} prompts are longer than data.max_prompt_length = {max_prompt_length} "
            f"tokens, the longest has {longest}, and data.strict is true. Raise the limit, or set data.strict to false to leave them out."
        )
    too_long = [len(ids[index]) for index in indices if len(ids[index]) > room]
    if too_long:
        raise TaskError(
            f"{where}: {len(too_long)} of {len(ids)} prompts do not fit: the longest has {max(too_long)} tokens, and the model "
            f"has room for {room} in addition to the completion. Set data.max_prompt_length={room} to leave them out, or "
            "shorten sampler.max_completion_length (rollout.max_rollout_length in environments)."
        )
    return PromptSet(
        tuple(examples[index] for index in indices),
        tuple(ids[index] for index in indices),
        len(ids) - len(indices),
    )


def _tokenise_examples(
    tokenizer: Any, examples: Sequence[Example], tools: Sequence[Schema], where: str, fitting: int
) -> list[tuple[int, ...]]:
    """Token ids of all prompts; none for texts that certainly have at most `fitting` tokens, except for the longest of them."""

    def tokenise_example(index: int, fitting: int) -> tuple[int, ...]:
        example = examples[index]
        try:
            text = first_text(tokenizer, example.prompt, tools, example.columns)
            # A token of ASCII text is at least one character; the tokenizer may add a beginning of sequence and a space.
            if len(text) + 2 <= fitting and text.isascii() and text.strip():
                lengths[index] = len(text)
                return ()
            return rendered_ids(tokenizer, example.prompt, text)
        except TaskError as error:
            raise TaskError(f"{where}: row {example.row_number}: {error}") from error

    lengths: dict[int, int] = {}
    """Characters of the texts that were not tokenised, by index."""
    ids = [tokenise_example(index, fitting) for index in range(len(examples))]
    for index in nlargest(MEASURED, lengths, key=lengths.__getitem__):
        ids[index] = tokenise_example(index, 0)
    return ids


def as_seen(tokenizer: Any, group: Group) -> Group:
    """The group with a chat prompt as the model saw it; if members differ, as the first one saw it."""
    if isinstance(group.example.prompt, str) or not group.rollouts:
        return group
    return replace(group, prompt_seen=render_prompt(tokenizer, group.rollouts[0].prompt_ids))


def odd_prompts(tokenizer: Any, examples: Sequence[Example]) -> list[str]:
    """Warnings about prompts that are probably not as their author intended."""
    marks = _template_marks(tokenizer)
    texts = [e.prompt for e in examples if isinstance(e.prompt, str)]
    problems = [
        str(m.get("content") or "")
        for e in examples
        if not isinstance(e.prompt, str)
        for m in e.prompt
    ]
    warnings: list[str] = []
    if repeated_marks := [mark for text in problems for mark in marks if mark in text]:
        warnings.append(
            f"messages hold {repeated_marks[0]!r}, which the chat template writes itself: they seem to have been through it already, "
            "and go through it once more. Give such a prompt as text, or the messages as they were before"
        )
    if any(map(looks_like_messages, texts)):
        warnings.append(
            "a prompt looks like messages in JSON, but cannot be read as such: it is taken as text. Look for what is wrong in it"
        )
    return warnings


def text_prompts(tokenizer: Any, examples: Sequence[Example]) -> list[str]:
    """Notes on text prompts for a model that has a chat template."""
    texts = [e.prompt for e in examples if isinstance(e.prompt, str) and e.prompt]
    if tokenizer is None or not tokenizer.chat_template or not texts:
        return []
    marks = _template_marks(tokenizer)
    if ready := [mark for text in texts for mark in marks if mark in text]:
        return [
            f"prompts that are text hold {ready[0]!r} of the chat template: they are used unchanged, and no template is applied"
        ]
    return [
        f"{len(texts)} of {len(examples)} prompts are text, which the model continues, without its chat template. For a question of "
        "a user, give a list of messages, or set data.prompt_format to chat"
    ]


def _template_marks(tokenizer: Any) -> list[str]:
    """The special tokens that the chat template writes."""
    if tokenizer is None:
        return []
    template = str(tokenizer.chat_template or "")
    return [mark for mark in special_texts(tokenizer) if mark.strip() and mark in template]
