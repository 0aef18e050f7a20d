"""Defines what a sampler needs from a model: prompts that are computed once, and rows that advance together by one token.

A row is a completion in progress. Engines keep its keys and values; the sampler draws its tokens. A row's logits depend on its own tokens
alone, bit for bit, never on the other rows.

`SlotEngine` is for any transformers model; `groupwise.engine.sampler.native` has faster engines for known families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from groupwise.engine.models.decoder import Decoder, PromptCache, SlotCache
from groupwise.engine.models.text_mask import TextMask
from groupwise.engine.sampler.weights import ServedWeights

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


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrompt(Prompt):
    """A prompt with its keys and values."""

    cache: PromptCache


class SlotEngine:
    """An `DecodeEngine` over any transformers causal language model: a fixed number of slots, each with its own keys and values.

    Decoding always runs in the same shape (slots × key length); empty slots are computed and ignored, because another shape could change
    the last bits.
    """

    def __init__(self, weights: ServedWeights, slots: int, key_length: int) -> None:
        self.rows: list[DecodeRow] = []
        self._weights = weights
        self._slots = slots
        self._key_length = key_length
        self._decoder = Decoder(weights.model)
        self._cache = SlotCache(slots, key_length)

    @property
    def shift(self) -> float:
        """See `DecodeEngine.shift`."""
        return 0.0

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """See `DecodeEngine.prefill`."""
        cache = PromptCache()
        with self._weights.acting():
            hidden_PH = self._prompt_hidden(ids, cache)
            return CachedPrompt(len(ids), self._decoder.logits(hidden_PH[-1:])[0], cache)

    def prompt_logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """See `DecodeEngine.prompt_logits`."""
        with self._weights.acting():
            for hidden_TH in self._prompt_hidden(ids, PromptCache()).split(SLICE):
                yield self._decoder.logits(hidden_TH)

    def _prompt_hidden(self, ids: Sequence[int], cache: PromptCache) -> Tensor:
        device, length = self._decoder.device, len(ids)
        ids_1P = torch.tensor([ids], device=device)
        positions_1P = torch.arange(length, device=device)[None]
        return self._decoder.hidden(ids_1P, positions_1P, TextMask(length), cache)[0]

    def prefill_all(self, texts: Sequence[Sequence[int]]) -> list[Prompt]:
        """See `DecodeEngine.prefill_all`."""
        return [self.prefill(ids) for ids in texts]

    def add_row(self, prompt: Prompt) -> DecodeRow:
        """See `DecodeEngine.add_row`."""
        assert isinstance(prompt, CachedPrompt)
        occupied = {row.slot for row in self.rows}
        row = DecodeRow(prompt, slot=next(n for n in range(self._slots) if n not in occupied))
        assert row.slot is not None
        self._cache.place(row.slot, prompt.cache)
        self.rows.append(row)
        return row

    def remove_rows(self, rows: Sequence[DecodeRow]) -> None:
        """See `DecodeEngine.remove_rows`."""
        self.rows = [row for row in self.rows if row not in rows]

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """See `DecodeEngine.decode`."""
        device = self._decoder.device
        slots = [row.slot or 0 for row in self.rows]
        ids, positions = [0] * self._slots, [0] * self._slots
        for row, slot, token in zip(self.rows, slots, tokens, strict=True):
            ids[slot], positions[slot] = token, row.position
            row.written += 1
        positions_S = torch.tensor(positions, device=device)
        self._cache.positions = positions_S
        mask_S1K = torch.arange(self._key_length, device=device) <= positions_S[:, None, None]
        ids_S1 = torch.tensor(ids, device=device)[:, None]
        with self._weights.acting():
            hidden = self._decoder.hidden(ids_S1, positions_S[:, None], mask_S1K, self._cache)
            return self._decoder.logits(hidden[:, 0])[slots]

    def refresh(self) -> None:
        """See `DecodeEngine.refresh`. Nothing to do: this engine computes with the modules' own weights."""

    def reset(self) -> None:
        """See `DecodeEngine.reset`."""
        self.rows = []
        self._cache = SlotCache(self._slots, self._key_length)

    def free_cache(self) -> None:
        """See `DecodeEngine.free_cache`. The first row makes the cache."""
        self.reset()
