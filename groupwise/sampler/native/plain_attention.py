"""Attention of one token of every row by torch: on GPUs, and the reference for the compiled one.

A prompt's keys are looked at in one product for all rows of its group, the rows' own keys in another, and one softmax goes over both.
Keys are looked at in stretches (`Stretches`): products of these sizes give every row the same bits, however many rows there are,
wherever it stands among them, and whatever stands behind its keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.models.native.weights import NativeModel
from groupwise.sampler.native.cache import ROWS, Group, OwnCache, Stretches, multiple

PIECE = 128
"""Own values that are summed up at a time in float32."""


class PlainAttention:
    """Attention of all rows for one token, layer by layer.

    The scores of a row stand in one buffer: to its own tokens, masked behind the last, then to its prompt, and nothing (-inf) up to the
    longest prompt. Both parts are whole vectors of a processor long, so that a row's sums do not depend on what the others need.
    """

    def __init__(
        self,
        model: NativeModel,
        own: OwnCache,
        groups: Sequence[Group],
        rotations_N1C: Tensor,
        written_N: Tensor,
        longest: int,
    ) -> None:
        shape = model.shape
        device = written_N.device
        self._model, self._own, self._groups = model, own, groups
        self._rotations_N1C = rotations_N1C
        self._heads, self._repeat, self._size = (
            shape.kv_heads,
            shape.queries_per_key,
            shape.head_size,
        )
        self._scale = shape.head_size**-0.5
        self._rows = len(written_N)
        self._length = multiple(longest, Stretches.of(shape).own)
        self._indices = own.indices(written_N)
        hidden_NT = torch.arange(self._length, device=device) > written_N[:, None]
        mask_NT = torch.zeros(hidden_NT.shape, device=device).masked_fill_(hidden_NT, -torch.inf)
        self._mask_N11T = mask_NT[:, None, None]
        width = self._length + max(group.prompt.values_LJPD.shape[2] for group in groups)
        scores = (self._rows, self._heads, self._repeat, width)
        self._scores_NJRX = torch.full(scores, -torch.inf, device=device)

    def __call__(self, layer: int, qkv_NO: Tensor) -> Tensor:
        """Queries, keys and values [rows, O] of one layer, to [rows, heads · D]."""
        model = self._model
        queries, keys, values = model.heads(model.layers[layer], qkv_NO, self._rotations_N1C)
        self._own.write(layer, self._indices, keys, values)
        queries_NJRD = queries.mul_(self._scale).view(
            self._rows, self._heads, self._repeat, self._size
        )
        self._score(layer, queries_NJRD)
        weights_NJRX = self._scores_NJRX.softmax(-1).to(self._model.dtype)
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

    def _of_prompt(self, numbers_NJRX: Tensor, group: Group, length: int) -> Tensor:
        """The part of a buffer that belongs to a group's rows and the first tokens of its prompt."""
        return numbers_NJRX[group.start : group.end, ..., self._length : self._length + length]

    def _folded(self, numbers_GJRX: Tensor) -> Tensor:
        """The rows of a group as those of one product for each head of the keys, in a multiple of `ROWS`."""
        folded_JMX = numbers_GJRX.transpose(0, 1).flatten(1, 2)
        padding = -folded_JMX.shape[1] % ROWS
        return F.pad(folded_JMX, (0, 0, 0, padding)) if padding else folded_JMX

    def _unfolded(self, folded_JMX: Tensor, group: Group) -> Tensor:
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
