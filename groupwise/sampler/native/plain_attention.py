"""Attention of one token of every row by torch: on GPUs, and the reference for the compiled one.

A prompt's keys are looked at in one product for all rows of its group, the rows' own keys in another, and one softmax goes over both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.models.native.compiled import STRETCH
from groupwise.models.native.linear import quick_float32
from groupwise.models.native.weights import NativeModel
from groupwise.sampler.native.cache import Group, OwnCache, multiple


class PlainAttention:
    """An `Attend` for all rows of one token.

    The scores of a row stand in one buffer: to its own tokens, masked behind the last, then to its prompt, and nothing (-inf) up to the
    longest prompt.
    """

    def __init__(
        self,
        model: NativeModel,
        own: OwnCache,
        groups: Sequence[Group],
        rotations_N1C: Tensor,
        written_N: Tensor,
    ) -> None:
        device = written_N.device
        self._model, self._own, self._groups = model, own, groups
        self._rotations_N1C, self._written_N = rotations_N1C, written_N
        self._length = multiple(1 + int(written_N.max()), STRETCH)
        hidden_NT = torch.arange(self._length, device=device) > written_N[:, None]
        mask_NT = torch.zeros(hidden_NT.shape, device=device).masked_fill_(hidden_NT, -torch.inf)
        self._mask_N11T = mask_NT[:, None, None]
        self._width = self._length + max(group.prompt.length for group in groups)

    def __call__(self, layer: int, qkv_NO: Tensor) -> Tensor:
        """Queries, keys and values [rows, O] of one layer, to [rows, heads · D]."""
        model, shape = self._model, self._model.shape
        queries, keys, values = model.heads(model.layers[layer], qkv_NO, self._rotations_N1C)
        self._own.write(layer, self._written_N, keys, values)
        queries_NJRD = queries.mul_(shape.head_size**-0.5).view(
            len(qkv_NO), shape.kv_heads, shape.queries_per_key, shape.head_size
        )
        with quick_float32(model.dtype == torch.bfloat16):
            scores_NJRX = self._scores(layer, queries_NJRD)
        weights_NJRX = scores_NJRX.softmax(-1).to(model.dtype)
        return self._weighed(layer, weights_NJRX)[..., : shape.head_size].flatten(1)

    def _scores(self, layer: int, queries_NJRD: Tensor) -> Tensor:
        rows, kv_heads, repeat, _ = queries_NJRD.shape
        keys_BKDS = self._own.keys_LBKDS[layer, : rows * kv_heads, : self._length // STRETCH]
        own_BKRS = queries_NJRD.flatten(0, 1)[:, None] @ keys_BKDS
        own_NJRT = own_BKRS.transpose(1, 2).reshape(rows, kv_heads, repeat, self._length)
        scores_NJRX = own_NJRT.new_full((rows, kv_heads, repeat, self._width), -torch.inf)
        torch.add(own_NJRT, self._mask_N11T, out=scores_NJRX[..., : self._length])
        for group in self._groups:
            keys_JKDS = group.prompt.keys_LJKDS[layer]
            found = torch.einsum(
                "njrd,jkds->njrks", queries_NJRD[group.start : group.end], keys_JKDS
            )
            self._of_prompt(scores_NJRX, group).copy_(found.flatten(3)[..., : group.prompt.length])
        return scores_NJRX

    def _weighed(self, layer: int, weights_NJRX: Tensor) -> Tensor:
        rows, kv_heads = weights_NJRX.shape[:2]
        values_BTD = self._own.values_LBTD[layer, : rows * kv_heads, : self._length]
        values_NJTD = values_BTD.unflatten(0, (rows, kv_heads))
        found_NJRD = weights_NJRX[..., : self._length] @ values_NJTD
        for group in self._groups:
            values_JPD = group.prompt.values_LJPD[layer, :, : group.prompt.length]
            weights_GJRP = self._of_prompt(weights_NJRX, group)
            found_NJRD[group.start : group.end] += weights_GJRP @ values_JPD
        return found_NJRD

    def _of_prompt(self, numbers_NJRX: Tensor, group: Group) -> Tensor:
        """The part of a buffer that belongs to a group's rows and the tokens of its prompt."""
        end = self._length + group.prompt.length
        return numbers_NJRX[group.start : group.end, ..., self._length : end]
