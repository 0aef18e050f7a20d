"""Texts of similar length as a batch, padded to the longest, each with its prompt's keys before its own.

The keys of a shared prompt are repeated in each text. That costs little: a key has `head size` numbers, while it has a score for each
query. The gradient of the prompt's keys is the sum over all texts that saw them. A padded query's output is dropped, and no real query
sees a padded key, because padding comes last.

Two subclasses compute the attention, one on a CPU and one on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.models.native.weights import Shape


@dataclass(frozen=True, slots=True)
class PaddedAttention(ABC):
    """An `Attention` within one set of texts (M texts of L tokens, J key heads, R queries per key head)."""

    shape: Shape
    texts: Texts
    real_X: Tensor | None
    """Indices of the M · L places of the padded texts that hold a token; None if all do."""

    @property
    @abstractmethod
    def query_scale(self) -> float:
        """See `Attention.query_scale`."""

    @abstractmethod
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """See `Attention.forward`."""

    @abstractmethod
    def gradients(
        self,
        d_out: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        d_queries_MLHD: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Write the gradients of the queries; return those of keys and values [M, J, C, D], with arbitrary values for padding.

        `d_out` is the gradient of the output of `forward`; the next three are the arguments of `forward`.
        """

    def backward(
        self, d_out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, d_qkv: Tensor
    ) -> None:
        """See `Attention.backward`."""
        shape, prompt = self.shape, self.texts.prompt_length
        d_own_MLXD = self.room(d_qkv)
        of_keys = self.gradients(d_out, queries, keys, values, d_own_MLXD[:, :, : shape.heads])
        for first, d_MJCD in zip((shape.heads, shape.heads + shape.kv_heads), of_keys, strict=True):
            part = slice(first, first + shape.kv_heads)
            d_of_own_MJLD = d_MJCD[:, :, prompt : prompt + self.length]
            d_own_MLXD[:, :, part].copy_(d_of_own_MJLD.transpose(1, 2))
            if prompt:
                d_of_prompt_JPD = d_MJCD[:, :, :prompt].sum(0, dtype=d_qkv.dtype)
                self._prompt_rows(d_qkv)[:, part] += d_of_prompt_JPD.transpose(0, 1)
        self.put(d_own_MLXD, d_qkv)

    @property
    def count(self) -> int:
        """Number of texts, M."""
        return len(self.texts.lengths)

    @property
    def length(self) -> int:
        """Tokens of the longest text, L."""
        return self.texts.lengths[0]

    def to_batch(self, x: Tensor) -> Tensor:
        """The rows of the texts as a batch [M, L, …], padded with 0."""
        rows = self._text_rows(x)
        if self.real_X is not None:
            padded = rows.new_zeros(self.count * self.length, *rows.shape[1:])
            rows = padded.index_copy_(0, self.real_X, rows)
        return rows.view(self.count, self.length, *rows.shape[1:])

    def with_prompt(self, x_NJD: Tensor, padding: int = 0) -> Tensor:
        """Keys or values [M, J, C, D]: those of the prompt, then the texts' own, then `more` zeros that no query sees."""
        prompt, (heads, size) = self.texts.prompt_length, x_NJD.shape[1:]
        end = prompt + self.length
        all_MJCD = x_NJD.new_empty(self.count, heads, end + padding, size)
        if prompt:
            all_MJCD[:, :, :prompt].copy_(self._prompt_rows(x_NJD).transpose(0, 1))
        all_MJCD[:, :, prompt:end].copy_(self.to_batch(x_NJD).transpose(1, 2))
        all_MJCD[:, :, end:].zero_()
        return all_MJCD

    def room(self, x: Tensor) -> Tensor:
        """Output buffer [M, L, …]: the texts' rows of x themselves if none is padded, else new memory."""
        rows = self._text_rows(x)
        if self.real_X is not None:
            rows = x.new_empty(self.count * self.length, *x.shape[1:])
        return rows.view(self.count, self.length, *x.shape[1:])

    def put(self, room: Tensor, x: Tensor) -> None:
        """Copy the rows written to the buffer `room` to the texts' rows of x."""
        if self.real_X is not None:
            self._text_rows(x).copy_(room.flatten(0, 1).index_select(0, self.real_X))

    def _text_rows(self, x: Tensor) -> Tensor:
        return x[self.texts.start : self.texts.end]

    def _prompt_rows(self, x: Tensor) -> Tensor:
        assert self.texts.prompt is not None
        start, length = self.texts.prompt
        return x[start : start + length]


def real_places(texts: Texts, device: torch.device) -> Tensor | None:
    """See `PaddedAttention.real_X`."""
    longest = texts.lengths[0]
    if longest == texts.lengths[-1]:
        return None
    lengths_M1 = torch.tensor(texts.lengths, device=device)[:, None]
    return (torch.arange(longest, device=device) < lengths_M1).flatten().nonzero()[:, 0]
