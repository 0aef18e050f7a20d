"""Keys and values: those of a prompt, kept once for all of its rows, and those of the rows' own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from groupwise.models.native.weights import NativeModel, Shape
from groupwise.sampler.engine import Prompt, Row

ROWS = 8
"""Rows are computed in multiples of so many; the extra ones are ignored."""
GROWTH = 64
"""The cache of own keys grows by multiples of so many tokens."""


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


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one prompt that stand beside each other."""

    prompt: NativePrompt
    start: int
    end: int


def groups(rows: Sequence[Row]) -> Iterator[Group]:
    """The groups of rows, which stand in their order."""
    start = 0
    for prompt, members in groupby(rows, key=lambda row: row.prompt):
        end = start + len(list(members))
        assert isinstance(prompt, NativePrompt)
        yield Group(prompt, start, end)
        start = end


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
        rows = max(self.rows, multiple(rows, ROWS))
        if length > self.length:  # by half, because growing copies everything
            length = multiple(max(length, self.length * 3 // 2), GROWTH)
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

    def whole(self) -> tuple[Tensor, Tensor]:
        """Keys [L, rows · kv_heads, D, length] and values [L, rows · kv_heads, length, D], as far as there is room."""
        return self._keys_LBDT, self._values_LBTD


def multiple(count: int, of: int) -> int:
    """The least multiple of `of` that is no less."""
    return -(-count // of) * of
