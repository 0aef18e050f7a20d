"""Log-probabilities and entropies of given tokens, without ever holding the logits of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groupwise.models.decoder import Decoder

CHUNK = 256
"""Rows of logits held at a time: 50 MB in float32 for a vocabulary of 49,152."""


def token_logprobs(
    decoder: Decoder,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] (nats, with gradient) and entropies [N] (nats) of the targets at the temperatures.

    Entropies have a gradient where one is asked for, because it costs another pass over the logits. Chunks of logits are
    recomputed in the backward pass instead of being kept.
    """
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, len(targets_N), CHUNK):
        part = slice(start, start + CHUNK)
        arguments = (
            decoder,
            hidden_NH[part],
            targets_N[part],
            temperatures_N[part],
            entropy_gradient,
        )
        if torch.is_grad_enabled():
            chosen, entropy = checkpoint(_chunk, *arguments, use_reentrant=False)
        else:
            chosen, entropy = _chunk(*arguments)
        logprobs.append(chosen)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    decoder: Decoder,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    scaled_NV = decoder.logits(hidden_NH) / temperatures_N[:, None]
    normaliser_N = scaled_NV.logsumexp(-1)
    chosen_N = scaled_NV.gather(1, targets_N[:, None])[:, 0] - normaliser_N
    if entropy_gradient:
        probabilities_NV = (scaled_NV - normaliser_N[:, None]).exp()
        return chosen_N, normaliser_N - (probabilities_NV * scaled_NV).sum(-1)
    with torch.no_grad():
        probabilities_NV = (scaled_NV - normaliser_N[:, None]).exp_()
        entropy_N = normaliser_N - probabilities_NV.mul_(scaled_NV).sum(-1)
    return chosen_N, entropy_N
