"""Leaves tokens out before one is drawn: stop tokens at the beginning of a completion, and improbable tokens in evaluations.

Stop tokens that come too early are part of what the learner trains (`groupwise.core.types.MaskedTokens`), so its log-probabilities leave
them out as well. The tokens that top_k, top_p and min_p leave out depend on the policy itself and would change with it, so completions
drawn with these are never trained on. The tokens that a row may draw depend on the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from groupwise.core.types import SamplingParams

Truncation = tuple[int | None, float | None, float | None]
"""top_k, top_p and min_p, in the order in which they are applied."""

FIRST_SORTED = 256
"""Number of most probable tokens that are tried first for top_p; they nearly always suffice."""


def without_early_stops(
    logits_SV: Tensor, params: Sequence[SamplingParams | None], lengths: Sequence[int]
) -> Tensor:
    """The logits, -inf for the stop tokens of rows that have fewer than `min_tokens` tokens so far; None: an empty row."""
    early = [
        (row, token)
        for row, (each, length) in enumerate(zip(params, lengths, strict=True))
        if each is not None and length < each.min_tokens
        for token in each.stop_token_ids
        if token < logits_SV.shape[1]
    ]
    if not early:
        return logits_SV
    rows_X, tokens_X = torch.tensor(early, device=logits_SV.device).unbind(1)
    never = torch.tensor(-math.inf, dtype=logits_SV.dtype, device=logits_SV.device)
    return logits_SV.index_put((rows_X, tokens_X), never)


def truncated(
    logits_SV: Tensor, temperatures_S: Tensor, params: Sequence[SamplingParams | None]
) -> Tensor:
    """The logits at the temperature (0: at 1), with -inf for the tokens that top_k, top_p and min_p leave out, each applied to what the one
    before it left; the most probable token stays.

    They mean the same as in transformers' `generate`, but that tokens of the same logit stay or go together. All rows are
    computed, in one shape, and only those that ask for it take the result: a row's last bits do not depend on the others.
    """
    asked = [_truncation(each) if each is not None and each.truncates else None for each in params]
    divisors_S = temperatures_S.masked_fill(temperatures_S == 0, 1.0)
    for kind in dict.fromkeys(each for each in asked if each is not None):
        concerned_S = torch.tensor([each == kind for each in asked], device=logits_SV.device)
        kept_SV = logits_SV / divisors_S[:, None].to(logits_SV.device)
        for floor in _floors(kind, concerned_S):
            kept_SV = kept_SV.masked_fill(kept_SV < floor(kept_SV), -math.inf)
        left_out_SV = torch.isneginf(kept_SV) & concerned_S[:, None]
        logits_SV = logits_SV.masked_fill(left_out_SV, -math.inf)
    return logits_SV


def _truncation(params: SamplingParams) -> Truncation:
    return params.top_k, params.top_p, params.min_p


def _floors(kind: Truncation, concerned_S: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yields a function for each rule, which gives the least logit [S, 1] that the rule keeps."""
    top_k, top_p, min_p = kind
    if top_k is not None:
        yield lambda scaled_SV: _best(scaled_SV, top_k)[:, -1:]
    if top_p is not None:
        yield lambda scaled_SV: _nucleus(scaled_SV, top_p, concerned_S)
    if min_p is not None:
        yield lambda scaled_SV: scaled_SV.amax(-1, keepdim=True) + math.log(min_p)


def _nucleus(scaled_SV: Tensor, top_p: float, concerned_S: Tensor) -> Tensor:
    """The least logit [S, 1] of the most probable tokens that together reach `top_p`, the one that crosses it included.

    Only so many of the best as are needed are sorted, because the whole vocabulary takes longer than the model.
    """
    totals_S1 = scaled_SV.logsumexp(-1, keepdim=True)
    count = FIRST_SORTED
    while True:
        best_SN = _best(scaled_SV, count)
        chances_SN = (best_SN - totals_S1).exp()
        inside_SN = chances_SN.cumsum(-1) - chances_SN < top_p
        inside_SN[:, 0] = True
        if count >= scaled_SV.shape[1] or not bool((inside_SN[:, -1] & concerned_S).any()):
            return best_SN.masked_fill(~inside_SN, math.inf).amin(-1, keepdim=True)
        count *= 16


def _best(scaled_SV: Tensor, count: int) -> Tensor:
    """The largest logits of each row in falling order, all if there are fewer."""
    return scaled_SV.topk(min(count, scaled_SV.shape[1])).values
