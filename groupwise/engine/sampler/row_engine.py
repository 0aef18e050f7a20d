"""Decodes models with recurrent or other layers that have a state (`groupwise.engine.models.decoder.has_state`): one row after another.

Transformers' own cache knows how to keep each kind of state, but advances all its rows by equally many tokens. So each row has a cache
alone, which begins as a copy of the prompt's, and is computed alone. That is slow, and simple: for more than a trial, vLLM samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.engine.models.decoder import Decoder
from groupwise.engine.sampler.engine import SLICE, DecodeRow, Prompt
from groupwise.engine.sampler.weights import ServedWeights


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
