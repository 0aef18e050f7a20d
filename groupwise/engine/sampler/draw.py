"""Draws one token for each row: a counter-based uniform number, inverted through the cumulative distribution.

The uniform number depends on the member's seed and the token's position alone, never on the rest of the batch. The search is
in two levels (blocks of the vocabulary, then within a block), so that the exponentials are computed once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.models.native.fused import kernels_for

BLOCK = 128
BELOW_ONE = 1 - 1e-12


def draw_tokens(
    logits_SV: Tensor, temperatures_S: Tensor, uniforms_S: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [S] and their log-probabilities [S] (nats, float32) at the temperature; logits may be in any format.

    A temperature of 0 takes the most probable token, with its log-probability at temperature 1. `uniforms_S` is float64. Pass temperatures
    and uniform numbers on the processor: otherwise a GPU must be waited for to read them.
    """
    kernels = kernels_for(logits_SV)
    greedy_S = temperatures_S == 0
    some_greedy = bool(greedy_S.any())
    divisors_S = temperatures_S.masked_fill(greedy_S, 1.0) if some_greedy else temperatures_S
    # Dividing by 1 changes nothing, but takes a pass over the logits.
    plain = bool((divisors_S == 1).all())
    device = logits_SV.device
    greedy_S, divisors_S = greedy_S.to(device), divisors_S.to(device)
    uniforms_S = uniforms_S.to(device)
    if kernels is not None:
        tokens_S, logprobs_S = kernels.drawn(logits_SV, divisors_S, uniforms_S, BLOCK)
        if some_greedy:
            rows_S = torch.arange(len(tokens_S), device=device)
            best_S = logits_SV.argmax(-1)
            above_S = logits_SV[rows_S, best_S].float() - logits_SV[rows_S, tokens_S].float()
            tokens_S = torch.where(greedy_S, best_S, tokens_S)
            logprobs_S = torch.where(greedy_S, logprobs_S + above_S, logprobs_S)
        return tokens_S, logprobs_S
    scaled_SV = logits_SV.float() if plain else logits_SV / divisors_S[:, None]
    peaks_S = scaled_SV.amax(-1)
    weights_SV = (scaled_SV - peaks_S[:, None]).exp_()
    weights_SKB = _padded(weights_SV).unflatten(1, (-1, BLOCK))
    sums_SK = weights_SKB.sum(-1)
    tokens_S = _search(weights_SKB, sums_SK, uniforms_S, logits_SV.shape[1])
    if some_greedy:
        tokens_S = torch.where(greedy_S, scaled_SV.argmax(-1), tokens_S)
    chosen_S = scaled_SV.gather(1, tokens_S[:, None])[:, 0]
    return tokens_S, chosen_S - peaks_S - sums_SK.sum(-1).log()


def _padded(weights_SV: Tensor) -> Tensor:
    padding = -weights_SV.shape[1] % BLOCK
    return F.pad(weights_SV, (0, padding)) if padding else weights_SV


def _search(weights_SKB: Tensor, sums_SK: Tensor, uniforms_S: Tensor, vocabulary: int) -> Tensor:
    cumulative_SK = sums_SK.double().cumsum(-1)
    # Rounding may carry a target up to its total, beyond the last token that has weight: stay just below.
    targets_S1 = (uniforms_S.clamp_max(BELOW_ONE) * cumulative_SK[:, -1])[:, None]
    block_S1 = torch.searchsorted(cumulative_SK, targets_S1, right=True).clamp_max(
        sums_SK.shape[1] - 1
    )
    before_SK = F.pad(cumulative_SK, (1, 0))
    rest_S1 = targets_S1 - before_SK.gather(1, block_S1)
    rows_S = torch.arange(len(uniforms_S), device=uniforms_S.device)
    inside_SB = weights_SKB[rows_S, block_S1[:, 0]].double().cumsum(-1)
    rest_S1 = torch.minimum(rest_S1, inside_SB[:, -1:] * BELOW_ONE)
    offset_S1 = torch.searchsorted(inside_SB, rest_S1, right=True)
    # Only logits that are not numbers reach beyond the end; their log-probability shows it.
    return (block_S1 * BLOCK + offset_S1)[:, 0].clamp_max(vocabulary - 1)
