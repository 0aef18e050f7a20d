"""Keys and values: those of a prompt, stored once for all of its rows, and those of the rows' own tokens.

Keys are float32, in blocks of `STRETCH`, each [D, STRETCH], so that a query reads a block as one stream of memory. Rows of values are
padded to a multiple of 16 numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.models.footprint import grown_room
from groupwise.engine.models.native.facts import LANES, ROWS, STRETCH, multiple
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.engine import DecodeRow, Prompt


@dataclass(frozen=True, slots=True, eq=False)
class NativePrompt(Prompt):
    """A prompt with its keys and values in every layer."""

    keys_LJKDS: Tensor
    """Keys of all layers, padded with zeros."""
    values_LJPD: Tensor
    """Values of all layers, padded with zeros; P = K · S."""


@dataclass(frozen=True, slots=True)
class Group:
    """Adjacent rows of one prompt."""

    prompt: NativePrompt
    start: int
    end: int


def groups(rows: Sequence[DecodeRow]) -> Iterator[Group]:
    """Yield the groups of adjacent rows with the same prompt, in order."""
    start = 0
    for prompt, members in groupby(rows, key=lambda row: row.prompt):
        end = start + len(list(members))
        assert isinstance(prompt, NativePrompt)
        yield Group(prompt, start, end)
        start = end


def in_blocks(keys_PJD: Tensor) -> Tensor:
    """Keys of a text as [J, K, D, S], padded with zeros."""
    keys_JDP = F.pad(keys_PJD.permute(1, 2, 0), (0, -len(keys_PJD) % STRETCH))
    return keys_JDP.unflatten(-1, (-1, STRETCH)).transpose(1, 2).contiguous()


def with_room(values_PJD: Tensor) -> Tensor:
    """Values of a text as [J, P, D]; P and D are padded with zeros."""
    padding = -values_PJD.shape[2] % LANES, -len(values_PJD) % STRETCH
    return F.pad(values_PJD.transpose(0, 1), (0, padding[0], 0, padding[1]))


class CompletionCache:
    """Keys and values of the rows' own tokens. It grows when needed and never shrinks."""

    def __init__(self, model: NativeModel) -> None:
        shape = model.shape
        self._kv_heads, self._size = shape.kv_heads, shape.head_size
        self.rows = self.length = 0
        layers, width = len(model.layers), multiple(shape.head_size, LANES)
        self.keys_LBKDS = torch.empty(layers, 0, 0, self._size, STRETCH, device=model.device)
        self.values_LBTD = torch.empty(layers, 0, 0, width, device=model.device, dtype=model.dtype)

    def reserve(self, rows: int, length: int) -> None:
        """Ensure room for `rows` rows of `length` tokens; the content is kept."""
        if rows <= self.rows and length <= self.length:
            return
        rows = max(self.rows, multiple(rows, ROWS))
        length = grown_room(self.length, length) if length > self.length else self.length
        layers, used, blocks, size, _ = self.keys_LBKDS.shape
        heads = rows * self._kv_heads
        keys = self.keys_LBKDS.new_zeros(layers, heads, length // STRETCH, size, STRETCH)
        values = self.values_LBTD.new_zeros(layers, heads, length, self.values_LBTD.shape[-1])
        keys[:, :used, :blocks] = self.keys_LBKDS
        values[:, :used, : self.length] = self.values_LBTD
        self.keys_LBKDS, self.values_LBTD = keys, values
        self.rows, self.length = rows, length

    def arrange(self, sources: Sequence[int], length: int) -> None:
        """Reorder rows: row i becomes the one that was at `sources[i]`. The first `length` tokens of each are moved."""
        first_moved = next((new for new, old in enumerate(sources) if new != old), None)
        if first_moved is None:
            return
        moved = torch.tensor(sources[first_moved:], device=self.keys_LBKDS.device)
        head_indices = torch.arange(self._kv_heads, device=moved.device)
        heads = (moved[:, None] * self._kv_heads + head_indices).flatten()
        rows = slice(first_moved * self._kv_heads, len(sources) * self._kv_heads)
        blocks = multiple(length, STRETCH) // STRETCH
        for keys_BKDS, values_BTD in zip(self.keys_LBKDS, self.values_LBTD, strict=True):
            keys_BKDS[rows, :blocks] = keys_BKDS[heads, :blocks]
            values_BTD[rows, :length] = values_BTD[heads, :length]
