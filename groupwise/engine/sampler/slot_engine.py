"""Decoding by any transformers model: a fixed number of slots, each with keys and values of its own.

Decoding always runs in the same shape (slots × key length), with empty slots computed and ignored, because another shape could
change the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.engine.models.decoder import Decoder, PromptCache, SlotCache, causal_mask
from groupwise.engine.sampler.engine import Prompt, Row
from groupwise.engine.sampler.weights import ServedWeights


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrompt(Prompt):
    """A prompt with its keys and values."""

    cache: PromptCache


class SlotEngine:
    """A `groupwise.engine.sampler.engine.Engine` over any transformers causal language model."""

    def __init__(self, weights: ServedWeights, slots: int, key_length: int) -> None:
        self.rows: list[Row] = []
        self._weights = weights
        self._slots = slots
        self._key_length = key_length
        self._decoder = Decoder(weights.model)
        self._cache = SlotCache(slots, key_length)

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """See `Engine.prefill`."""
        device = self._decoder.device
        ids_1P = torch.tensor([ids], device=device)
        length = len(ids)
        positions_1P = torch.arange(length, device=device)[None]
        cache = PromptCache()
        mask = causal_mask(length, 0, device)
        with self._weights.acting():
            hidden = self._decoder.hidden(ids_1P, positions_1P, mask, cache)
            return CachedPrompt(length, self._decoder.logits(hidden[0, -1:])[0], cache)

    def prefill_all(self, texts: Sequence[Sequence[int]]) -> list[Prompt]:
        """See `Engine.prefill_all`."""
        return [self.prefill(ids) for ids in texts]

    def begin(self, prompt: Prompt) -> Row:
        """See `Engine.begin`."""
        assert isinstance(prompt, CachedPrompt)
        taken = {row.place for row in self.rows}
        row = Row(prompt, place=next(n for n in range(self._slots) if n not in taken))
        assert row.place is not None
        self._cache.place(row.place, prompt.cache)
        self.rows.append(row)
        return row

    def finish(self, rows: Sequence[Row]) -> None:
        """See `Engine.finish`."""
        self.rows = [row for row in self.rows if row not in rows]

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """See `Engine.decode`."""
        device = self._decoder.device
        places = [row.place or 0 for row in self.rows]
        ids, positions = [0] * self._slots, [0] * self._slots
        for row, place, token in zip(self.rows, places, tokens, strict=True):
            ids[place], positions[place] = token, row.position
            row.written += 1
        positions_S = torch.tensor(positions, device=device)
        self._cache.positions = positions_S
        mask_S1K = torch.arange(self._key_length, device=device) <= positions_S[:, None, None]
        ids_S1 = torch.tensor(ids, device=device)[:, None]
        with self._weights.acting():
            hidden = self._decoder.hidden(ids_S1, positions_S[:, None], mask_S1K, self._cache)
            return self._decoder.logits(hidden[:, 0])[places]

    def refresh(self) -> None:
        """See `Engine.refresh`: the modules hold the weights themselves."""

    def reset(self) -> None:
        """See `Engine.reset`."""
        self.rows = []
        self._cache = SlotCache(self._slots, self._key_length)
