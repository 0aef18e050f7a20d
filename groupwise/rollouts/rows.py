"""From scored rollouts and their weights to the rows that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from groupwise.types import Group, Rollout, Row, Weight

Weights = tuple[Weight | None, ...]


def training_rows(groups: Sequence[Group], weights: Sequence[Weights]) -> list[Row]:
    """A row for each rollout that has a weight; the sampled ids go in verbatim."""
    return [
        _row(rollout, weight)
        for group, group_weights in zip(groups, weights, strict=True)
        for rollout, weight in zip(group.rollouts, group_weights, strict=True)
        if weight is not None
    ]


def with_advantages(group: Group, weights: Weights) -> Group:
    """The group with each rollout's advantage noted, for the record."""
    noted = [
        replace(rollout, advantage=weight.advantage if weight else None)
        for rollout, weight in zip(group.rollouts, weights, strict=True)
    ]
    return replace(group, rollouts=tuple(noted))


def _row(rollout: Rollout, weight: Weight) -> Row:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    temperatures: set[float] = set()
    for segment in rollout.segments:
        length = len(segment.token_ids)
        ids.extend(segment.token_ids)
        mask.extend([1 if segment.source == "policy" else 0] * length)
        logprobs.extend(segment.sampling_logprobs or [0.0] * length)
        if segment.params is not None:
            temperatures.add(segment.params.temperature)
    assert len(temperatures) == 1, f"one row, several temperatures: {sorted(temperatures)}"
    return Row(
        prompt_ids=rollout.prompt_ids,
        completion_ids=tuple(ids),
        mask=tuple(mask),
        sampling_logprobs=tuple(logprobs),
        advantage=weight.advantage,
        scale=weight.scale,
        temperature=temperatures.pop(),
    )
