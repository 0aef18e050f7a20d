"""How rows are laid out for the learner: rows of one prompt together, cut into micro-batches by a budget of tokens.

A micro-batch is one prompt and some of its completions. The prompt's tokens are computed once for all of them, so a group of
G completions of length R after a prompt of length P costs P + G · R tokens instead of G · (P + R).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.types import Row


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Completions of one prompt that are computed together."""

    prompt_ids: tuple[int, ...]
    rows: tuple[Row, ...]
    indices: tuple[int, ...]
    """Where each row stands in the sequence that was cut up."""

    @property
    def width(self) -> int:
        """Tokens of the longest completion."""
        return max(len(row.completion_ids) for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.prompt_ids) + len(self.rows) * self.width


def microbatches(
    rows: Sequence[Row], max_tokens: int, *, prompt_shared: bool = True
) -> list[MicroBatch]:
    """Cut rows up so that each micro-batch has at most `max_tokens` tokens, or a single row that is longer.

    Where the forward pass cannot share the prompt, each row costs its own. Prompts keep the order of their first row; within
    one, longer completions come first, which wastes least padding.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        by_prompt.setdefault(row.prompt_ids, []).append(index)
    cut: list[MicroBatch] = []
    for prompt_ids, members in by_prompt.items():
        once, each = (len(prompt_ids), 0) if prompt_shared else (0, len(prompt_ids))
        longest_first = sorted(members, key=lambda index: -len(rows[index].completion_ids))
        while longest_first:
            width = max(1, len(rows[longest_first[0]].completion_ids))
            count = max(1, (max_tokens - once) // (width + each))
            taken, longest_first = longest_first[:count], longest_first[count:]
            cut.append(MicroBatch(prompt_ids, tuple(rows[index] for index in taken), tuple(taken)))
    return cut
