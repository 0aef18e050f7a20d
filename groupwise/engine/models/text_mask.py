"""Causal attention for transformers' models: a batch holds several texts, and no mask of all queries and keys is made.

A dense mask grows with the square of the length, and torch keeps a copy of it for each layer's backward pass. `TextMask` states only where
texts begin and end. Transformers passes it unchanged to the attention function that this module registers under the name `ATTENTION`, which
computes each text by a causal kernel. Other masks go on to transformers' own `sdpa`, and are made as for it. Only models to which
`groupwise.engine.models.decoder` gives this name use it: others in the same process, such as a user's judges, keep transformers' functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from groupwise.engine.models import varlen

ATTENTION = "groupwise_text_mask"
"""Name of this attention in transformers' registries and in a model's config; transformers writes it to no file."""
QUERIES = 256
"""Queries for which a piece of a mask is made, if a text needs one."""


class TextMask(BlockMask):
    """A token sees itself and the earlier tokens of its own text. It is a `BlockMask` because transformers leaves such masks alone."""

    def __init__(
        self,
        queries: int,
        *,
        past: int = 0,
        lengths: Sequence[int] | None = None,
        prompts: Sequence[int | None] | None = None,
        window: int | None = None,
    ) -> None:
        """`queries` tokens in each sequence, which also see all of the `past` keys before them.

        `lengths`: of all texts, one after another in one sequence after another, padding included; None: each sequence is one text.
        `prompts`: for each text the index of one in the same sequence that it continues: it sees that text too; None: it continues none.
        `window`: number of latest tokens that a token sees; None: all.
        """
        self.queries, self.past, self.window = queries, past, window
        self.lengths = None if lengths is None else tuple(lengths)
        self.prompts = None if prompts is None else tuple(prompts)

    ndim = 4
    """Some models look at it to leave a mask with four axes as it is."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a dense mask for attention scores that all sequences and heads share."""
        return 1, 1, self.queries, self.past + self.queries

    def __repr__(self) -> str:
        texts = f"lengths={self.lengths}, prompts={self.prompts}"
        return f"TextMask({self.queries}, past={self.past}, {texts}, window={self.window})"

    def within(self, window: int | None) -> TextMask:
        """The same with a window."""
        return TextMask(
            self.queries,
            past=self.past,
            lengths=self.lengths,
            prompts=self.prompts,
            window=window,
        )

    def dense(self, device: torch.device) -> Tensor:
        """Mask [B, T, K], for attention that is not torch's: True where a query sees a key; B is 1 without `lengths`."""
        if self.lengths is None:
            seen_TK = torch.ones(self.shape[2:], dtype=torch.bool, device=device).tril_(self.past)
            return (seen_TK if self.window is None else seen_TK.triu_(self.past - self.window + 1))[
                None
            ]
        prompts = self.prompts or (None,) * len(self.lengths)
        firsts = [0 if prompt is None else self.lengths[prompt] for prompt in prompts]
        places = [range(first, first + n) for first, n in zip(firsts, self.lengths, strict=True)]
        place_BT = torch.tensor([*chain(*places)], device=device).view(-1, self.queries)
        lengths = torch.tensor(self.lengths, device=device)
        text_BT = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        text_BT = text_BT.view(-1, self.queries)
        continued = torch.tensor([-1 if each is None else each for each in prompts], device=device)
        distance_BTK = place_BT[:, :, None] - place_BT[:, None, :]
        seen_BTK = (text_BT[:, :, None] == text_BT[:, None, :]) & (distance_BTK >= 0)
        seen_BTK |= continued[text_BT][:, :, None] == text_BT[:, None, :]
        return seen_BTK if self.window is None else seen_BTK & (distance_BTK < self.window)


def causal_attention(
    queries_BHTD: Tensor,
    keys_BJKD: Tensor,
    values_BJKD: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention [B, H, T, D] of queries that are the last of the keys; memory grows with their number and not with its square."""
    count, keys = queries_BHTD.shape[2], keys_BJKD.shape[2]
    on_cpu = queries_BHTD.device.type == "cpu"
    grouped = queries_BHTD.shape[1] != keys_BJKD.shape[1]
    if grouped and not on_cpu and values_BJKD.dtype == torch.float32:
        # On a GPU no kernel takes fewer key heads in float32, and torch would compute all scores.
        repeat = queries_BHTD.shape[1] // keys_BJKD.shape[1]
        keys_BJKD, values_BJKD = (
            each.repeat_interleave(repeat, dim=1) for each in (keys_BJKD, values_BJKD)
        )
        grouped = False
    attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=grouped)
    if window is None or window >= keys:
        if count == keys:
            return attend(queries_BHTD, keys_BJKD, values_BJKD, is_causal=True)
        if not on_cpu:
            last = causal_lower_right(count, keys)
            return attend(queries_BHTD, keys_BJKD, values_BJKD, attn_mask=last)
    band_QX = _band(min(QUERIES, count), keys, window, values_BJKD.dtype, values_BJKD.device)
    pieces: list[Tensor] = []
    for start in range(0, count, QUERIES):
        end = min(start + QUERIES, count)
        past = keys - count + start  # keys before the first query of the piece
        first = 0 if window is None else max(0, past - window + 1)
        visible = slice(first, past + end - start)
        pieces.append(
            attend(
                queries_BHTD[:, :, start:end],
                keys_BJKD[:, :, visible],
                values_BJKD[:, :, visible],
                attn_mask=band_QX[: end - start, keys - past + first : keys + end - start],
            )
        )
    return torch.cat(pieces, dim=2)


@lru_cache(maxsize=4)
@torch.inference_mode(mode=False)  # a sampler in this process may be the first to ask
def _band(
    queries: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The mask of all pieces [Q, keys + Q], of which each takes some columns: column `keys` belongs to the piece's first query.

    Torch keeps the mask for the backward pass, so all pieces and layers share the memory of this one.
    """
    distance_QX = torch.arange(queries)[:, None] - torch.arange(-keys, queries)
    seen_QX = distance_QX >= 0
    if window is not None:
        seen_QX &= distance_QX < window
    return torch.zeros(seen_QX.shape, dtype=dtype).masked_fill_(~seen_QX, -torch.inf).to(device)


class _Copies(torch.autograd.Function):
    """Keys [K, J, D] copied from [N, J, D]. The gradients of a key's copies are added in float32, always in the same order: a prompt may
    have hundreds."""

    @staticmethod
    def forward(ctx: Any, keys_NJD: Tensor, copied_K: Tensor) -> Tensor:
        ctx.save_for_backward(copied_K)
        ctx.count = len(keys_NJD)
        return keys_NJD[copied_K]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_KJD,), (copied_K,) = gradients, ctx.saved_tensors
        sum_NX = varlen.sum_of_copies(gradient_KJD.flatten(1), copied_K, ctx.count)
        return sum_NX.view(ctx.count, *gradient_KJD.shape[1:]).to(gradient_KJD.dtype), None


@lru_cache(maxsize=1)
@torch.inference_mode(mode=False)
def _seen_keys(
    lengths: tuple[int, ...], prompts: tuple[int | None, ...], device: torch.device
) -> tuple[tuple[int, ...], Tensor]:
    """How many keys each text sees, its prompt's first, and which they are, one text after another."""
    starts = [0, *accumulate(lengths)]
    texts = [range(*borders) for borders in pairwise(starts)]
    seen = [
        [*(() if prompt is None else texts[prompt]), *text]
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    return tuple(map(len, seen)), torch.tensor([*chain(*seen)], device=device)


@lru_cache(maxsize=2)
@torch.inference_mode(mode=False)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Borders of the texts, from 0; all layers of a pass ask for the same."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def masked_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | TextMask | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, H, T, D], key and value [B, J, K, D]; the result is [B, T, H, D]."""
    if not isinstance(attention_mask, TextMask):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    query, key = query.to(value.dtype), key.to(value.dtype)
    lengths, window = attention_mask.lengths, attention_mask.window
    if lengths is None:
        output_BHTD = causal_attention(query, key, value, scale=scaling, window=window)
        return output_BHTD.transpose(1, 2), None
    query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    seen = lengths
    if attention_mask.prompts is not None:
        seen, copied_K = _seen_keys(lengths, attention_mask.prompts, value.device)
        key, value = _Copies.apply(key, copied_K), _Copies.apply(value, copied_K)
    if varlen.suits(query.shape[-1], value.dtype, value.device):
        ends = _ends(lengths, value.device), _ends(seen, value.device)
        output_NHD = varlen.attention(
            query, key, value, ends, (max(lengths), max(seen)), scale=scaling, window=window
        )
    else:
        texts = (query.split(lengths), key.split(seen), value.split(seen))
        outputs: list[Tensor] = []
        for text in zip(*texts, strict=True):
            q_1HLD, k_1JLD, v_1JLD = (each.transpose(0, 1)[None] for each in text)
            found_1HLD = causal_attention(q_1HLD, k_1JLD, v_1JLD, scale=scaling, window=window)
            outputs.append(found_1HLD[0].transpose(0, 1))
        output_NHD = torch.cat(outputs)
    return output_NHD.unflatten(0, (-1, attention_mask.queries)), None


AttentionInterface.register(ATTENTION, masked_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
