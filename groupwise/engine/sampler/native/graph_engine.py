"""Decoding on a GPU: always the same shape, so that a token of all rows is one CUDA graph.

Every row has a place, with room for the longest prompt and completion; a prompt is computed once, and its keys and values are copied to
the place of each of its rows. All places are computed at every token, even empty ones: reading the weights takes most of the time,
and products of another shape might give other last bits. Attention looks at as many keys as the longest row has, in steps of `KEYS`;
each such number of keys has a recording of its own.

A row's bits do not depend on the other rows as long as those do not change the number of keys. Nor do they beyond that if attention
goes through the keys in order and leaves exact zeros for those that are masked, as torch's memory-efficient kernel does, which is
selected on a GPU; torch's products for a processor round differently for another number of keys.

Keys are kept, and scores begun, in the model's number format, as the learner's attention does on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from groupwise.engine.models.native.facts import multiple
from groupwise.engine.models.native.forward import residual_after_layers
from groupwise.engine.models.native.linear import LowRank
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.engine import Prompt, Row
from groupwise.engine.sampler.native.prefill import prefilled
from groupwise.engine.sampler.native.recording import Compute, Record
from groupwise.engine.sampler.weights import ServedWeights

KEYS = 256
"""Attention looks at a multiple of this many keys."""


@dataclass(frozen=True, slots=True, eq=False)
class CopiedPrompt(Prompt):
    """A prompt with its keys and values, which are copied for each of its rows."""

    keys_LJPD: Tensor
    values_LJPD: Tensor


class GraphEngine:
    """A `groupwise.engine.sampler.engine.Engine` over a native model, for a GPU; without recordings it runs anywhere."""

    def __init__(
        self,
        model: NativeModel,
        weights: ServedWeights,
        slots: int,
        key_length: int,
        record: Record,
    ) -> None:
        shape = model.shape
        self.rows: list[Row] = []
        self._model = model
        self._weights = weights
        self._record = record
        self._length = key_length
        room = len(model.layers), slots, shape.kv_heads, key_length, shape.head_size
        self._keys_LSJTD = torch.zeros(room, device=model.device, dtype=model.dtype)
        self._values_LSJTD = torch.zeros_like(self._keys_LSJTD)
        self._inputs_2S = torch.zeros(2, slots, device=model.device, dtype=torch.long)
        """The token and its position, for every place."""
        room = slots, len(model.head.weight_OI)
        self._logits_SV = torch.empty(room, device=model.device, dtype=model.dtype)
        """Logits of every place; all recordings write to it, because each would need as much for itself."""
        self._adapter: list[LowRank | None] = []
        self._recorded: dict[int, Compute] = {}
        """Recordings by the number of keys."""
        self.refresh()

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """See `Engine.prefill`."""

        def keep(keys_PJD: Tensor, values_PJD: Tensor) -> tuple[Tensor, Tensor]:
            keys_JPD, values_JPD = keys_PJD.transpose(0, 1), values_PJD.transpose(0, 1)
            dtype = self._model.dtype
            return keys_JPD.to(dtype), values_JPD.to(dtype).contiguous()

        return CopiedPrompt(len(ids), *prefilled(self._model, ids, self._adapter, keep))

    def begin(self, prompt: Prompt) -> Row:
        """See `Engine.begin`."""
        assert isinstance(prompt, CopiedPrompt)
        taken = {row.place for row in self.rows}
        place = next(n for n in range(self._inputs_2S.shape[1]) if n not in taken)
        self._keys_LSJTD[:, place, :, : prompt.length] = prompt.keys_LJPD
        self._values_LSJTD[:, place, :, : prompt.length] = prompt.values_LJPD
        row = Row(prompt, place=place)
        self.rows.append(row)
        return row

    def finish(self, rows: Sequence[Row]) -> None:
        """See `Engine.finish`."""
        self.rows = [row for row in self.rows if row not in rows]

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """See `Engine.decode`."""
        places = [row.place or 0 for row in self.rows]
        longest = 1 + max(row.position for row in self.rows)
        slots = self._inputs_2S.shape[1]
        ids, positions = [0] * slots, [0] * slots
        for row, place, token in zip(self.rows, places, tokens, strict=True):
            ids[place], positions[place] = token, row.position
            row.written += 1
        self._inputs_2S.copy_(torch.tensor([ids, positions]))
        return self._step(min(self._length, multiple(longest, KEYS)))()[places]

    def refresh(self) -> None:
        """See `Engine.refresh`."""
        model = self._weights.native()
        assert model is not None, "a model that was native stays so, whatever its weights are"
        factors = self._weights.factors()
        adapter = [linear.low_rank(factors) for linear in model.products[:-1]]
        if model is self._model and _shapes(adapter) == _shapes(self._adapter):
            for old, new in zip(self._adapter, adapter, strict=True):
                if old is not None and new is not None:
                    old.copy_(new)
            return
        self._model, self._adapter = model, adapter
        self._recorded = {}

    def reset(self) -> None:
        """See `Engine.reset`."""
        self.rows = []
        self._keys_LSJTD.zero_()
        self._values_LSJTD.zero_()

    def _step(self, length: int) -> Compute:
        if length not in self._recorded:
            self._recorded[length] = self._record(lambda: self._logits(length))
        return self._recorded[length]

    def _logits(self, length: int) -> Tensor:
        """Fill `_logits_SV` after the tokens in `_inputs_2S`: in a fixed shape, and in fixed memory except for temporary tensors."""
        model = self._model
        ids_S, positions_S = self._inputs_2S
        rotations_S1C = model.rotations(positions_S)
        places_S = torch.arange(len(ids_S), device=model.device)
        later_ST = torch.arange(length, device=model.device) > positions_S[:, None]
        mask_ST = torch.zeros_like(later_ST, dtype=model.dtype).masked_fill_(later_ST, -torch.inf)

        def attend(number: int, qkv_SO: Tensor) -> Tensor:
            queries, keys, values = model.heads(model.layers[number], qkv_SO, rotations_S1C)
            keys_SJTD = self._keys_LSJTD[number, :, :, :length]
            values_SJTD = self._values_LSJTD[number, :, :, :length]
            keys_SJTD[places_S, :, positions_S] = keys.to(model.dtype)
            values_SJTD[places_S, :, positions_S] = values.to(model.dtype)
            queries_SJRD = queries.to(model.dtype).unflatten(1, (model.shape.kv_heads, -1))
            with _one_kernel(model.device):
                found_SJRD = F.scaled_dot_product_attention(
                    queries_SJRD, keys_SJTD, values_SJTD, attn_mask=mask_ST[:, None, None]
                )
            return found_SJRD.flatten(1)

        residual_SH = residual_after_layers(
            model, model.embedded(ids_S), attend, self._adapter, few=False
        )
        return self._logits_SV.copy_(model.logits(residual_SH))


def _one_kernel(device: torch.device) -> AbstractContextManager[object]:
    """Use the same kernel for every number of keys, if there are several; see the module."""
    if device.type == "cpu":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _shapes(adapter: Sequence[LowRank | None]) -> list[tuple[torch.Size, torch.Size] | None]:
    return [low and (low.down_RI.shape, low.up_OR.shape) for low in adapter]
