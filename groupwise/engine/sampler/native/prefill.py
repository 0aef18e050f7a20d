"""Computes prompts by a native model: one at a time on a CPU, several at once on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.models import varlen
from groupwise.engine.models.machine import send
from groupwise.engine.models.native.facts import ROWS
from groupwise.engine.models.native.forward import Adapter, residual_after_layers, text_attention
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.engine import SLICE

BATCH = 2048
"""Tokens that a GPU computes at once: with models of up to 2B weights, starting the kernels takes as long as computing this many."""
Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Turns keys (float32) and values [P, J, D] of one layer into the form that an engine stores."""


def prefill(
    model: NativeModel, ids: Sequence[int], adapter: Adapter | None, keep: Keep
) -> tuple[Tensor, Tensor, Tensor]:
    """Residuals [P, H] of a prompt, and the stored forms of its keys and of its values, stacked over all layers."""
    ids_P = torch.tensor(ids, device=model.device)
    rotations_P1C = model.rotations(torch.arange(len(ids), device=model.device))
    layer_caches: list[tuple[Tensor, Tensor]] = []

    def attend(number: int, qkv_PO: Tensor) -> Tensor:
        queries, keys, values = model.heads(model.layers[number], qkv_PO, rotations_P1C)
        layer_caches.append(keep(keys, values))
        return text_attention(model, queries, keys, values)

    residual_PH = residual_after_layers(model, model.embedded(ids_P), attend, adapter, few=False)
    keys, values = zip(*layer_caches, strict=True)
    return residual_PH, torch.stack(keys), torch.stack(values)


def last_logits(model: NativeModel, residual_PH: Tensor) -> Tensor:
    """Logits [V] after a prompt."""
    return model.logits(F.pad(residual_PH[-1:], (0, 0, 0, ROWS - 1)))[0]


def prompt_logits(model: NativeModel, residual_PH: Tensor) -> Iterator[Tensor]:
    """Logits [T, V] after each token of a prompt, in slices of one shape: a position's bits do not depend on the prompt's length."""
    for residual_TH in residual_PH.split(SLICE):
        padded_SH = F.pad(residual_TH, (0, 0, 0, SLICE - len(residual_TH)))
        yield model.logits(padded_SH)[: len(residual_TH)]


def prefill_together(
    model: NativeModel, texts: Sequence[Sequence[int]], adapter: Adapter | None, most: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Logits [V] after each prompt, and its keys and values [L, J, P, D] in the model's number format; for a GPU.

    Prompts are computed in batches padded to `BATCH` tokens; a longer prompt has its own batch, padded to a multiple of that. Logits are
    computed for `most` prompts at once, padded likewise. So the shape of a prompt's products, and therefore its bits, do not depend on
    other prompts.
    """
    batches: list[list[int]] = []
    room = 0
    for number, ids in enumerate(texts):
        if len(ids) > room:
            batches.append([])
            room = BATCH
        batches[-1].append(number)
        room -= len(ids)
    lasts: list[Tensor] = []
    caches: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        residual_NH, keys_LJND, values_LJND = prefill_batch(
            model, [texts[n] for n in batch], adapter
        )
        end = 0
        for number in batch:
            start, end = end, end + len(texts[number])
            lasts.append(residual_NH[end - 1])
            # Copies, because a view would keep the memory of the whole batch.
            cache = keys_LJND[:, :, start:end], values_LJND[:, :, start:end]
            caches.append((cache[0].contiguous(), cache[1].contiguous()))
    logits: list[Tensor] = []
    for start in range(0, len(lasts), most):
        some_NH = torch.stack(lasts[start : start + most])
        logits += model.logits(F.pad(some_NH, (0, 0, 0, most - len(some_NH))))[: len(some_NH)]
    return [(logits_V, *cache) for logits_V, cache in zip(logits, caches, strict=True)]


def prefill_batch(
    model: NativeModel, texts: Sequence[Sequence[int]], adapter: Adapter | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream [N, H] after these texts, and their keys and values [L, J, N, D]; N is padded to a multiple of `BATCH`."""
    lengths = [len(ids) for ids in texts]
    empty = -sum(lengths) % BATCH
    lengths += [empty] if empty else []
    size = sum(lengths)
    device = model.device
    ids = torch.tensor([*(id_ for ids in texts for id_ in ids), *[0] * empty])
    positions = torch.tensor([n for length in lengths for n in range(length)])
    ids_N, positions_N = send(ids, device), send(positions, device)
    rotations_N1C = model.rotations(positions_N)
    packed = varlen.suits(model.shape.head_size, model.dtype, device)
    ends = send(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
    layer_caches: list[tuple[Tensor, Tensor]] = []

    def attend(number: int, qkv_NO: Tensor) -> Tensor:
        heads = model.heads(model.layers[number], qkv_NO, rotations_N1C)
        queries, keys, values = (tensor.to(model.dtype) for tensor in heads)
        layer_caches.append((keys.transpose(0, 1), values.transpose(0, 1)))
        if packed:
            inputs = queries, keys, values.contiguous()
            return varlen.attention(*inputs, (ends, ends), (size, size)).flatten(1)
        parts = zip(*(tensor.split(lengths) for tensor in (queries, keys, values)), strict=True)
        return torch.cat([text_attention(model, *text) for text in parts])

    residual_NH = residual_after_layers(model, model.embedded(ids_N), attend, adapter, few=False)
    keys, values = zip(*layer_caches, strict=True)
    return residual_NH, torch.stack(keys), torch.stack(values)
