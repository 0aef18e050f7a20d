"""Decoding by plain matrices on a CPU: rows are dense, and a prompt's keys and values are stored once for all of its rows.

Per token and layer there are four matrix products over all rows, and attention to two kinds of keys: those of the prompt and those of
the row's own tokens. Scores are float32, because rounding them to bfloat16 would be the largest difference between sampler and learner.

Rows are kept in the order of their groups, so that a group's rows are adjacent. The number of computed rows is rounded up to a multiple
of 8; a row then gets the same bits for any number of rows and at any place among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.engine.models.native.compiled import array
from groupwise.engine.models.native.facts import ROWS
from groupwise.engine.models.native.forward import Adapter, residual_after_layers
from groupwise.engine.models.native.ready import ready_to_decode
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.engine import DecodeRow, Prompt
from groupwise.engine.sampler.native.cache import (
    CompletionCache,
    NativePrompt,
    PromptGroup,
    group_rows,
    in_blocks,
    with_room,
)
from groupwise.engine.sampler.native.prefill import last_logits, prefill, prompt_logits
from groupwise.engine.sampler.weights import ServedWeights

NO_NORM = np.empty(0, np.float32)


class NativeEngine:
    """A `groupwise.engine.sampler.engine.DecodeEngine` over a model of the Llama family."""

    def __init__(self, model: NativeModel, weights: ServedWeights, *, int8: bool = False) -> None:
        self.rows: list[DecodeRow] = []
        self._model = model
        self._weights = weights
        self._int8 = int8
        self._completions = CompletionCache(model)
        self._several: Adapter | None = None
        self._few: Adapter | None = None
        self.refresh()
        ready_to_decode(self._model, int8=int8)

    @property
    def shift(self) -> float:
        """See `DecodeEngine.shift`."""
        return self._model.shift

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """See `DecodeEngine.prefill`."""

        def keep(keys_PJD: Tensor, values_PJD: Tensor) -> tuple[Tensor, Tensor]:
            return in_blocks(keys_PJD), with_room(values_PJD)

        residual_PH, *cache = prefill(self._model, ids, self._several, keep)
        return NativePrompt(len(ids), last_logits(self._model, residual_PH), *cache)

    def prompt_logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """See `DecodeEngine.prompt_logits`."""

        def keep(keys_PJD: Tensor, values_PJD: Tensor) -> tuple[Tensor, Tensor]:
            return keys_PJD[:0], values_PJD[:0]

        residual_PH, _, _ = prefill(self._model, ids, self._several, keep)
        return prompt_logits(self._model, residual_PH)

    def prefill_all(self, texts: Sequence[Sequence[int]]) -> list[Prompt]:
        """See `DecodeEngine.prefill_all`."""
        return [self.prefill(ids) for ids in texts]

    def add_row(self, prompt: Prompt) -> DecodeRow:
        """See `DecodeEngine.add_row`."""
        row = DecodeRow(prompt)
        siblings = [number for number, other in enumerate(self.rows) if other.prompt is prompt]
        self.rows.insert(siblings[-1] + 1 if siblings else len(self.rows), row)
        return row

    def remove_rows(self, rows: Sequence[DecodeRow]) -> None:
        """See `DecodeEngine.remove_rows`."""
        self.rows = [row for row in self.rows if row not in rows]

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """See `DecodeEngine.decode`."""
        model, rows = self._model, self.rows
        longest = 1 + max(row.written for row in rows)
        self._reorder_cache(longest)
        padding = -len(rows) % ROWS
        ids_N = torch.tensor([*tokens, *[0] * padding])
        positions_N = torch.tensor([*(row.position for row in rows), *[0] * padding])
        written_N = torch.tensor([*(row.written for row in rows), *[0] * padding])
        attend = CompiledAttention(
            model,
            self._completions,
            list(group_rows(rows)),
            model.rotations(positions_N),
            written_N,
        )
        residual_NH = residual_after_layers(
            model, model.embedded(ids_N), attend, self._few, few=True
        )
        for row in rows:
            row.written += 1
        return model.logits(residual_NH)[: len(rows)]

    def refresh(self) -> None:
        """See `DecodeEngine.refresh`."""
        model = self._weights.native(int8=self._int8)
        assert model is not None, "a model that was native stays so, whatever its weights are"
        self._model = model
        factors = self._weights.factors()
        linears = self._model.products[:-1]
        self._several = [linear.low_rank(factors) for linear in linears]
        self._few = [linear.packed_low_rank(factors) for linear in linears]

    def reset(self) -> None:
        """See `DecodeEngine.reset`."""
        self.rows = []
        self._completions = CompletionCache(self._model)

    def free_cache(self) -> None:
        """See `DecodeEngine.free_cache`. The cache grows with its rows."""
        self.reset()

    def _reorder_cache(self, longest: int) -> None:
        """Reorder the cache to match the order of the rows; new rows have no content yet."""
        self._completions.reserve(len(self.rows), longest)
        sources = [row.slot if row.slot is not None else n for n, row in enumerate(self.rows)]
        self._completions.arrange(sources, longest - 1)
        for number, row in enumerate(self.rows):
            row.slot = number


class CompiledAttention:
    """An `Attend` for one token of all rows, by a kernel that computes each row independently."""

    def __init__(
        self,
        model: NativeModel,
        cache: CompletionCache,
        group_rows: Sequence[PromptGroup],
        rotations_N1C: Tensor,
        written_N: Tensor,
    ) -> None:
        self._model = model
        self._keys_LBKDS, self._values_LBTD = array(cache.keys_LBKDS), array(cache.values_LBTD)
        self._turns_NC2 = array(torch.view_as_real(rotations_N1C[:, 0]))
        self._written_N = array(written_N)
        self._epsilon = np.float32(model.shape.epsilon)
        self._prompts_N4 = np.zeros((len(written_N), 4), np.int64)
        self._bytes_of_layer_N4 = np.zeros_like(self._prompts_N4)
        for group in group_rows:
            keys, values = group.prompt.keys_LJKDS, group.prompt.values_LJPD
            rows, blocks = slice(group.start, group.end), keys.shape[2]
            self._prompts_N4[rows] = keys.data_ptr(), values.data_ptr(), group.prompt.length, blocks
            self._bytes_of_layer_N4[rows] = keys[0].nbytes, values[0].nbytes, 0, 0

    def __call__(self, layer: int, qkv_NO: Tensor) -> Tensor:
        """Attention of one layer: from queries, keys and values [rows, O] to [rows, heads · D]."""
        from groupwise.engine.models.native import kernels

        shape, weights = self._model.shape, self._model.layers[layer]
        outputs = shape.heads * shape.head_size
        output_NO = torch.empty(len(qkv_NO), outputs, dtype=self._model.dtype)
        kernels.attend(
            array(qkv_NO),
            self._turns_NC2,
            _norm(weights.query_norm_D),
            _norm(weights.key_norm_D),
            self._epsilon,
            shape.kv_heads,
            self._keys_LBKDS[layer],
            self._values_LBTD[layer],
            self._written_N,
            self._prompts_N4 + layer * self._bytes_of_layer_N4,
            array(output_NO),
        )
        return output_NO


def _norm(norm_D: Tensor | None) -> Any:
    return NO_NORM if norm_D is None else array(norm_D)
