"""A task's examples with their prompts as token ids: what can be drawn, and how long it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import TaskError
from groupwise.rollouts.dialogue import first_ids
from groupwise.tasks.tools import Schema
from groupwise.types import Example


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Examples and their prompts, beside each other."""

    examples: tuple[Example, ...]
    prompts: tuple[tuple[int, ...], ...]
    dropped: int = 0
    """Examples left out because their prompts are longer than allowed."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; 0 for an empty set."""
        return max(map(len, self.prompts), default=0)

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
) -> PromptSet:
    """Tokenise all prompts, leaving out those longer than `max_prompt_length` (tokens), or refusing them where that is `strict`.

    `tools` are described in the prompts of chats. `room` is what the model leaves for a prompt beside the longest completion.
    Raises `TaskError`, naming the hook `where` the examples came from, if a prompt does not fit there, or if no
    example is left.
    """
    if room < 1:
        raise TaskError(
            f"sampler.max_completion_length (or eval.max_completion_length) leaves no room for a prompt: it exceeds the "
            f"longest text of the model by {1 - room} tokens. Shorten it, or with another rollout.type its limits."
        )
    ids = [first_ids(tokenizer, example.prompt, tools) for example in examples]
    limit = max_prompt_length or max(map(len, ids))
    kept = [index for index, prompt in enumerate(ids) if len(prompt) <= limit]
    longest = max(map(len, ids))
    if not kept:
        raise TaskError(
            f"{where}: all {len(ids)} prompts are longer than data.max_prompt_length = {max_prompt_length} tokens; "
            f"the shortest has {min(map(len, ids))}, the longest {longest}."
        )
    if strict and len(kept) < len(ids):
        raise TaskError(
            f"{where}: {len(ids) - len(kept)} of {len(ids)} prompts are longer than data.max_prompt_length = {max_prompt_length} tokens, "
            f"the longest has {longest}, and data.strict is true. Raise the limit, or set data.strict to false to leave them out."
        )
    too_long = [len(ids[index]) for index in kept if len(ids[index]) > room]
    if too_long:
        raise TaskError(
            f"{where}: {len(too_long)} of {len(ids)} prompts do not fit: the longest has {max(too_long)} tokens, and the model "
            f"has room for {room} beside the completion. Set data.max_prompt_length={room} to leave them out, or "
            "shorten sampler.max_completion_length (rollout.max_rollout_length in environments)."
        )
    return PromptSet(
        tuple(examples[index] for index in kept),
        tuple(ids[index] for index in kept),
        len(ids) - len(kept),
    )
