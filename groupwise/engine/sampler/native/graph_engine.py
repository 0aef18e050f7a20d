"""Decoding on a GPU, always in the same shape, so that one token of all rows is one CUDA graph.

All slots for rows are computed at every token, even empty ones: reading the weights takes most of the time, and products of another
shape might give other last bits.

Keys and values are kept in pages of `PAGE` tokens. The rows of a group share the pages of their prompt; after the first row, the GPU reads
these from its own cache. Rows take their own pages as they grow. There are as many pages as rows of full length need if they share
nothing. Page 0 belongs to no row: empty slots write to it.

The memory of keys and values can be freed while nothing is sampled. A recorded graph reads fixed addresses, so it goes with them, and the
next token is recorded again.

A row's bits depend on its own tokens alone. One Triton kernel attends to as many pages as each row has, and long rows in parts, so that a
few of them keep all of a GPU's multiprocessors busy. Without Triton, torch attends to the pages of a row of full length, and a mask hides
the missing ones. Keys are stored, and multiplied by queries, in the model's number format, as in the learner's attention on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.models.attention_kernels import pinned_kernels
from groupwise.engine.models.machine import send
from groupwise.engine.models.native.facts import PAGE, multiple, pages_of_a_row
from groupwise.engine.models.native.forward import residual_after_layers
from groupwise.engine.models.native.fused import kernels_for
from groupwise.engine.models.native.linear import LowRank
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.engine import DecodeRow, Prompt
from groupwise.engine.sampler.native.prefill import prefill_batch, prefill_together, prompt_logits
from groupwise.engine.sampler.native.recording import Compute, Record
from groupwise.engine.sampler.weights import ServedWeights

SPAN_OF_FEW_ROWS, SPAN = 8, 32
"""Pages of a row that one program attends to: the first if there are fewer slots × heads of keys than multiprocessors. Otherwise parts only
matter once most rows have ended, and many would take time at each token, because the parts of all slots are started, also empty ones."""
SEGMENT = 2 << 20
"""Bytes in whose multiples torch takes memory from a GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedPrompt(Prompt):
    """A prompt with its keys and values [L, J, P, D]."""

    keys_LJPD: Tensor
    values_LJPD: Tensor


class GraphEngine:
    """A `groupwise.engine.sampler.engine.DecodeEngine` over a native model, for a GPU; without CUDA graphs it runs on any device."""

    def __init__(
        self,
        model: NativeModel,
        weights: ServedWeights,
        slots: int,
        key_length: int,
        record: Record,
        span: int | None = None,
    ) -> None:
        """`span`: the pages of a row that one program attends to; None for the best on this GPU."""
        shape = model.shape
        self.rows: list[DecodeRow] = []
        """Rows in progress, in the order of their slots."""
        self._model = model
        self._weights = weights
        self._record = record
        self._slots = slots
        most = pages_of_a_row(key_length)
        self._shape_LGJTD = (
            *(len(model.layers), 1 + slots * most),
            *(shape.kv_heads, PAGE, shape.head_size),
        )
        self._keys_LGJTD, self._values_LGJTD = self._empty_cache(), self._empty_cache()
        self._inputs_3S = torch.zeros(3, slots, device=model.device, dtype=torch.long)
        """For every slot: the token, its position, and the length of the row's prompt."""
        self._pages_SM = torch.zeros(slots, most, device=model.device, dtype=torch.int32)
        """For every slot the page numbers of its prompt, then its own; on the GPU."""
        self._host_pages_SM = torch.zeros(slots, most, dtype=torch.int32)
        """The same in main memory, where it is changed."""
        few = slots * shape.kv_heads < _multiprocessors(model.device)
        # Never by the rows in progress: parts are added up in another order, and a row would depend on the others.
        self._span = span or (SPAN_OF_FEW_ROWS if few else SPAN)
        self._free: list[int] = []
        """Pages that are not in use."""
        self._pages: dict[Prompt | DecodeRow, list[int]] = {}
        """Pages of the prompts in use, and of each row's own tokens."""
        self._adapter: list[LowRank | None] = []
        self._recorded: Compute | None = None
        self.refresh()
        self.reset()

    @property
    def shift(self) -> float:
        """See `DecodeEngine.shift`."""
        return self._model.shift

    def prompt_logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """See `DecodeEngine.prompt_logits`."""
        residual_NH, _, _ = prefill_batch(self._model, [ids], self._adapter)
        return prompt_logits(self._model, residual_NH[: len(ids)])

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """See `DecodeEngine.prefill`."""
        return self.prefill_all([ids])[0]

    def prefill_all(self, texts: Sequence[Sequence[int]]) -> list[Prompt]:
        """See `DecodeEngine.prefill_all`."""
        prompts = prefill_together(self._model, texts, self._adapter, self._slots)
        return [
            PagedPrompt(len(ids), *tensors) for ids, tensors in zip(texts, prompts, strict=True)
        ]

    def add_row(self, prompt: Prompt) -> DecodeRow:
        """See `DecodeEngine.add_row`."""
        assert isinstance(prompt, PagedPrompt)
        if not len(self._keys_LGJTD):
            # Otherwise a large piece of memory that learning left might be cut in two, and could not be freed as a whole.
            torch.cuda.empty_cache()
            self._keys_LGJTD, self._values_LGJTD = self._empty_cache(), self._empty_cache()
        if prompt not in self._pages:
            count = -(-prompt.length // PAGE)
            self._pages[prompt] = [self._free.pop() for _ in range(count)]
            into = send(torch.tensor(self._pages[prompt]), self._model.device)
            for cache, tensor in (
                (self._keys_LGJTD, prompt.keys_LJPD),
                (self._values_LGJTD, prompt.values_LJPD),
            ):
                padded = F.pad(tensor, (0, 0, 0, count * PAGE - prompt.length))
                cache[:, into] = padded.unflatten(2, (count, PAGE)).transpose(1, 2)
        occupied = {row.slot for row in self.rows}
        slot = next(n for n in range(self._slots) if n not in occupied)
        row = DecodeRow(prompt, slot=slot)
        self._pages[row] = []
        pages = self._pages[prompt]
        self._host_pages_SM[slot, : len(pages)] = torch.tensor(pages)
        self.rows.append(row)
        self.rows.sort(key=lambda other: other.slot or 0)
        return row

    def remove_rows(self, rows: Sequence[DecodeRow]) -> None:
        """See `DecodeEngine.remove_rows`."""
        self.rows = [row for row in self.rows if row not in rows]
        shared = {row.prompt for row in self.rows}
        for row in rows:
            self._free += self._pages.pop(row)
            if row.prompt not in shared:
                self._free += self._pages.pop(row.prompt, ())
            self._host_pages_SM[row.slot or 0] = 0

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """See `DecodeEngine.decode`."""
        return self.decode_rows(self.rows, tokens)

    def decode_rows(
        self,
        rows: Sequence[DecodeRow],
        tokens: Sequence[int],
        drawn: tuple[Sequence[DecodeRow], Tensor] | None = None,
    ) -> Tensor:
        """Like `decode`, for some of the rows: the others have had their last token. `drawn`: rows whose token [N] the GPU may still be
        drawing; it is taken there, and for them `tokens` has any number.
        """
        for row in {*self.rows}.difference(rows):
            self._host_pages_SM[row.slot or 0] = 0  # an empty slot writes to its first page
        inputs = [[0] * self._slots for _ in range(3)]
        for row, token in zip(rows, tokens, strict=True):
            slot, length = row.slot or 0, row.prompt.length
            if row.written % PAGE == 0:
                page = self._free.pop()
                number = len(self._pages[row.prompt]) + len(self._pages[row])
                self._host_pages_SM[slot, number] = page
                self._pages[row].append(page)
            for values, value in zip(inputs, (token, row.position, length), strict=True):
                values[slot] = value
            row.written += 1
        device = self._model.device
        self._inputs_3S.copy_(send(torch.tensor(inputs), device))
        if drawn is not None:
            drawn_rows, tokens_N = drawn
            self._inputs_3S[0].index_copy_(0, _slots(drawn_rows, device), tokens_N)
        self._pages_SM.copy_(send(self._host_pages_SM, device))
        if self._recorded is None:
            self._recorded = self._record(self._logits)
        logits_SV = self._recorded()
        # Indexing copies: the next token overwrites these logits.
        return logits_SV[_slots(rows, device)]

    def refresh(self) -> None:
        """See `DecodeEngine.refresh`."""
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
        self._recorded = None

    def reset(self) -> None:
        """See `DecodeEngine.reset`."""
        self.rows = []
        self._pages = {}
        self._free = [*range(self._shape_LGJTD[1] - 1, 0, -1)]
        self._host_pages_SM.zero_()
        self._keys_LGJTD.zero_()
        self._values_LGJTD.zero_()

    def free_cache(self) -> None:
        """See `DecodeEngine.free_cache`. The recorded graph goes too, with its own memory."""
        self._recorded = None
        self._keys_LGJTD = self._values_LGJTD = self._keys_LGJTD.new_empty(0)
        self.reset()

    @torch.inference_mode(mode=False)
    def _empty_cache(self) -> Tensor:
        """Zeros for the keys or values of all pages; no inference tensor, because `reset` changes it outside inference mode.

        Its size is a multiple of `SEGMENT`: torch would put other tensors into the rest, and could give nothing back as long as these live.
        """
        numbers, dtype = math.prod(self._shape_LGJTD), self._model.dtype
        whole = torch.zeros(
            multiple(numbers, SEGMENT // dtype.itemsize), device=self._model.device, dtype=dtype
        )
        return whole[:numbers].view(self._shape_LGJTD)

    def _logits(self) -> Tensor:
        """Logits [S, V] after the tokens in `_inputs_3S`: in a fixed shape, and in fixed memory except for temporary tensors."""
        model = self._model
        ids_S, positions_S, prompts_S = self._inputs_3S
        rotations_S1C = model.rotations(positions_S)
        kernels = kernels_for(self._keys_LGJTD)
        page_indices: tuple[Tensor, ...] = () if kernels is not None else self._cache_indices()

        def attend(number: int, qkv_SO: Tensor) -> Tensor:
            layer, (keys, values) = model.layers[number], self._layer_cache(number)
            if kernels is not None:
                norms = layer.query_norm_D, layer.key_norm_D
                return kernels.paged_attention(
                    qkv_SO, norms, rotations_S1C, keys, values, self._pages_SM, positions_S, prompts_S, model.shape.epsilon, self._span,
                )  # fmt: skip
            return self._plain_attention(
                keys, values, model.heads(layer, qkv_SO, rotations_S1C), *page_indices
            )

        residual_SH = residual_after_layers(
            model, model.embedded(ids_S), attend, self._adapter, few=False
        )
        return model.logits(residual_SH)

    def _layer_cache(self, number: int) -> tuple[Tensor, Tensor]:
        return self._keys_LGJTD[number], self._values_LGJTD[number]

    def _cache_indices(self) -> tuple[Tensor, ...]:
        """Arguments of `_plain_attention` that all layers share: page and cell of each new token, and a mask of visible keys [S, M · T]."""
        _, positions_S, prompts_S = self._inputs_3S
        own_S = positions_S - prompts_S
        of_prompt_S = (prompts_S + PAGE - 1) // PAGE
        number_S1 = (of_prompt_S + own_S // PAGE)[:, None]
        page_S = self._pages_SM.gather(1, number_S1)[:, 0]
        cells_C = torch.arange(self._pages_SM.shape[1] * PAGE, device=page_S.device)
        own_SC = cells_C - (of_prompt_S * PAGE)[:, None]
        seen_SC = torch.where(own_SC < 0, cells_C < prompts_S[:, None], own_SC <= own_S[:, None])
        return page_S, own_S % PAGE, seen_SC

    def _plain_attention(
        self,
        keys_GJTD: Tensor,
        values_GJTD: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        page_S: Tensor,
        cell_S: Tensor,
        seen_SC: Tensor,
    ) -> Tensor:
        """The same as `triton_kernels.paged_attention`, by torch operations that first copy the pages of all rows."""
        queries_SHD, *keys_values = heads
        dtype = keys_GJTD.dtype
        copies: list[Tensor] = []
        for cache_GJTD, new_SJD in zip((keys_GJTD, values_GJTD), keys_values, strict=True):
            cache_GJTD[page_S, :, cell_S] = new_SJD.to(dtype)
            pages_XJTD = cache_GJTD.index_select(0, self._pages_SM.flatten())
            rows_SMJTD = pages_XJTD.unflatten(0, self._pages_SM.shape)
            rows_SJCD = rows_SMJTD.transpose(1, 2).flatten(2, 3)
            # Hidden values may be NaN, and 0 times NaN is NaN.
            copies.append(rows_SJCD.masked_fill(~seen_SC[:, None, :, None], 0.0))
        mask_SC = torch.zeros_like(seen_SC, dtype=dtype).masked_fill_(~seen_SC, -torch.inf)
        queries_SJRD = queries_SHD.to(dtype).unflatten(1, (keys_GJTD.shape[1], -1))
        with pinned_kernels(queries_SJRD.device):
            output_SJRD = F.scaled_dot_product_attention(
                queries_SJRD, *copies, attn_mask=mask_SC[:, None, None]
            )
        return output_SJRD.flatten(1)


def _multiprocessors(device: torch.device) -> int:
    """How many a GPU has; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def _slots(rows: Sequence[DecodeRow], device: torch.device) -> Tensor:
    return send(torch.tensor([row.slot or 0 for row in rows], dtype=torch.long), device)


def _shapes(adapter: Sequence[LowRank | None]) -> list[tuple[torch.Size, torch.Size] | None]:
    return [low and (low.down_RI.shape, low.up_OR.shape) for low in adapter]
