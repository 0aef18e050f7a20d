"""Defines what a sampler needs of a model: prompts computed once, and rows that are moved one token forward together.

A row is a completion in progress. Engines keep its keys and values; the sampler decides what it draws. A row's logits depend
on its own tokens alone, bit for bit, never on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt that was computed; engines keep more of it in classes of their own."""

    length: int
    """Length in tokens."""
    logits_V: Tensor
    """Logits of the first token after it, in float32 or the model's own format."""


@dataclass(slots=True, eq=False)
class Row:
    """A completion in progress."""

    prompt: Prompt
    written: int = 0
    """Tokens after the prompt that the engine has seen."""
    place: int | None = None
    """Index under which the engine keeps it; None before its first token."""

    @property
    def position(self) -> int:
        """Position of the next token that the engine will see."""
        return self.prompt.length + self.written


class Engine(Protocol):
    """Computes logits for rows."""

    rows: list[Row]
    """Rows in progress, in the order in which `decode` takes tokens and gives logits."""

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """Compute a prompt."""
        ...

    def prefill_all(self, texts: Sequence[Sequence[int]]) -> list[Prompt]:
        """Compute several prompts, on a GPU together; each has the same bits as by itself."""
        ...

    def begin(self, prompt: Prompt) -> Row:
        """Begin another row; the order of `rows` may change."""
        ...

    def finish(self, rows: Sequence[Row]) -> None:
        """Remove these rows; the order of the others may change."""
        ...

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Logits [rows, V], in float32 or the model's own format, after one more token of each row."""
        ...

    def refresh(self) -> None:
        """Take over changed weights; call it only while there are no rows."""
        ...

    def reset(self) -> None:
        """Forget all rows, and the content of their caches, which may be NaN."""
        ...
