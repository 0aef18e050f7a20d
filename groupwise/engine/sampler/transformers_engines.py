"""Decoding by the modules of a model of any family.

`SlotEngine` keeps keys and values in slots. `RowEngine` is for models with recurrent or other layers that have a state
(`groupwise.engine.models.decoder.has_state`), and computes one row after another. Transformers' own cache knows how to keep each kind of
state, but advances all its rows by equally many tokens. So each row has a cache alone, which begins as a copy of the prompt's, and is
computed alone. That is slow, and simple: for more than a trial, vLLM samples.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
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
    """A prompt with its keys and values, or whatever state the model keeps."""

    cache: Any


class ModuleEngine(ABC):
    """What both engines share: prompts are computed one by one, with the modules' own weights."""

    def __init__(self, weights: ServedWeights) -> None:
        self.rows: list[DecodeRow] = []
        self._weights = weights
        self._decoder = Decoder(weights.model)

    @property
    def shift(self) -> float:
        """See `DecodeEngine.shift`."""
        return 0.0

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """See `DecodeEngine.prefill`."""
        with self._weights.acting():
            hidden_PH, cache = self._compute_prompt(ids)
            return CachedPrompt(len(ids), self._decoder.logits(hidden_PH[-1:])[0], cache)

    def prefill_all(self, texts: Sequence[Sequence[int]]) -> list[Prompt]:
        """See `DecodeEngine.prefill_all`."""
        return [self.prefill(ids) for ids in texts]

    def prompt_logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """See `DecodeEngine.prompt_logits`."""
        with self._weights.acting():
            for hidden_TH in self._compute_prompt(ids)[0].split(SLICE):
                yield self._decoder.logits(hidden_TH)

    def refresh(self) -> None:  # noqa: B027 — nothing to do is what it does, not a gap
        """See `DecodeEngine.refresh`. Nothing to do: these engines compute with the modules' own weights."""

    def free_cache(self) -> None:
        """See `DecodeEngine.free_cache`. The next rows make a new cache."""
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """See `DecodeEngine.reset`."""

    @abstractmethod
    def _compute_prompt(self, ids: Sequence[int]) -> tuple[Tensor, Any]:
        """The last hidden states [P, H] of a prompt, and its cache."""


class SlotEngine(ModuleEngine):
    """A `DecodeEngine` over any transformers causal language model: a fixed number of slots, each with its own keys and values.

    Decoding always runs in the same shape (slots × key length); empty slots are computed and ignored, because another shape could change
    the last bits.
    """

    def __init__(self, weights: ServedWeights, slots: int, key_length: int) -> None:
        super().__init__(weights)
        self._slots = slots
        self._key_length = key_length
        self._cache = SlotCache(slots, key_length)

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

    def reset(self) -> None:
        """See `DecodeEngine.reset`."""
        self.rows = []
        self._cache = SlotCache(self._slots, self._key_length)

    def _compute_prompt(self, ids: Sequence[int]) -> tuple[Tensor, PromptCache]:
        device, length, cache = self._decoder.device, len(ids), PromptCache()
        ids_1P = torch.tensor([ids], device=device)
        positions_1P = torch.arange(length, device=device)[None]
        return self._decoder.hidden(ids_1P, positions_1P, TextMask(length), cache)[0], cache


class RowEngine(ModuleEngine):
    """A `groupwise.engine.sampler.engine.DecodeEngine` that computes each row alone."""

    def __init__(self, weights: ServedWeights) -> None:
        super().__init__(weights)
        self._caches: dict[DecodeRow, Any] = {}

    def add_row(self, prompt: Prompt) -> DecodeRow:
        """See `DecodeEngine.add_row`."""
        assert isinstance(prompt, CachedPrompt)
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

    def reset(self) -> None:
        """See `DecodeEngine.reset`."""
        self.rows = []
        self._caches = {}

    def _compute_prompt(self, ids: Sequence[int]) -> tuple[Tensor, Any]:
        return self._advance(ids, 0, None)

    def _advance(self, ids: Sequence[int], first: int, cache: Any) -> tuple[Tensor, Any]:
        ids_1T = torch.tensor([ids], device=self._decoder.device)
        return self._decoder.advance(ids_1T, first, cache)
