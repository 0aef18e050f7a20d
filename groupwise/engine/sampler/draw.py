"""Draws one token for each row: a counter-based uniform number, inverted through the cumulative distribution.

The uniform number depends only on the member's seed and the token's position, never on the rest of the batch. The search has two levels
(blocks of the vocabulary, then within a block), so that the exponentials are computed once.

Some tokens are excluded first. Excluding stop tokens that come too early is part of what the learner trains
(`groupwise.core.types.MaskedTokens`), so its log-probabilities exclude them as well. The tokens that top_k, top_p and min_p exclude depend
on the policy itself and would change with it, so completions drawn with these are never trained on. The tokens that a row may draw depend
only on that row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.core.types import SamplingParams
from groupwise.engine.models.machine import send
from groupwise.engine.models.native import compiled
from groupwise.engine.models.native.facts import VOCABULARY_BLOCK
from groupwise.engine.models.native.fused import kernels_for

BELOW_ONE = 1 - 1e-12
"""Rounding may raise a target to its total, beyond the last token that has weight: uniform numbers stay just below 1."""


def draw_tokens(
    logits_SV: Tensor, temperatures_S: Tensor, uniforms_S: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw tokens [S] at their temperatures; also returns their log-probabilities [S] (nats, float32). Logits may be in any format.

    A temperature of 0 takes the most probable token, with its log-probability at temperature 1. `uniforms_S` is float64. Pass temperatures
    and uniform numbers on the CPU: reading them from a GPU would wait for the GPU.
    """
    uniforms_S = uniforms_S.clamp_max(BELOW_ONE)
    device = logits_SV.device
    if logits_SV.dtype == torch.float32 and compiled.computes(logits_SV):
        return compiled.draw(logits_SV, temperatures_S, uniforms_S)
    kernels = kernels_for(logits_SV)
    greedy_S = temperatures_S == 0
    some_greedy = bool(greedy_S.any())
    divisors_S = temperatures_S.masked_fill(greedy_S, 1.0) if some_greedy else temperatures_S
    # Dividing by 1 changes nothing, but costs a pass over the logits.
    plain = bool((divisors_S == 1).all())
    greedy_S, divisors_S = send(greedy_S, device), send(divisors_S, device)
    uniforms_S = send(uniforms_S, device)
    if kernels is not None:
        tokens_S, logprobs_S = kernels.draw(logits_SV, divisors_S, uniforms_S)
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
    padding = -weights_SV.shape[1] % VOCABULARY_BLOCK
    weights_SKB = (F.pad(weights_SV, (0, padding)) if padding else weights_SV).unflatten(
        1, (-1, VOCABULARY_BLOCK)
    )
    sums_SK = weights_SKB.sum(-1)
    tokens_S = _search_tokens(weights_SKB, sums_SK, uniforms_S, logits_SV.shape[1])
    if some_greedy:
        tokens_S = torch.where(greedy_S, scaled_SV.argmax(-1), tokens_S)
    chosen_S = scaled_SV.gather(1, tokens_S[:, None])[:, 0]
    return tokens_S, chosen_S - peaks_S - sums_SK.sum(-1).log()


def _search_tokens(
    weights_SKB: Tensor, sums_SK: Tensor, uniforms_S: Tensor, vocabulary: int
) -> Tensor:
    cumulative_SK = sums_SK.double().cumsum(-1)
    targets_S1 = (uniforms_S * cumulative_SK[:, -1])[:, None]
    block_S1 = torch.searchsorted(cumulative_SK, targets_S1, right=True).clamp_max(
        sums_SK.shape[1] - 1
    )
    before_SK = F.pad(cumulative_SK, (1, 0))
    rest_S1 = targets_S1 - before_SK.gather(1, block_S1)
    rows_S = torch.arange(len(uniforms_S), device=uniforms_S.device)
    inside_SB = weights_SKB[rows_S, block_S1[:, 0]].double().cumsum(-1)
    rest_S1 = torch.minimum(rest_S1, inside_SB[:, -1:] * BELOW_ONE)
    offset_S1 = torch.searchsorted(inside_SB, rest_S1, right=True)
    # Only NaN or infinite logits reach beyond the end; their log-probability shows it.
    return (block_S1 * VOCABULARY_BLOCK + offset_S1)[:, 0].clamp_max(vocabulary - 1)


Truncation = tuple[int | None, float | None, float | None]
"""top_k, top_p and min_p, in the order in which they are applied."""

FIRST_SORTED = 256
"""Number of most probable tokens that are tried first for top_p; they are nearly always enough."""


def mask_early_stops(
    logits_SV: Tensor, params: Sequence[SamplingParams | None], lengths: Sequence[int]
) -> Tensor:
    """The logits, with -inf for the stop tokens of rows that have fewer than `min_tokens` tokens so far; None marks a padding row."""
    early = [
        (row, token)
        for row, (row_params, length) in enumerate(zip(params, lengths, strict=True))
        if row_params is not None and length < row_params.min_tokens
        for token in row_params.stop_token_ids
        if token < logits_SV.shape[1]
    ]
    if not early:
        return logits_SV
    rows_X, tokens_X = send(torch.tensor(early), logits_SV.device).unbind(1)
    never = logits_SV.new_full((), -math.inf)
    return logits_SV.index_put((rows_X, tokens_X), never)


def truncate(
    logits_SV: Tensor, temperatures_S: Tensor, params: Sequence[SamplingParams | None]
) -> Tensor:
    """Set tokens that top_k, top_p and min_p exclude to -inf, computed at the row's temperature (at 1 for temperature 0).

    Each rule applies to the tokens that the previous one kept; the most probable token stays. They mean the same as in transformers'
    `generate`, except that tokens with equal logits are kept or excluded together. All rows are computed, in one shape, and only those
    that request the rule use the result: a row's last bits do not depend on the others.
    """
    truncations: list[Truncation | None] = [
        (row_params.top_k, row_params.top_p, row_params.min_p)
        if row_params is not None and row_params.truncates
        else None
        for row_params in params
    ]
    divisors_S = temperatures_S.masked_fill(temperatures_S == 0, 1.0)
    for kind in dict.fromkeys(truncation for truncation in truncations if truncation is not None):
        concerned_S = torch.tensor([truncation == kind for truncation in truncations])
        concerned_S = send(concerned_S, logits_SV.device)
        truncated_SV = logits_SV / send(divisors_S, logits_SV.device)[:, None]
        top_k, top_p, min_p = kind
        if top_k is not None:
            floor_S1 = _top_logits(truncated_SV, top_k)[:, -1:]
            truncated_SV = truncated_SV.masked_fill(truncated_SV < floor_S1, -math.inf)
        if top_p is not None:
            floor_S1 = _nucleus(truncated_SV, top_p, concerned_S)
            truncated_SV = truncated_SV.masked_fill(truncated_SV < floor_S1, -math.inf)
        if min_p is not None:
            floor_S1 = truncated_SV.amax(-1, keepdim=True) + math.log(min_p)
            truncated_SV = truncated_SV.masked_fill(truncated_SV < floor_S1, -math.inf)
        excluded_SV = torch.isneginf(truncated_SV) & concerned_S[:, None]
        logits_SV = logits_SV.masked_fill(excluded_SV, -math.inf)
    return logits_SV


def _nucleus(scaled_SV: Tensor, top_p: float, concerned_S: Tensor) -> Tensor:
    """The lowest logit [S, 1] of the most probable tokens that together reach `top_p`, including the one that crosses it.

    Only as many of the best as needed are sorted, because sorting the whole vocabulary takes longer than the model.
    """
    totals_S1 = scaled_SV.logsumexp(-1, keepdim=True)
    count = FIRST_SORTED
    while True:
        best_SN = _top_logits(scaled_SV, count)
        chances_SN = (best_SN - totals_S1).exp()
        inside_SN = chances_SN.cumsum(-1) - chances_SN < top_p
        inside_SN[:, 0] = True
        if count >= scaled_SV.shape[1] or not bool((inside_SN[:, -1] & concerned_S).any()):
            return best_SN.masked_fill(~inside_SN, math.inf).amin(-1, keepdim=True)
        count *= 16


def _top_logits(scaled_SV: Tensor, count: int) -> Tensor:
    """The largest logits of each row in descending order; all of them if there are fewer than `count`."""
    return scaled_SV.topk(min(count, scaled_SV.shape[1])).values
