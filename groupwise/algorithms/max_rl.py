"""MaxRL, maximum-likelihood reinforcement learning: https://arxiv.org/abs/2602.02710.

    A_i  = (r_i − mean(r)) / mean(r)
    loss = 1/(Σ_i |o_i|) · Σ_i Σ_t −min(ratio · A_i, clip(ratio) · A_i)

The gradient of log p, where p is the chance that an attempt succeeds, is that of p divided by p. Dividing centred rewards by the group's
mean does the same with the estimate of p: in expectation it is the gradient of the first G − 1 terms of log p = −Σ_k (1 − p)^k / k, where G
is the size of the group. A prompt that is seldom solved then weighs about 1/p. With G = 2 only the gradient of p is left, that of
REINFORCE; a large G comes close to maximum likelihood. The advantages are those of prime-rl's `max_rl`.

Assumes rewards that are 0 or 1; others should at least not be negative, because a mean near 0 makes advantages large.

Degenerate cases: equal rewards give advantage exactly 0, and so does a group whose mean is 0 or less. One success in a group of G has the
advantage G − 1. A failed member is in no mean and no denominator. The tokens of a masked truncated member are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from groupwise.algorithms.advantages import Advantages, centred, scored_rewards, to_members
from groupwise.algorithms.clipped import Clipped
from groupwise.core.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRl(Clipped):
    """Centred advantages divided by the group's mean, mean over the tokens of the step."""

    name: ClassVar[str] = "max_rl"

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Relative to the group's mean."""
        return to_members(groups, [relative_to_mean(scored_rewards(group)) for group in groups])


def relative_to_mean(rewards: Sequence[float]) -> list[float]:
    """Each reward's distance from the mean as a share of the mean; 0 if they are tied, or the mean is not positive."""
    differences = centred(rewards)
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    return [difference / mean if mean > 0 else 0.0 for difference in differences]
