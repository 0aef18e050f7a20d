"""Defines what a sampler needs from a model: prompts that are computed once, and rows that advance together by one token.

A row is a completion in progress. Engines keep its keys and values; the sampler draws its tokens. A row's logits depend on its own tokens
alone, bit for bit, never on the other rows.

`groupwise.engine.sampler.transformers_engines` has engines for any transformers model, `groupwise.engine.sampler.native` faster ones for
known families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

SLICE = 64
"""Positions of a prompt whose logits are in memory at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A computed prompt; engines keep their caches in subclasses."""

    length: int
    """Length in tokens."""
    logits_V: Tensor
    """Logits of the first completion token, in float32 or the model's own format."""


@dataclass(slots=True, eq=False)
class DecodeRow:
    """A completion in progress."""

    prompt: Prompt
    written: int = 0
    """Tokens after the prompt that the engine has computed."""
    slot: int | None = None
    """Index of the row in the engine's cache; None if the engine has not assigned one yet."""

    @property
    def position(self) -> int:
        """Position of the next token that the engine will compute."""
        return self.prompt.length + self.written


class DecodeEngine(Protocol):
    """Computes logits for rows."""

    rows: list[DecodeRow]
    """Rows in progress, in the order of `decode`'s tokens and logits."""

    @property
    def shift(self) -> float:
        """The constant that the engine subtracts from the model's logits."""
        ...

    def prompt_logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """Logits [T, V] after each of these tokens, in slices of at most `SLICE`; nothing is kept."""
        ...

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """Compute a prompt."""
        ...

    def prefill_all(self, texts: Sequence[Sequence[int]]) -> list[Prompt]:
        """Compute several prompts, on a GPU together; each gets the same bits as if computed alone."""
        ...

    def add_row(self, prompt: Prompt) -> DecodeRow:
        """Add a row; the order of `rows` may change."""
        ...

    def remove_rows(self, rows: Sequence[DecodeRow]) -> None:
        """Remove these rows; the order of the others may change."""
        ...

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Logits [rows, V], in float32 or the model's own format, after one more token of each row."""
        ...

    def refresh(self) -> None:
        """Load changed weights; call it only while there are no rows."""
        ...

    def reset(self) -> None:
        """Drop all rows and the content of their caches, which may be NaN."""
        ...

    def free_cache(self) -> None:
        """Free the memory of keys and values until the next row; call it only while there are no rows."""
        ...
