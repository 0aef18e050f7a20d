"""Decoding by plain matrices: rows stand densely, a prompt's keys and values are kept once for all of its rows.

Per token and layer there are four matrix products over all rows, and attention to two kinds of keys: those of the prompt, in one product
for all rows of a group, and those of the row's own tokens. One softmax goes over both. Scores are float32, because their rounding
to bfloat16 would be the largest difference between sampler and learner.

Rows are kept in the order of their groups, so that a group's rows stand beside each other. They are computed in multiples of 8, and keys in
stretches (`Stretches`): products of these sizes give every row the same bits, however many rows there are, wherever it stands among
them, and whatever stands behind its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.models.native.forward import Adapter, residual_after_layers, text_attention
from groupwise.models.native.linear import quick_float32
from groupwise.models.native.weights import NativeModel, Shape
from groupwise.sampler.engine import Prompt, Row
from groupwise.sampler.weights import ServedWeights

ROWS = 8
"""Rows are computed in multiples of so many; the extra ones are ignored."""
GROWTH = 64
"""The cache of own keys grows by multiples of so many tokens."""


PIECE = 128
"""Own values that are summed up at a time in float32."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """In which multiples keys are looked at, so that every product is large enough to be computed in the same way.

    Torch computes products of up to 4,096 multiplications otherwise than larger ones.
    """

    own: int = 32
    """Own keys; those that are not there yet are masked."""
    prompt: int = 16
    """Those of prompts, which are extended by keys that nobody looks at."""

    @classmethod
    def of(cls, shape: Shape) -> Stretches:
        """For a model; longer ones where its keys are short."""
        return cls() if shape.kv_heads * shape.head_size >= 64 else cls(own=64, prompt=64)


@dataclass(frozen=True, slots=True, eq=False)
class NativePrompt(Prompt):
    """A prompt with its keys and values in every layer."""

    keys_LJDP: Tensor
    """Float32, transposed, which a product with few queries reads fastest; zeros up to a multiple of `Stretches.prompt`."""
    values_LJPD: Tensor
    """The same way extended."""


class OwnCache:
    """Keys and values of the rows' own tokens, grown as they are needed and kept from then on."""

    def __init__(self, model: NativeModel) -> None:
        shape = model.shape
        self._layers, self._kv_heads, self._size = (
            len(model.layers),
            shape.kv_heads,
            shape.head_size,
        )
        self.rows = self.length = 0
        self._keys_LBDT = torch.empty(self._layers, 0, self._size, 0, device=model.device)
        self._values_LBTD = torch.empty(
            self._layers, 0, 0, self._size, device=model.device, dtype=model.dtype
        )

    def reserve(self, rows: int, length: int) -> None:
        """Have room for so many rows of so many tokens; what is there stays."""
        if rows <= self.rows and length <= self.length:
            return
        rows = max(self.rows, _multiple(rows, ROWS))
        if length > self.length:  # by half, because growing copies everything
            length = _multiple(max(length, self.length * 3 // 2), GROWTH)
        length = max(self.length, length)
        heads = rows * self._kv_heads
        keys = self._keys_LBDT.new_zeros(self._layers, heads, self._size, length)
        values = self._values_LBTD.new_zeros(self._layers, heads, length, self._size)
        used = self.rows * self._kv_heads
        keys[:, :used, :, : self.length] = self._keys_LBDT
        values[:, :used, : self.length] = self._values_LBTD
        self._keys_LBDT, self._values_LBTD = keys, values
        self.rows, self.length = rows, length

    def arrange(self, places: Sequence[int], length: int) -> None:
        """Row i becomes the one that was at `places[i]`; the first `length` tokens of each move."""
        first = next((new for new, old in enumerate(places) if new != old), None)
        if first is None:
            return
        moved = torch.tensor(places[first:], device=self._keys_LBDT.device)
        each = torch.arange(self._kv_heads, device=moved.device)
        heads = (moved[:, None] * self._kv_heads + each).flatten()
        here = slice(first * self._kv_heads, len(places) * self._kv_heads)
        for keys_BDT, values_BTD in zip(self._keys_LBDT, self._values_LBTD, strict=True):
            keys_BDT[here, :, :length] = keys_BDT[heads, :, :length]
            values_BTD[here, :length] = values_BTD[heads, :length]

    def indices(self, written_N: Tensor) -> tuple[Tensor, Tensor]:
        """Where each number of a new key, and each new value, goes; `written_N` are the tokens that the rows have."""
        device = written_N.device
        heads_B = torch.arange(len(written_N) * self._kv_heads, device=device)
        at_B = written_N.repeat_interleave(self._kv_heads)
        sizes = torch.arange(self._size, device=device)
        keys = (heads_B[:, None] * self._size + sizes) * self.length + at_B[:, None]
        return keys.flatten(), heads_B * self.length + at_B

    def write(
        self, layer: int, indices: tuple[Tensor, Tensor], keys_NJD: Tensor, values_NJD: Tensor
    ) -> None:
        """Put the keys and values of a new token where `indices` says."""
        self._keys_LBDT[layer].view(-1).index_copy_(0, indices[0], keys_NJD.flatten())
        values_BD = self._values_LBTD[layer].view(-1, self._size)
        values_BD.index_copy_(0, indices[1], values_NJD.flatten(0, 1))

    def read(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys [rows · kv_heads, D, length] and values [rows · kv_heads, length, D]."""
        heads = rows * self._kv_heads
        return (
            self._keys_LBDT[layer, :heads, :, :length],
            self._values_LBTD[layer, :heads, :length],
        )


class NativeEngine:
    """A `groupwise.sampler.engine.Engine` over a model of the Llama family."""

    def __init__(self, model: NativeModel, weights: ServedWeights) -> None:
        self.rows: list[Row] = []
        self._model = model
        self._weights = weights
        self._own = OwnCache(model)
        self._stretches = Stretches.of(model.shape)
        self._several: Adapter | None = None
        self._few: Adapter | None = None
        self.refresh()

    def prefill(self, ids: Sequence[int]) -> Prompt:
        """See `Engine.prefill`."""
        model = self._model
        ids_P = torch.tensor(ids, device=model.device)
        more = -len(ids) % self._stretches.prompt
        kept: list[tuple[Tensor, Tensor]] = []

        def attend(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            kept.append(
                (
                    F.pad(keys.permute(1, 2, 0), (0, more)),
                    F.pad(values.transpose(0, 1), (0, 0, 0, more)),
                )
            )
            return text_attention(model, queries, keys, values)

        rotations = model.rotations(torch.arange(len(ids_P), device=model.device))
        residual_PH = residual_after_layers(
            model, model.embedded(ids_P), rotations, attend, self._several, few=False
        )
        last_8H = F.pad(residual_PH[-1:], (0, 0, 0, ROWS - 1))
        keys, values = zip(*kept, strict=True)
        return NativePrompt(
            len(ids_P), self._logits(last_8H)[0], torch.stack(keys), torch.stack(values)
        )

    def begin(self, prompt: Prompt) -> Row:
        """See `Engine.begin`."""
        row = Row(prompt)
        same = [number for number, other in enumerate(self.rows) if other.prompt is prompt]
        self.rows.insert(same[-1] + 1 if same else len(self.rows), row)
        return row

    def finish(self, rows: Sequence[Row]) -> None:
        """See `Engine.finish`."""
        self.rows = [row for row in self.rows if row not in rows]

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """See `Engine.decode`."""
        model, rows = self._model, self.rows
        longest = 1 + max(row.written for row in rows)
        self._settle(longest)
        padding = -len(rows) % ROWS
        device = model.device
        ids_N = torch.tensor([*tokens, *[0] * padding], device=device)
        positions_N = torch.tensor([*(row.position for row in rows), *[0] * padding], device=device)
        written_N = torch.tensor([*(row.written for row in rows), *[0] * padding], device=device)
        attention = _Attention(self._model, self._own, list(_groups(rows)), written_N, longest)
        with quick_float32(model.dtype == torch.bfloat16):
            residual_NH = residual_after_layers(
                model,
                model.embedded(ids_N),
                model.rotations(positions_N),
                attention,
                self._few,
                few=True,
            )
        for row in rows:
            row.written += 1
        return self._logits(residual_NH)[: len(rows)]

    def refresh(self) -> None:
        """See `Engine.refresh`."""
        model = self._weights.native()
        assert model is not None, "a model that was native stays so, whatever its weights are"
        self._model = model
        factors = self._weights.factors()
        linears = self._model.products[:-1]
        self._several = [linear.low_rank(factors) for linear in linears]
        self._few = [linear.packed_low_rank(factors) for linear in linears]

    def reset(self) -> None:
        """See `Engine.reset`."""
        self.rows = []
        self._own = OwnCache(self._model)

    def _logits(self, residual_NH: Tensor) -> Tensor:
        model = self._model
        return model.head.few(model.normed(residual_NH, model.norm_H))

    def _settle(self, longest: int) -> None:
        """Make the cache follow the order of the rows; new rows have nothing in it yet."""
        self._own.reserve(len(self.rows), longest)
        places = [row.place if row.place is not None else n for n, row in enumerate(self.rows)]
        self._own.arrange(places, longest - 1)
        for number, row in enumerate(self.rows):
            row.place = number


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one prompt that stand beside each other."""

    prompt: NativePrompt
    start: int
    end: int


def _groups(rows: Sequence[Row]) -> Iterator[_Group]:
    start = 0
    for prompt, members in groupby(rows, key=lambda row: row.prompt):
        end = start + len(list(members))
        assert isinstance(prompt, NativePrompt)
        yield _Group(prompt, start, end)
        start = end


class _Attention:
    """Attention of all rows for one token, layer by layer.

    The scores of a row stand in one buffer: to its own tokens, masked behind the last, then to its prompt, and nothing (-inf) up to the
    longest prompt. Both parts are whole vectors of a processor long, so that a row's sums do not depend on what the others need.
    """

    def __init__(
        self,
        model: NativeModel,
        own: OwnCache,
        groups: Sequence[_Group],
        written_N: Tensor,
        longest: int,
    ) -> None:
        shape = model.shape
        device = written_N.device
        self._dtype, self._own, self._groups = model.dtype, own, groups
        self._heads, self._repeat, self._size = (
            shape.kv_heads,
            shape.queries_per_key,
            shape.head_size,
        )
        self._scale = shape.head_size**-0.5
        self._rows = len(written_N)
        self._length = _multiple(longest, Stretches.of(shape).own)
        self._indices = own.indices(written_N)
        hidden_NT = torch.arange(self._length, device=device) > written_N[:, None]
        mask_NT = torch.zeros(hidden_NT.shape, device=device).masked_fill_(hidden_NT, -torch.inf)
        self._mask_N11T = mask_NT[:, None, None]
        width = self._length + max(group.prompt.values_LJPD.shape[2] for group in groups)
        scores = (self._rows, self._heads, self._repeat, width)
        self._scores_NJRX = torch.full(scores, -torch.inf, device=device)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries and keys [rows, heads, D] in float32 with their positions, values; to [rows, heads · D]."""
        self._own.write(layer, self._indices, keys, values)
        queries_NJRD = queries.mul_(self._scale).view(
            self._rows, self._heads, self._repeat, self._size
        )
        self._score(layer, queries_NJRD)
        weights_NJRX = self._scores_NJRX.softmax(-1).to(self._dtype)
        return self._weighed(layer, weights_NJRX).view(self._rows, -1)

    def _score(self, layer: int, queries_NJRD: Tensor) -> None:
        keys_BDT, _ = self._own.read(layer, self._rows, self._length)
        own_BRT = torch.bmm(queries_NJRD.flatten(0, 1), keys_BDT)
        own_NJRT = own_BRT.view(*queries_NJRD.shape[:-1], -1)
        torch.add(own_NJRT, self._mask_N11T, out=self._scores_NJRX[..., : self._length])
        for group in self._groups:
            queries_JMD = self._folded(queries_NJRD[group.start : group.end])
            scores_JMP = torch.bmm(queries_JMD, group.prompt.keys_LJDP[layer])
            length = group.prompt.length
            scores_GJRP = self._unfolded(scores_JMP[..., :length], group)
            self._of_prompt(self._scores_NJRX, group, length).copy_(scores_GJRP)

    def _weighed(self, layer: int, weights_NJRX: Tensor) -> Tensor:
        _, values_BTD = self._own.read(layer, self._rows, self._length)
        own_BRT = weights_NJRX.flatten(0, 1)[..., : self._length]
        found_NJRD = _sum_of_values(own_BRT, values_BTD).view(*weights_NJRX.shape[:-1], -1)
        for group in self._groups:
            values_JPD = group.prompt.values_LJPD[layer]
            weights_GJRP = self._of_prompt(weights_NJRX, group, values_JPD.shape[1])
            shared_JMD = torch.bmm(self._folded(weights_GJRP), values_JPD)
            found_NJRD[group.start : group.end] += self._unfolded(shared_JMD, group)
        return found_NJRD

    def _of_prompt(self, numbers_NJRX: Tensor, group: _Group, length: int) -> Tensor:
        """The part of a buffer that belongs to a group's rows and the first tokens of its prompt."""
        return numbers_NJRX[group.start : group.end, ..., self._length : self._length + length]

    def _folded(self, numbers_GJRX: Tensor) -> Tensor:
        """The rows of a group as those of one product for each head of the keys, in a multiple of `ROWS`."""
        folded_JMX = numbers_GJRX.transpose(0, 1).flatten(1, 2)
        padding = -folded_JMX.shape[1] % ROWS
        return F.pad(folded_JMX, (0, 0, 0, padding)) if padding else folded_JMX

    def _unfolded(self, folded_JMX: Tensor, group: _Group) -> Tensor:
        """The inverse of `_folded`."""
        count = (group.end - group.start) * self._repeat
        return folded_JMX[:, :count].unflatten(1, (-1, self._repeat)).transpose(0, 1)


def _sum_of_values(weights_BRT: Tensor, values_BTD: Tensor) -> Tensor:
    """Their product; in float32 piece by piece, because a long sum is otherwise split in a way that depends on its length."""
    if weights_BRT.dtype != torch.float32:
        return torch.bmm(weights_BRT, values_BTD)
    weights, values = weights_BRT.split(PIECE, 2), values_BTD.split(PIECE, 1)
    found_BRD = torch.bmm(weights[0], values[0])
    for weight, value in zip(weights[1:], values[1:], strict=True):
        found_BRD.baddbmm_(weight, value)
    return found_BRD


def _multiple(count: int, of: int) -> int:
    """The least multiple of `of` that is no less."""
    return -(-count // of) * of
