"""The places of a micro-batch for which a head computes numbers, which numbers are wanted, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Distributions:
    """A model's distributions over the next token at N places."""

    hidden_NH: Tensor
    logits: Callable[[Tensor], Tensor]
    """The model's head: from hidden states to float32 logits [.., V]."""


@dataclass(frozen=True, slots=True)
class ForwardOutputs:
    """Optional outputs of a forward pass, which cost extra, and the tokens to compute."""

    entropy_gradient: bool = False
    """Entropies with a gradient: another pass over the logits."""
    accuracy: bool = False
    """Mark tokens that are the most likely ones: a search through the logits."""
    trained_only: bool = False
    """Leave out tokens outside their row's mask: no loss uses them, and logits are a large part of a token's cost."""
    untrained_logprobs: bool = False
    """Set with `trained_only`: the log-probabilities outside the masks as well, from the same hidden states, without a gradient."""
    top: int = 0
    """So many most likely tokens at each place; only for rows without several targets for a token."""
    distributions: bool = False
    """Nothing but the distributions at the places."""
    teacher: Distributions | None = None
    """Set with `trained_only`: what another model says at the same places, to which the KL divergence is wanted."""


DEFAULT_OUTPUTS = ForwardOutputs()


@dataclass(frozen=True, slots=True)
class Targets:
    """Places to compute numbers for, of all rows one after another, and the numbers that are wanted."""

    ids_N: Tensor
    """The token at each place; [N, K] for K tokens at each place, and then their numbers have this shape, too."""
    temperatures_N: Tensor
    withheld_X2: Tensor | None
    """Pairs of an index in N and a token id that could not be drawn there."""
    outputs: ForwardOutputs = DEFAULT_OUTPUTS

    def part(self, start: int, end: int) -> Targets:
        """The targets from `start` to `end`, with indices counted from `start`."""
        return Targets(
            self.ids_N[start:end],
            self.temperatures_N[start:end],
            _withheld_between(self.withheld_X2, start, end),
            self.outputs,
        )


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
    teacher_kl_N: Tensor | None = None
    """KL divergence (nats) to a teacher's distribution, with gradient; None if not requested."""


def _withheld_between(withheld_X2: Tensor | None, start: int, end: int) -> Tensor | None:
    """The pairs of a chunk, with indices counted from its start; None if it has none."""
    if withheld_X2 is None:
        return None
    places_X = withheld_X2[:, 0]
    inside_X2 = withheld_X2[(places_X >= start) & (places_X < end)]
    return inside_X2 - torch.tensor([start, 0], device=inside_X2.device) if len(inside_X2) else None
