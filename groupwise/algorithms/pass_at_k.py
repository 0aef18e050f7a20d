"""Pass@k training: the chance that the best of k attempts succeeds, https://arxiv.org/abs/2508.10751 and https://arxiv.org/abs/2505.15201.

With a group of n attempts and their rewards r, let S be a set of k of them, and M the mean of max(r of S) over all sets:

    baseline mean            A_i = ( mean over the sets with i of max(r of S) − M ) / ( std of max(r of S) over all sets + 1e-6 )
    baseline leave_one_out   A_i = mean over the sets with i of ( max(r of S) − max(r of S without i) )
    loss = 1/(Σ_i |o_i|) · Σ_i Σ_t −min(ratio · A_i, clip(ratio) · A_i)

Training for the mean reward makes a policy surer of what it already does; training for the best of k also rewards attempts that seldom
succeed, so it explores more. No sets are drawn: the means over all sets are computed exactly.

`mean` are the analytic advantages of Chen et al. (2508.10751), which for rewards of 0 and 1 are, with c successes,
ρ = 1 − C(n−c, k) / C(n, k) and σ = √(ρ(1 − ρ)): (1 − ρ)/σ for a success and (1 − ρ − C(n−c−1, k−1) / C(n−1, k−1))/σ otherwise.
`leave_one_out` is the estimator of Walder and Karkhanis (2505.15201), unbiased for any reward and never negative; with k = n it
is the best reward less the second best, for the best attempt alone, as in verl's `grpo_passk` without its division
(https://arxiv.org/abs/2503.19595).

Assumes k of at most n; a group with fewer scored members than k takes all of them as the one set.

Degenerate cases: equal rewards, and a group of one, give advantage exactly 0; with `mean`, so does every group whose sets all contain a
success, because nothing is left to gain. Failed members are in no set and no denominator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal, TypeAlias

from groupwise.algorithms.advantages import Advantages, all_equal, scored_rewards, to_members
from groupwise.algorithms.clipped import Clipped
from groupwise.core.types import Group

Baseline: TypeAlias = Literal["mean", "leave_one_out"]

STD_EPSILON = 1e-6
"""Added to the standard deviation of the best of k before dividing by it, as the paper's code does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK(Clipped):
    """The advantage of an attempt for the best of k, mean over the tokens of the step."""

    name: ClassVar[str] = "pass_at_k"

    k: int = field(
        default=4,
        metadata={
            "description": "Attempts of which the best counts; at most training.num_generations. 1: the mean reward.",
            "ge": 1,
        },
    )
    baseline: Baseline = field(
        default="mean",
        metadata={
            "description": "What the best of k with an attempt is compared with. mean: with the mean over all sets of k, divided by their "
            "spread. leave_one_out: with the best of the same set without the attempt.",
        },
    )

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """What each attempt adds to the best of k attempts of its group."""
        return to_members(
            groups, [best_of_k(scored_rewards(group), self.k, self.baseline) for group in groups]
        )


def best_of_k(rewards: Sequence[float], k: int, baseline: Baseline) -> list[float]:
    """The advantages at the top of this module, in the order of the rewards."""
    count, k = len(rewards), min(k, len(rewards))
    if all_equal(rewards):
        return [0.0] * count
    ordered = sorted(rewards)
    with_it = _best_with(ordered, k)
    if baseline == "leave_one_out":
        values = [
            best - other for best, other in zip(with_it, _best_of_others(ordered, k), strict=True)
        ]
    else:
        if all_equal(with_it):
            return [0.0] * count
        mean = math.fsum(with_it) / count
        variance = math.fsum(
            chance * (reward - mean) ** 2
            for chance, reward in zip(_chance_of_best(count, k), ordered, strict=True)
        )
        values = [(best - mean) / (math.sqrt(variance) + STD_EPSILON) for best in with_it]
    by_reward = dict(zip(ordered, _equal_for_equal(ordered, values), strict=True))
    return [by_reward[reward] for reward in rewards]


def _chance_of_best(count: int, k: int) -> list[float]:
    """For each place in the order, the chance that it is the highest of a set of k."""
    total = math.comb(count, k)
    return [math.comb(place, k - 1) / total for place in range(count)]


def _best_with(ordered: Sequence[float], k: int) -> list[float]:
    """For each place, the mean of the best reward over the sets of k that contain it: its own, or that of a higher place."""
    count = len(ordered)
    if k == 1:
        return list(ordered)
    total = math.comb(count - 1, k - 1)
    # Of the sets that contain a lower place, so many have their best at this place: k − 2 others are below it.
    shares = [math.comb(place - 1, k - 2) / total if place else 0.0 for place in range(count)]
    beyond = [
        *accumulate(
            (s * r for s, r in zip(reversed(shares), reversed(ordered), strict=True)), initial=0.0
        )
    ]
    return [
        math.comb(place, k - 1) / total * reward + beyond[count - 1 - place]
        for place, reward in enumerate(ordered)
    ]


def _best_of_others(ordered: Sequence[float], k: int) -> list[float]:
    """For each place, the mean of the best reward over the sets of k − 1 of the other places; 0 if k is 1."""
    if k == 1:
        return [0.0] * len(ordered)
    chances = _chance_of_best(len(ordered) - 1, k - 1)
    return [
        math.fsum(
            chance * reward
            for chance, reward in zip(
                chances, (*ordered[:place], *ordered[place + 1 :]), strict=True
            )
        )
        for place in range(len(ordered))
    ]


def _equal_for_equal(ordered: Sequence[float], values: Sequence[float]) -> Iterator[float]:
    """The values, where equal rewards have exactly the same one: that of the first of them."""
    for place, value in enumerate(values):
        first = ordered.index(ordered[place])
        yield values[first] if first != place else value
