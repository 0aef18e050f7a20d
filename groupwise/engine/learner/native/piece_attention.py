"""Attention by batched products over texts and heads, with its gradient, for a CPU.

With scores `S = Q Kᵀ`, masked, `P = softmax(S)` and `O = P V`, the gradients are `dV = Pᵀ dO`, `dP = dO Vᵀ`,
`dS = P (dP − rowsum(dP P))`, `dQ = dS K` and `dK = dSᵀ Q`. P is recomputed in the backward pass. Work is done in pieces of some texts and
queries, each with all the keys that it sees, so memory grows with the length of texts and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.engine.learner.native.layout import Texts
from groupwise.engine.learner.native.padded_attention import PaddedAttention, real_places
from groupwise.engine.models.native.facts import multiple
from groupwise.engine.models.native.linear import quick_float32
from groupwise.engine.models.native.weights import Shape

SCORES = 1 << 20
"""Most scores in a piece, if a text can be cut that small: 4 MB, which stay in a CPU's cache."""
QUERIES = 128
"""Queries of a piece if a text is cut."""
ALIGNED = 16
"""Keys are processed in multiples of this number, because rows of other lengths take up to four times as long."""


class Piece(NamedTuple):
    """A range of texts of a set, and a range of their queries."""

    texts: slice
    queries: slice


class Heads(NamedTuple):
    """Queries, keys and values of texts as a batch, padded with 0 (M texts, J key heads, R queries per key head)."""

    queries_MJRLD: Tensor
    keys_MJCD: Tensor
    """C keys: those of the prompt, then the text's own, then padding that no query sees."""
    values_MJCD: Tensor


@dataclass(frozen=True, slots=True)
class PieceAttention(PaddedAttention):
    """An `Attention` that computes one piece at a time."""

    later_QX: Tensor
    """-inf if a key comes after the query, else 0; for the queries of a piece, and the keys from its first query on."""

    @property
    def query_scale(self) -> float:
        """See `Attention.query_scale`: the caller scales the queries, which saves a pass over the scores."""
        return self.shape.head_size**-0.5

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """See `Attention.forward`."""
        heads = self._heads(queries, keys, values)
        out_NJRD = out.view(len(out), *self._per_token)
        output_MLJRD = self.room(out_NJRD)
        for piece in self._attention_pieces():
            probabilities_BQC = self._probabilities(heads, piece).to(values.dtype)
            output_BQD = torch.bmm(probabilities_BQC, self._visible(heads.values_MJCD, piece))
            output_MLJRD[piece].copy_(self._apart(output_BQD, piece))
        self.put(output_MLJRD, out_NJRD)

    def gradients(
        self,
        d_out: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        d_queries_MLHD: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `PaddedAttention.gradients`."""
        heads = self._heads(queries, keys, values)
        d_out_MJRLD = self._by_head(d_out)
        d_queries_MLJRD = d_queries_MLHD.unflatten(2, self._per_token[:2])
        pieces = [*self._attention_pieces()]
        if len(pieces) == 1:
            d_q_BQD, d_k_BCD, d_v_BCD = self._gradients(heads, d_out_MJRLD, pieces[0])
            d_queries_MLJRD.copy_(self._apart(d_q_BQD, pieces[0]))
            return d_k_BCD.view_as(heads.keys_MJCD), d_v_BCD.view_as(heads.keys_MJCD)
        sums = [torch.zeros_like(heads.keys_MJCD, dtype=d_queries_MLJRD.dtype) for _ in range(2)]
        for piece in pieces:
            d_q_BQD, *d_keys_values = self._gradients(heads, d_out_MJRLD, piece)
            d_queries_MLJRD[piece].copy_(self._apart(d_q_BQD, piece))
            for sum_MJCD, d_BCD in zip(sums, d_keys_values, strict=True):
                d_MJCD = d_BCD.unflatten(0, (-1, self.shape.kv_heads))
                sum_MJCD[piece.texts, :, : d_BCD.shape[1]] += d_MJCD
        return sums[0], sums[1]

    def _gradients(
        self, heads: Heads, d_out_MJRLD: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the queries, keys and values of a piece, in the number format of the values."""
        dtype = heads.values_MJCD.dtype
        d_out_BQD = self._queries_of(d_out_MJRLD, piece)
        q_BQD, k_BCD, v_BCD = (
            self._queries_of(heads.queries_MJRLD, piece).to(dtype),
            self._visible(heads.keys_MJCD, piece).to(dtype),
            self._visible(heads.values_MJCD, piece),
        )
        p_BQC = self._probabilities(heads, piece)
        d_p_BQC = torch.bmm(d_out_BQD, v_BCD.transpose(1, 2)).to(p_BQC.dtype)
        d_s_BQC = torch._softmax_backward_data(d_p_BQC, p_BQC, -1, p_BQC.dtype).to(dtype)
        return (
            torch.bmm(d_s_BQC, k_BCD),
            torch.bmm(d_s_BQC.transpose(1, 2), q_BQD),
            torch.bmm(p_BQC.to(dtype).transpose(1, 2), d_out_BQD),
        )

    @property
    def _per_token(self) -> tuple[int, int, int]:
        """Number of key heads, queries per key head, and head size."""
        shape = self.shape
        return shape.kv_heads, shape.queries_per_key, shape.head_size

    def _attention_pieces(self) -> Iterator[Piece]:
        queries = _queries(self.shape, self.texts)
        scores = queries * self.shape.heads * (self.texts.prompt_length + self.length)
        texts = max(1, SCORES // scores)
        for text in range(0, self.count, texts):
            for query in range(0, self.length, queries):
                yield Piece(
                    slice(text, min(text + texts, self.count)),
                    slice(query, min(query + queries, self.length)),
                )

    def _heads(self, queries: Tensor, keys: Tensor, values: Tensor) -> Heads:
        end = self.texts.prompt_length + self.length
        padding = multiple(end, ALIGNED) - end
        return Heads(
            self._by_head(queries),
            self.with_prompt(keys, padding),
            self.with_prompt(values, padding),
        )

    def _by_head(self, x_NJD: Tensor) -> Tensor:
        """A tensor of queries as [M, J, R, L, D]."""
        x_NJRD = x_NJD.view(len(x_NJD), *self._per_token)
        return self.to_batch(x_NJRD).permute(0, 2, 3, 1, 4).contiguous()

    def _probabilities(self, heads: Heads, piece: Piece) -> Tensor:
        """Probabilities [B, Q, C], float32 or wider. B: texts times key heads; Q: queries per key head; C: keys up to the last query."""
        q_BQD, k_BCD = (
            self._queries_of(heads.queries_MJRLD, piece),
            self._visible(heads.keys_MJCD, piece),
        )
        with quick_float32(heads.values_MJCD.dtype == torch.bfloat16):
            scores_BQC = torch.bmm(q_BQD, k_BCD.transpose(1, 2))
        count = piece.queries.stop - piece.queries.start
        first = self.texts.prompt_length + piece.queries.start
        own_BRQX = scores_BQC.view(len(scores_BQC), -1, count, k_BCD.shape[1])[..., first:]
        own_BRQX += self.later_QX[:count, : own_BRQX.shape[-1]]
        return torch.softmax(scores_BQC, -1)

    def _queries_of(self, x_MJRLD: Tensor, piece: Piece) -> Tensor:
        """The queries of a piece, grouped by key head, [B, Q, D]."""
        return x_MJRLD[piece.texts, :, :, piece.queries].flatten(2, 3).flatten(0, 1)

    def _apart(self, x_BQD: Tensor, piece: Piece) -> Tensor:
        """The inverse of `_queries_of`, [M, L, J, R, D]."""
        queries = piece.queries.stop - piece.queries.start
        heads, repeat, size = self._per_token
        return x_BQD.view(-1, heads, repeat, queries, size).permute(0, 3, 1, 2, 4)

    def _visible(self, x_MJCD: Tensor, piece: Piece) -> Tensor:
        """The keys or values that a piece sees, [B, C, D]."""
        seen = multiple(self.texts.prompt_length + piece.queries.stop, ALIGNED)
        return x_MJCD[piece.texts, :, :seen].flatten(0, 1)


def piece_attention(
    shape: Shape, texts: Sequence[Texts], device: torch.device
) -> list[PieceAttention]:
    """One attention object for each set of texts."""
    most = max(_queries(shape, text_set) for text_set in texts)
    later_QX = torch.full((most, most + ALIGNED), -torch.inf, device=device).triu_(1)
    return [
        PieceAttention(shape, text_set, real_places(text_set, device), later_QX)
        for text_set in texts
    ]


def _queries(shape: Shape, texts: Texts) -> int:
    """Number of queries in a piece."""
    longest = texts.lengths[0]
    scores = longest * shape.heads * (texts.prompt_length + longest)
    return longest if scores <= SCORES else min(longest, QUERIES)
