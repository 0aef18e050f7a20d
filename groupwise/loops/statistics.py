"""How sure a number is: bootstrap intervals for means and paired differences, Wilson's for shares."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

RESAMPLES = 2000
Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int
    """Observations behind it."""

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean with its percentile bootstrap interval (Efron 1979); NaN for no values."""
    if not values:
        return Interval(math.nan, math.nan, math.nan, 0)
    generator = random.Random(seed)
    means = sorted(fmean(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Interval(
        fmean(values), means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1], len(values)
    )


def paired_difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Interval:
    """Mean of after − before over the same prompts, bootstrapped over the pairs."""
    return bootstrap_mean([b - a for a, b in zip(before, after, strict=True)], seed)


def wilson(share: float, count: int) -> Interval:
    """A share of `count` trials with Wilson's score interval (1927)."""
    centre = (share + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    half = (
        Z95
        / (1 + Z95**2 / count)
        * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    )
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half), count)
