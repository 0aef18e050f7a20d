"""Confidence intervals: bootstrapped for means and paired differences, Wilson's for shares.

And the estimators of repeated sampling: `pass_at_k`, and `majority` for the vote of several answers. An observation is always a
prompt: samples of the same prompt are alike, and counting each of them would make every interval too narrow.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

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
    return _bootstrap(tuple(values), seed, RESAMPLES)


@lru_cache(maxsize=64)  # a summary is written to the file and to the terminal
def _bootstrap(values: tuple[float, ...], seed: int, resamples: int) -> Interval:
    generator, count = random.Random(seed), len(values)
    means = sorted(fmean(generator.choices(values, k=count)) for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]
    return Interval(fmean(values), low, high, count)


def mean_with_interval(values: Sequence[float]) -> Interval:
    """The mean of one value for each prompt: Wilson's interval where all are 0 or 1, else bootstrapped.

    The bootstrap of prompts that all succeeded would be sure that the next one does, too.
    """
    if values and all(value in (0.0, 1.0) for value in values):
        return wilson(fmean(values), len(values))
    return bootstrap_mean(values)


def interval_at_once(values: Sequence[float], *, share: bool) -> Interval:
    """The mean of one value for each prompt: Wilson's interval where all are 0 or 1, else the normal one, of a share within 0 and 1.

    For pages with many of them; a summary takes the time for `mean_with_interval`.
    """
    if len(values) < 2 or all(value in (0.0, 1.0) for value in values):
        return mean_with_interval(values)
    half, mean = Z95 * stdev(values) / math.sqrt(len(values)), fmean(values)
    low, high = (0.0, 1.0) if share else (-math.inf, math.inf)
    return Interval(mean, max(low, mean - half), min(high, mean + half), len(values))


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
    low = 0.0 if share <= 0 else max(0.0, centre - half)  # both ends exact, in spite of rounding
    high = 1.0 if share >= 1 else min(1.0, centre + half)
    return Interval(share, low, high, count)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The chance that at least one of `k` samples succeeds, estimated without bias from `successes` of `samples`.

    1 − C(samples − successes, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374). ValueError for k above `samples`: no
    unbiased estimate exists.
    """
    if not 0 <= successes <= samples:
        raise ValueError(f"{successes} successes of {samples} samples cannot be")
    if not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} cannot be estimated from {samples} samples; k is 1 to {samples}"
        )
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], successes: Sequence[bool]) -> float:
    """1 or 0 if the answer that most samples gave is right or wrong; the chance of it if the vote is tied.

    A tie counts as the mean over the tied answers, which is what breaking it by lot gives on average. An answer is as right as the
    samples that gave it (a reward may judge more than the answer). None is no answer and has no vote; no votes at all are 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    return fmean(
        fmean(won for given, won in zip(answers, successes, strict=True) if given == answer)
        for answer, count in votes.items()
        if count == most
    )
