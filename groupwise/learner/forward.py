"""Log-probabilities of the completions of a micro-batch, two ways that agree.

`shared_prompt` computes the prompt once and lets every completion look at its keys and values, gradients included. `whole_rows`
is the plain reference: prompt and completion as one padded row each. It is also what gradient checkpointing needs, since a cache
cannot be recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.learner.layout import MicroBatch
from groupwise.models.decoder import Decoder, PromptCache, SharedPrefixCache, causal_mask
from groupwise.models.logprobs import token_logprobs


@dataclass(frozen=True, slots=True)
class Forward:
    """Per completion token, padded on the right; padding is 0."""

    logprobs_BT: Tensor
    entropies_BT: Tensor


def shared_prompt(decoder: Decoder, batch: MicroBatch) -> Forward:
    """The prompt once, then all its completions beside each other."""
    device = decoder.device
    prompt_1P = torch.tensor([batch.prompt_ids], device=device)
    length = prompt_1P.shape[1]
    cache = PromptCache()
    positions_1P = torch.arange(length, device=device)[None]
    prompt_hidden = decoder.hidden(prompt_1P, positions_1P, causal_mask(length, 0, device), cache)
    ids_BT = _padded_ids(batch, device)
    rows, width = ids_BT.shape
    hidden_BTH = prompt_hidden[:, -1:].expand(rows, -1, -1)
    if width > 1:
        positions_1T = torch.arange(length, length + width - 1, device=device)[None]
        mask = causal_mask(width - 1, length, device)
        later = decoder.hidden(ids_BT[:, :-1], positions_1T, mask, SharedPrefixCache(cache))
        hidden_BTH = torch.cat((hidden_BTH, later), dim=1)
    return _at_tokens(decoder, batch, hidden_BTH, ids_BT)


def whole_rows(decoder: Decoder, batch: MicroBatch) -> Forward:
    """Each row by itself, prompt included."""
    device = decoder.device
    ids_BT = _padded_ids(batch, device)
    rows, width = ids_BT.shape
    prompt_BP = torch.tensor([batch.prompt_ids], device=device).expand(rows, -1)
    length = prompt_BP.shape[1]
    whole = torch.cat((prompt_BP, ids_BT[:, :-1]), dim=1)
    positions = torch.arange(length + width - 1, device=device)[None]
    hidden = decoder.hidden(whole, positions, causal_mask(length + width - 1, 0, device), None)
    return _at_tokens(decoder, batch, hidden[:, length - 1 :], ids_BT)


def _padded_ids(batch: MicroBatch, device: torch.device) -> Tensor:
    width = batch.width
    padded = [[*row.completion_ids, *[0] * (width - len(row.completion_ids))] for row in batch.rows]
    return torch.tensor(padded, device=device)


def _at_tokens(decoder: Decoder, batch: MicroBatch, hidden_BTH: Tensor, ids_BT: Tensor) -> Forward:
    """Logits at real completion positions only, put back into the padded shape."""
    device = ids_BT.device
    lengths_B = torch.tensor([len(row.completion_ids) for row in batch.rows], device=device)
    real_BT = torch.arange(ids_BT.shape[1], device=device) < lengths_B[:, None]
    temperatures_B = torch.tensor([row.temperature for row in batch.rows], device=device)
    temperatures_BT = temperatures_B[:, None].expand_as(ids_BT)
    logprobs_N, entropies_N = token_logprobs(
        decoder, hidden_BTH[real_BT], ids_BT[real_BT], temperatures_BT[real_BT]
    )
    empty_BT = torch.zeros(ids_BT.shape, device=device)
    return Forward(
        empty_BT.masked_scatter(real_BT, logprobs_N), empty_BT.masked_scatter(real_BT, entropies_N)
    )
