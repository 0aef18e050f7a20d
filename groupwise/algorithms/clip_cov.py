"""Clip-Cov, of "The entropy mechanism of reinforcement learning": https://arxiv.org/abs/2505.22617.

    A_i    = (r_i − mean(r)) / (std(r) + 1e-4)
    cov_t  = (A_t − mean(A)) · (log-probability_t − mean(log-probability))       means over the trained tokens of the step
    chosen = clip_cov_ratio of the tokens, at random among those with clip_cov_low < cov_t < clip_cov_high
    loss   = 1/(Σ_i |o_i|) · Σ_i Σ_t −min(ratio · A_t, clip(ratio) · A_t), without the chosen tokens

The covariance of log-probability and advantage lowers a policy's entropy: likely tokens that do better than the mean, and unlikely ones
that do worse. A few tokens account for nearly all of it. Their gradient is left out, so that entropy lasts longer.

Differences to verl's `clip_cov`: the tokens are chosen once a step by the log-probabilities that the sampler reported, which are the
policy's before the first update, so that the choice does not depend on how the rows are cut into batches; there they are chosen again in
each mini-batch, and never among tokens that PPO's clip has stopped. And the choice is random by a token's draw, member and place, so that a
resumed step makes the same.

Assumes a step of many tokens: at least one is chosen if any lies between the bounds.

Degenerate cases: those of `grpo`. Chosen tokens count in the denominator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from groupwise.algorithms.clipped import Clipped
from groupwise.algorithms.group_relative import ScaledRewards
from groupwise.algorithms.knobs import SCALE_REWARDS, KnobConflict, ScaleRewards
from groupwise.core.types import Group, Rollout, RolloutCredit

Place: TypeAlias = tuple[int, int, int]
"""Draw, member, and the number of the token among those that the policy wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(ScaledRewards, Clipped):
    """No gradient for a few of the tokens that lower the entropy most, mean over the tokens of the step."""

    name: ClassVar[str] = "clip_cov"

    clip_cov_ratio: float = field(
        default=2e-4,
        metadata={
            "description": "Share of the step's trained tokens whose gradient is left out.",
            "gt": 0.0,
            "le": 1.0,
        },
    )
    clip_cov_low: float = field(
        default=1.0,
        metadata={"description": "Only tokens whose covariance is above this are left out."},
    )
    clip_cov_high: float = field(
        default=5.0,
        metadata={"description": "Only tokens whose covariance is below this are left out."},
    )
    scale_rewards: ScaleRewards = field(default="group", metadata=SCALE_REWARDS)

    def conflicts(self) -> Iterator[KnobConflict]:
        """Also yield bounds between which no token lies."""
        yield from Clipped.conflicts(self)
        if self.clip_cov_low >= self.clip_cov_high:
            yield KnobConflict(
                f"{self.name}.clip_cov_low is {self.clip_cov_low:g}; it must be below clip_cov_high, which is {self.clip_cov_high:g}.",
                ("clip_cov_low", "clip_cov_high"),
            )

    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        """The advantage of each rollout, and of its tokens, where it is 0 for the chosen ones."""
        credits = Clipped.credits(self, groups)
        covariances = token_covariances(groups, credits)
        within = [
            place
            for place, covariance in covariances.items()
            if self.clip_cov_low < covariance < self.clip_cov_high
        ]
        count = max(1, int(self.clip_cov_ratio * len(covariances)))
        return zero_advantages(groups, credits, frozenset(sorted(within, key=_shuffled)[:count]))


def token_covariances(
    groups: Sequence[Group], credits: Sequence[Sequence[RolloutCredit | None]]
) -> dict[Place, float]:
    """(A − mean(A)) · (log-probability − mean(log-probability)) of each trained token of the step, in whichever order they come."""
    trained = [
        (rollout, credit, _logprobs(rollout))
        for group, of_group in zip(groups, credits, strict=True)
        for rollout, credit in zip(group.rollouts, of_group, strict=True)
        if credit is not None
    ]
    count = sum(len(values) for _, _, values in trained)
    if count == 0:
        return {}
    mean_logprob = math.fsum(value for _, _, values in trained for value in values) / count
    mean_advantage = (
        math.fsum(credit.advantage * len(values) for _, credit, values in trained) / count
    )
    return {
        (rollout.draw, rollout.member, number): (credit.advantage - mean_advantage)
        * (value - mean_logprob)
        for rollout, credit, values in trained
        for number, value in enumerate(values)
    }


def zero_advantages(
    groups: Sequence[Group],
    credits: Sequence[Sequence[RolloutCredit | None]],
    chosen: frozenset[Place],
) -> tuple[tuple[RolloutCredit | None, ...], ...]:
    """The credits with an advantage for each token, which is 0 for the chosen ones."""
    return tuple(
        tuple(
            credit and _without(rollout, credit, chosen)
            for rollout, credit in zip(group.rollouts, of_group, strict=True)
        )
        for group, of_group in zip(groups, credits, strict=True)
    )


def _without(rollout: Rollout, credit: RolloutCredit, chosen: frozenset[Place]) -> RolloutCredit:
    advantages = tuple(
        0.0 if (rollout.draw, rollout.member, number) in chosen else credit.advantage
        for number in range(rollout.written)
    )
    return replace(credit, token_advantages=advantages)


def _logprobs(rollout: Rollout) -> list[float]:
    """The sampler's log-probabilities of the tokens that the policy wrote."""
    return [
        value
        for segment in rollout.segments
        if segment.source == "policy"
        for value in segment.sampling_logprobs or ()
    ]


def _shuffled(place: Place) -> bytes:
    """A key by which places are in random order."""
    return hashlib.blake2b(repr(place).encode(), digest_size=16).digest()
