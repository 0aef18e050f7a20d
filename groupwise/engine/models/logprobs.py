"""Log-probabilities and entropies of given tokens, and whether they are the most likely, without holding the logits of a whole batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.native.facts import CHUNK

NEVER = -1e30
"""Replaces the logit of a token with probability 0. Unlike -inf it gives no NaN in the entropy and its gradient."""


class TokenNumbers(NamedTuple):
    """Numbers of each target, in the order of the targets. [N, K] where each of N places has K targets; entropies are always [N]."""

    logprobs_N: Tensor
    """Nats; carries the gradient."""
    entropies_N: Tensor
    """Nats; entropy of the distribution from which the target was drawn."""
    right_N: Tensor | None
    """True if the target is the most likely token, or the first of several equally likely ones; None if not requested."""
    top_ids_NX: Tensor | None = None
    """The X most likely tokens at each place, the most likely first, without gradient; None if not requested."""
    top_logprobs_NX: Tensor | None = None
    """Their log-probabilities (nats)."""


def token_logprobs(
    decoder: Decoder,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    entropy_gradient: bool = False,
    accuracy: bool = False,
    withheld_X2: Tensor | None = None,
    top: int = 0,
) -> TokenNumbers:
    """The numbers of the targets, [N] or [N, K], at the temperatures.

    `accuracy` also finds out whether each target is the most likely token, which costs a search. `withheld_X2` has pairs of an index in N
    and a token whose probability there is 0. `top` is the number of most likely tokens wanted at each place. Entropies have a gradient only
    on request, because that costs another pass over the logits. Chunks of logits are recomputed in the backward pass instead of being kept.
    """
    parts: list[TokenNumbers] = []
    for start in range(0, len(targets_N), CHUNK):
        part = slice(start, start + CHUNK)
        arguments = (
            decoder,
            hidden_NH[part],
            targets_N[part],
            temperatures_N[part],
            entropy_gradient,
            accuracy,
            withheld_between(withheld_X2, start, start + CHUNK),
            top,
        )
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk_numbers, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk_numbers(*arguments))
    logprobs, entropies, right, top_ids, top_logprobs = zip(*parts, strict=True)
    return TokenNumbers(
        torch.cat(logprobs),
        torch.cat(entropies),
        torch.cat(right) if accuracy else None,
        torch.cat(top_ids) if top else None,
        torch.cat(top_logprobs) if top else None,
    )


def withheld_between(withheld_X2: Tensor | None, start: int, end: int) -> Tensor | None:
    """The pairs of a chunk, with indices counted from its start; None if it has none."""
    if withheld_X2 is None:
        return None
    places_X = withheld_X2[:, 0]
    inside_X2 = withheld_X2[(places_X >= start) & (places_X < end)]
    return inside_X2 - torch.tensor([start, 0], device=inside_X2.device) if len(inside_X2) else None


def _chunk_numbers(
    decoder: Decoder,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    entropy_gradient: bool,
    accuracy: bool,
    withheld_X2: Tensor | None,
    top: int,
) -> TokenNumbers:
    scaled_NV = decoder.logits(hidden_NH) / temperatures_N[:, None]
    if withheld_X2 is not None:
        known_X2 = withheld_X2[withheld_X2[:, 1] < scaled_NV.shape[1]]
        scaled_NV[known_X2[:, 0], known_X2[:, 1]] = NEVER
    normaliser_N = scaled_NV.logsumexp(-1)
    targets_NK = targets_N if targets_N.ndim == 2 else targets_N[:, None]
    chosen_N = (scaled_NV.gather(1, targets_NK) - normaliser_N[:, None]).view_as(targets_N)
    # The backward pass needs nothing computed below, so it does not recompute it (except an entropy with gradient).
    right_N = (scaled_NV.argmax(-1)[:, None] == targets_NK).view_as(targets_N) if accuracy else None
    best: tuple[Tensor | None, Tensor | None] = (None, None)
    if top:
        top_NX, top_ids_NX = scaled_NV.detach().topk(top, -1)
        best = (top_ids_NX, top_NX - normaliser_N.detach()[:, None])
    if entropy_gradient:
        probabilities_NV = (scaled_NV - normaliser_N[:, None]).exp()
        entropy_N = normaliser_N - (probabilities_NV * scaled_NV).sum(-1)
        return TokenNumbers(chosen_N, entropy_N, right_N, *best)
    with torch.no_grad():
        probabilities_NV = (scaled_NV - normaliser_N[:, None]).exp_()
        entropy_N = normaliser_N - probabilities_NV.mul_(scaled_NV).sum(-1)
    return TokenNumbers(chosen_N, entropy_N, right_N, *best)
