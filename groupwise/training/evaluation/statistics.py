"""Confidence intervals: by bootstrap for means and paired differences, Wilson's for proportions.

Also the estimators of repeated sampling: `pass_at_k`, and `majority` for the vote of several answers. An observation is always a
prompt: samples of the same prompt are correlated, and counting each would make every interval too narrow.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
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
    """Number of observations."""

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean with its percentile bootstrap interval (Efron 1979); NaN for no values."""
    if not values:
        return Interval(math.nan, math.nan, math.nan, 0)
    return _bootstrap(tuple(values), seed, RESAMPLES)


@lru_cache(maxsize=64)  # the same summary is computed for the file and for the terminal
def _bootstrap(values: tuple[float, ...], seed: int, resamples: int) -> Interval:
    generator, count = random.Random(seed), len(values)
    means = sorted(fmean(generator.choices(values, k=count)) for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]
    return Interval(fmean(values), low, high, count)


def mean_with_interval(values: Sequence[float]) -> Interval:
    """The mean of one value per prompt: with Wilson's interval if all values are 0 or 1, otherwise by bootstrap.

    If all prompts succeeded, a bootstrap interval would have no width, as if the next prompt were certain to succeed.
    """
    if values and all(value in (0.0, 1.0) for value in values):
        return wilson(fmean(values), len(values))
    return bootstrap_mean(values)


def interval_at_once(values: Sequence[float], *, share: bool) -> Interval:
    """The mean of one value per prompt: with Wilson's interval if all are 0 or 1, otherwise the normal one, clipped to 0 … 1 for shares.

    Faster than `mean_with_interval`, for pages with many intervals; summaries use that function.
    """
    if len(values) < 2 or all(value in (0.0, 1.0) for value in values):
        return mean_with_interval(values)
    half, mean = Z95 * stdev(values) / math.sqrt(len(values)), fmean(values)
    low, high = (0.0, 1.0) if share else (-math.inf, math.inf)
    return Interval(mean, max(low, mean - half), min(high, mean + half), len(values))


def paired_difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Interval:
    """Mean of after − before over the same prompts, bootstrapped over the pairs."""
    return bootstrap_mean([b - a for a, b in zip(before, after, strict=True)], seed)


def welch_difference(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Mean of `after` less mean of `before`, of different prompts: the normal interval with unequal variances (Welch). None if fewer than
    two values on a side, or no variance at all, leave nothing to tell its width by.
    """
    if min(len(before), len(after)) < 2:
        return None
    error = math.sqrt(stdev(before) ** 2 / len(before) + stdev(after) ** 2 / len(after))
    value = fmean(after) - fmean(before)
    half = Z95 * error
    return Interval(value, value - half, value + half, len(before) + len(after)) if error else None


def wilson(share: float, count: int) -> Interval:
    """A share of `count` trials with Wilson's score interval (1927)."""
    centre = (share + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    half = (
        Z95
        / (1 + Z95**2 / count)
        * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    )
    low = 0.0 if share <= 0 else max(0.0, centre - half)  # both ends are exact despite rounding
    high = 1.0 if share >= 1 else min(1.0, centre + half)
    return Interval(share, low, high, count)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The probability that at least one of `k` samples succeeds, estimated without bias from `successes` of `samples`.

    1 − C(samples − successes, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374). Raises ValueError if k is above `samples`, because
    no unbiased estimate exists.
    """
    if not 0 <= successes <= samples:
        raise ValueError(f"{successes} successes of {samples} samples cannot be")
    if not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} cannot be estimated from {samples} samples; k is 1 to {samples}"
        )
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], successes: Sequence[bool]) -> float:
    """1 or 0 if the most frequent answer is right or wrong; the mean over the tied answers if there is a tie.

    That mean is the expected result of breaking the tie at random. An answer is as right as the samples that gave it, on average (a reward
    may judge more than the answer). None means no answer, and does not vote; without votes, the result is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    max_votes = max(votes.values())
    return fmean(
        fmean(success for vote, success in zip(answers, successes, strict=True) if vote == answer)
        for answer, count in votes.items()
        if count == max_votes
    )
