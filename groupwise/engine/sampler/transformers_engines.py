"""Decoding by the modules of a model of any family.

`SlotEngine` keeps keys and values in slots. `RowEngine` is for models with recurrent or other layers that have a state
(`groupwise.engine.models.decoder.has_state`), and computes one row after another. Transformers' own cache knows how to keep each kind of
state, but advances all its rows by equally many tokens. So each row has a cache alone, which begins as a copy of the prompt's, and is
computed alone. That is slow, and simple: for more than a trial, vLLM samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.engine.models.decoder import Decoder, PromptCache, SlotCache
from groupwise.engine.models.text_mask import TextMask
from groupwise.engine.sampler.engine import SLICE, DecodeRow, Prompt
from groupwise.engine.sampler.weights import ServedWeights


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrompt(Prompt):
    """A prompt with its keys and values."""

    cache: PromptCache


class SlotEngine:
    """A `DecodeEngine` over any transformers causal language model: a fixed number of slots, each with its own keys and values.

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


@dataclass(frozen=True, slots=True, eq=False)
class PromptWithState(Prompt):
    """A prompt with transformers' cache after it."""

    cache: Any


class RowEngine:
    """A `groupwise.engine.sampler.engine.DecodeEngine` that computes each row alone."""

    def __init__(self, weights: ServedWeights) -> None:
        self.rows: list[DecodeRow] = []
        self._weights = weights
        self._decoder = Decoder(weights.model)
        self._caches: dict[DecodeRow, Any] = {}

    @property
    def shift(self) -> float:
        """See `DecodeEngine.shift`."""
        return 0.0

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """See `DecodeEngine.prefill`."""
        with self._weights.acting():
            hidden_PH, cache = self._advance(ids, 0, None)
            return PromptWithState(len(ids), self._decoder.logits(hidden_PH[-1:])[0], cache)

    def prefill_all(self, texts: Sequence[Sequence[int]]) -> list[Prompt]:
        """See `DecodeEngine.prefill_all`."""
        return [self.prefill(ids) for ids in texts]

    def prompt_logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """See `DecodeEngine.prompt_logits`."""
        with self._weights.acting():
            for hidden_TH in self._advance(ids, 0, None)[0].split(SLICE):
                yield self._decoder.logits(hidden_TH)

    def add_row(self, prompt: Prompt) -> DecodeRow:
        """See `DecodeEngine.add_row`."""
        assert isinstance(prompt, PromptWithState)
        row = DecodeRow(prompt)
        self._caches[row] = copy.deepcopy(prompt.cache)
        self.rows.append(row)
        return row

    def remove_rows(self, rows: Sequence[DecodeRow]) -> None:
        """See `DecodeEngine.remove_rows`."""
        self.rows = [row for row in self.rows if row not in rows]
        for row in rows:
            del self._caches[row]

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """See `DecodeEngine.decode`."""
        logits: list[Tensor] = []
        with self._weights.acting():
            for row, token in zip(self.rows, tokens, strict=True):
                hidden_1H, self._caches[row] = self._advance(
                    [token], row.position, self._caches[row]
                )
                row.written += 1
                logits.append(self._decoder.logits(hidden_1H))
        return torch.cat(logits)

    def _advance(self, ids: Sequence[int], first: int, cache: Any) -> tuple[Tensor, Any]:
        ids_1T = torch.tensor([ids], device=self._decoder.device)
        return self._decoder.advance(ids_1T, first, cache)

    def refresh(self) -> None:
        """See `DecodeEngine.refresh`. Nothing to do: this engine computes with the modules' own weights."""

    def reset(self) -> None:
        """See `DecodeEngine.reset`."""
        self.rows = []
        self._caches = {}

    def free_cache(self) -> None:
        """See `DecodeEngine.free_cache`. Each row's cache goes with the row."""
        self.reset()
