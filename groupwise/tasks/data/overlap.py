"""Held-out rows that are also trained on: when two rows count as the same, and which rows are on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

from groupwise.core.types import Example, Prompt

SameAs = Callable[[Example], str]
"""Gives the same text for rows that are the same."""


def prompt_key(prompt: Prompt) -> str:
    """Equal for prompts with the same words."""
    return json.dumps(prompt, sort_keys=True, default=str)


def same_prompt(example: Example) -> str:
    """Rows are the same if their prompts are: the model sees nothing else."""
    return prompt_key(example.prompt)


def same_row(example: Example) -> str:
    """Rows are the same if all of their columns are: an environment may make a different task of each."""
    return json.dumps([example.prompt, example.columns], sort_keys=True, default=str)


def warning_of_overlap(shared: int, held_out: int, *, instead: str) -> str | None:
    """A warning that held-out prompts are trained on, with their number; None if there are none. `instead`: what to do."""
    if not shared:
        return None
    return (
        f"{shared} of {held_out} held-out prompts are also trained on, so that evaluations partly measure what was learnt by "
        f"heart. Hold out other rows: {instead}."
    )


def trained_on(
    train: Sequence[Example],
    held_out: Sequence[Example],
    same: SameAs,
    supervised: Collection[str] = (),
) -> list[Example]:
    """The held-out examples that are among those for training as well. `supervised`: the `prompt_key` of supervised rows."""
    trained, supervised = set(map(same, train)), set(supervised)
    return [
        example
        for example in held_out
        if same(example) in trained or prompt_key(example.prompt) in supervised
    ]
