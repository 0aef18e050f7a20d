"""Changes rows of logits as their requests say: penalties, biases, and tokens that a schema rules out; and reads the most probable tokens.

Only rows whose request has a `groupwise.core.types.LogitsProcessing` are touched, each by itself, in float32: the others keep every bit.
Where no row has one, nothing here is computed. What a row may draw depends on its own tokens alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from groupwise.core.types import LogitsProcessing, TopLogprobs


class TokenMask(Protocol):
    """Decides which tokens may come next in one completion."""

    def exclude(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that may not come next to -inf, in place."""
        ...

    def advance(self, token: int) -> None:
        """The completion goes on with this token."""
        ...


def process_row(
    logits_V: Tensor,
    processing: LogitsProcessing,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    mask: TokenMask | None,
    shift: float,
) -> None:
    """Change the logits of one row, in place. `token_ids` are those of the completion so far; see `DecodeEngine.shift`."""
    if mask is not None:
        mask.exclude(logits_V)
    device = logits_V.device
    if processing.logit_bias:
        tokens, biases = zip(*processing.logit_bias, strict=True)
        logits_V.index_add_(
            0,
            torch.tensor(tokens, device=device),
            torch.tensor(biases, device=device, dtype=logits_V.dtype),
        )
    if processing.repetition_penalty != 1:
        seen_X = torch.tensor(sorted({*prompt_ids, *token_ids}), device=device)
        chosen_X = logits_V[seen_X] + shift  # its sign decides, so it must be the model's own
        penalty = processing.repetition_penalty
        lowered_X = torch.where(chosen_X > 0, chosen_X / penalty, chosen_X * penalty)
        logits_V[seen_X] = lowered_X - shift
    if token_ids and (processing.frequency_penalty or processing.presence_penalty):
        counts = Counter(token_ids)
        drawn_X = torch.tensor([*counts], device=device)
        counts_X = torch.tensor([*counts.values()], device=device, dtype=logits_V.dtype)
        logits_V[drawn_X] -= processing.frequency_penalty * counts_X + processing.presence_penalty


def top_logprobs(
    logits_V: Tensor, temperature: float, token: int, logprob: float, count: int
) -> TopLogprobs:
    """The `count` most probable tokens of a row after all that excludes tokens; fewer if no others can be drawn.

    They are measured from the token that was drawn, whose log-probability is known, so that it has the same number wherever it stands.
    At temperature 0 they are those at temperature 1.
    """
    best = logits_V.float().topk(min(count, len(logits_V)))
    above_X = (best.values - logits_V[token].float()) / (temperature or 1.0)
    logprobs = (above_X.double() + logprob).tolist()
    tokens = best.indices.tolist()
    return tuple(
        (token, value) for token, value in zip(tokens, logprobs, strict=True) if value > -math.inf
    )


def prompt_logprobs(
    logits_TV: Tensor, token_ids: Sequence[int], count: int
) -> tuple[list[float], list[TopLogprobs]]:
    """The log-probability of each row's token, and the `count` most probable tokens of each row (none for 0)."""
    logprobs_TV = logits_TV.float().log_softmax(-1)
    ids_T1 = torch.tensor(token_ids, device=logits_TV.device)[:, None]
    logprobs = logprobs_TV.gather(1, ids_T1)[:, 0].tolist()
    if not count:
        return logprobs, []
    best = logprobs_TV.topk(min(count, logprobs_TV.shape[1]))
    return logprobs, [
        tuple(zip(tokens, values, strict=True))
        for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
