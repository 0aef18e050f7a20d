"""Selects the tokens of a micro-batch for which the head computes something, and describes what it computes: log-probabilities, entropies,
the most likely tokens, the KL to a teacher.

Axes in addition to the usual ones: A completion tokens of all rows one after another, N the selected ones of them, K targets for one token,
H hidden size, X entries of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.core.types import Row


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


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Numbers per target (`Row.target_ids`), padded on the right; they are 0 for padding and for targets that were not requested."""

    logprobs_BT: Tensor
    entropies_BT: Tensor
    right_BT: Tensor | None = None
    """True where the token is the most likely one; None if not requested."""
    top_ids_BTX: Tensor | None = None
    """The X most likely tokens at each place, the most likely first; None if not requested."""
    top_logprobs_BTX: Tensor | None = None
    """Their log-probabilities."""
    teacher_kl_BT: Tensor | None = None
    """KL divergence (nats) from the policy to `ForwardOutputs.teacher`; carries the gradient. None if not requested."""
    distributions: Distributions | None = None
    """The distributions at the places that were requested, one row after another; then the other fields are empty."""


def distributions_at(
    rows: Sequence[Row],
    outputs: ForwardOutputs,
    states_AH: Tensor,
    head: Callable[[Tensor], Tensor],
) -> ForwardResult:
    """The distributions at the places that `outputs` wants, from the states before each completion token, and nothing else."""
    queried = query_tokens(rows, outputs, states_AH.device)
    empty_BT = torch.zeros(queried.places_BT.shape, device=states_AH.device)
    distributions = Distributions(states_AH[queried.among_A], head)
    return ForwardResult(empty_BT, empty_BT, distributions=distributions)


def compute_targets(
    rows: Sequence[Row],
    outputs: ForwardOutputs,
    device: torch.device,
    compute: Callable[[QueriedTokens], TokenNumbers],
) -> ForwardResult:
    """Numbers of all targets that `outputs` wants, in the padded shape; `compute` does them for some of the places."""
    queried = query_tokens(rows, outputs, device)
    result = queried.spread(compute(queried))
    if not outputs.untrained_logprobs:
        return result
    others_BT = real_places([len(row.target_ids) for row in rows], device) & ~queried.places_BT
    if not others_BT.any():
        return result
    with torch.no_grad():
        others = _query_places(rows, others_BT, DEFAULT_OUTPUTS)
        logprobs_BT = others.spread(compute(others)).logprobs_BT
    # Each place is 0 in one of the two.
    return replace(result, logprobs_BT=result.logprobs_BT + logprobs_BT)


@dataclass(frozen=True, slots=True)
class QueriedTokens:
    """The targets of rows for which numbers are wanted."""

    targets: Targets
    among_A: Tensor
    """Mask of their places among all completion tokens, one row after another."""
    places_BT: Tensor
    """Mask of these targets in the padded shape."""
    wanted_NK: Tensor | None = None
    """Mask of these targets among the K at each place of `targets`; None: there is one at each place."""

    def spread(self, numbers: TokenNumbers) -> ForwardResult:
        """The numbers of the targets in the padded shape, 0 elsewhere."""
        places_BT = self.places_BT
        empty_BT = torch.zeros(places_BT.shape, device=places_BT.device)
        wrong_BT = torch.zeros_like(places_BT)
        logprobs, entropies, right, top_ids, top_logprobs, teacher_kl = numbers
        if (wanted_NK := self.wanted_NK) is not None:
            logprobs = logprobs[wanted_NK]
            entropies = entropies[:, None].expand_as(wanted_NK)[wanted_NK]
            right = None if right is None else right[wanted_NK]
        return ForwardResult(
            empty_BT.masked_scatter(places_BT, logprobs),
            empty_BT.masked_scatter(places_BT, entropies),
            None if right is None else wrong_BT.masked_scatter(places_BT, right),
            None if top_ids is None else _spread_rows(places_BT, top_ids),
            None if top_logprobs is None else _spread_rows(places_BT, top_logprobs),
            None if teacher_kl is None else empty_BT.masked_scatter(places_BT, teacher_kl),
        )


def _spread_rows(places_BT: Tensor, values_NX: Tensor) -> Tensor:
    """A row of values at each of the marked places, 0 elsewhere, as [B, T, X]."""
    empty_BTX = values_NX.new_zeros((*places_BT.shape, values_NX.shape[1]))
    return empty_BTX.masked_scatter(places_BT[..., None], values_NX)


def query_tokens(
    rows: Sequence[Row], outputs: ForwardOutputs, device: torch.device
) -> QueriedTokens:
    """The targets for which `outputs` wants numbers."""
    real_BT = real_places([len(row.target_ids) for row in rows], device)
    places_BT = (
        pad_rows([row.mask for row in rows], device) != 0 if outputs.trained_only else real_BT
    )
    if not places_BT.any():  # backward needs some token, even if the gradient is 0
        places_BT = real_BT
    return _query_places(rows, places_BT, outputs)


def _query_places(rows: Sequence[Row], places_BT: Tensor, outputs: ForwardOutputs) -> QueriedTokens:
    """The targets at these places of the padded shape."""
    device = places_BT.device
    real_BT = real_places([len(row.target_ids) for row in rows], device)
    ids_BT = pad_rows([row.target_ids for row in rows], device)
    lengths_B = torch.tensor([len(row.completion_ids) for row in rows], device=device)
    temperatures_A = torch.tensor([row.temperature for row in rows], device=device)
    temperatures_A = temperatures_A.repeat_interleave(lengths_B)
    most = max(row.targets_per_token for row in rows)
    if most == 1:
        ids_N, among_A, wanted_NK = ids_BT[places_BT], places_BT[real_BT], None
    else:
        # Rows may differ in the number of targets for a token; those with fewer are padded here.
        counts_B = torch.tensor([row.targets_per_token for row in rows], device=device)
        counts_A1 = counts_B.repeat_interleave(lengths_B)[:, None]
        present_AK = torch.arange(most, device=device) < counts_A1
        ids_AK = torch.zeros(present_AK.shape, dtype=torch.long, device=device)
        ids_AK = ids_AK.masked_scatter(present_AK, ids_BT[real_BT])
        wanted_AK = torch.zeros_like(present_AK).masked_scatter(present_AK, places_BT[real_BT])
        among_A = wanted_AK.any(-1)
        ids_N, wanted_NK = ids_AK[among_A], wanted_AK[among_A]
    targets = Targets(ids_N, temperatures_A[among_A], _withheld_pairs(rows, among_A), outputs)
    return QueriedTokens(targets, among_A, places_BT, wanted_NK)


def _withheld_pairs(rows: Sequence[Row], among_A: Tensor) -> Tensor | None:
    """Pairs [X, 2] of the index of a wanted token, counted over all rows, and a token id that could not be drawn there."""
    if not any(row.withheld for row in rows):
        return None
    starts = accumulate((len(row.completion_ids) for row in rows), initial=0)
    pairs = [
        (start + index, token)
        for row, start in zip(rows, starts, strict=False)
        for span in row.withheld
        for index in range(span.start, span.end)
        for token in span.token_ids
    ]
    device = among_A.device
    pairs_X2 = torch.tensor(pairs, dtype=torch.long, device=device).reshape(-1, 2)
    places_X, ids_X = pairs_X2[among_A[pairs_X2[:, 0]]].unbind(1)
    return torch.stack((among_A.cumsum(0)[places_X] - 1, ids_X), dim=1)


def pad_rows(values: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    width = max(map(len, values))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in values], device=device)


def real_places(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Mask [B, T] of the places that are not padding, for rows of these lengths."""
    lengths_B = torch.tensor(lengths, device=device)
    return torch.arange(max(lengths), device=device) < lengths_B[:, None]


def _withheld_between(withheld_X2: Tensor | None, start: int, end: int) -> Tensor | None:
    """The pairs of a chunk, with indices counted from its start; None if it has none."""
    if withheld_X2 is None:
        return None
    places_X = withheld_X2[:, 0]
    inside_X2 = withheld_X2[(places_X >= start) & (places_X < end)]
    return inside_X2 - torch.tensor([start, 0], device=inside_X2.device) if len(inside_X2) else None
