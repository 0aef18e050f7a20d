"""Intervals: Wilson's against published values, the bootstrap against how often it holds the truth.

And the estimators of repeated sampling, against every choice of samples, by hand, and against what they estimate.
"""

import random
from itertools import combinations
from statistics import fmean

import pytest

from groupwise.training.evaluation import statistics
from groupwise.training.evaluation.statistics import (
    bootstrap_mean,
    majority,
    mean_with_interval,
    paired_difference,
    pass_at_k,
    wilson,
)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        (0.5, 10, 0.2366, 0.7634),
        (0.8, 10, 0.4902, 0.9433),
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
        (81 / 263, 263, 0.2553, 0.3662),  # Newcombe (1998), table I
        (15 / 148, 148, 0.0624, 0.1605),
        (0 / 20, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_values(share, count, low, high):
    found = wilson(share, count)
    assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)
    assert (found.value, found.count) == (share, count)
    assert (wilson(0.0, count).low, wilson(1.0, count).high) == (0.0, 1.0)


def test_pairs_take_the_difficulty_of_the_prompts_out():
    rng = random.Random(0)
    before = [rng.uniform(0, 10) for _ in range(50)]
    after = [value + 0.3 + rng.uniform(-0.1, 0.1) for value in before]
    found = paired_difference(before, after)
    assert 0.2 < found.low < found.value < found.high < 0.4
    assert found.value == pytest.approx(fmean(after) - fmean(before))
    apart = bootstrap_mean(after).high - bootstrap_mean(after).low
    assert found.high - found.low < apart / 10


@pytest.mark.parametrize("samples", [1, 4])
def test_success_over_prompts_is_covered(monkeypatch, samples):
    """Prompts of different difficulty, some samples of each: the interval holds the mean over all prompts there could be."""
    monkeypatch.setattr(statistics, "RESAMPLES", 200)
    rng, covered = random.Random(2), 0
    for _ in range(200):
        rates = [rng.betavariate(0.5, 1.0) for _ in range(40)]
        values = [fmean(rng.random() < rate for _ in range(samples)) for rate in rates]
        found = mean_with_interval(values)
        covered += found.low <= 1 / 3 <= found.high
    assert 0.88 <= covered / 200 <= 0.995


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_success(samples):
    for successes in range(samples + 1):
        outcomes = [index < successes for index in range(samples)]
        for k in range(1, samples + 1):
            choices = list(combinations(outcomes, k))
            wanted = sum(map(any, choices)) / len(choices)
            assert pass_at_k(samples, successes, k) == pytest.approx(wanted, abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plain_estimate_is_not():
    rng, rate, samples, k = random.Random(0), 0.3, 6, 4
    truth = 1 - (1 - rate) ** k
    wins = [sum(rng.random() < rate for _ in range(samples)) for _ in range(20_000)]
    error = 3 * 0.5 / len(wins) ** 0.5
    assert fmean(pass_at_k(samples, won, k) for won in wins) == pytest.approx(truth, abs=error)
    plain = fmean(1 - (1 - won / samples) ** k for won in wins)
    assert abs(plain - truth) > 2 * error, "the shortcut that this must not be"


@pytest.mark.parametrize(
    ("samples", "successes", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (0, 0, 1)]
)
def test_pass_at_k_refuses_impossible_counts(samples, successes, k):
    with pytest.raises(ValueError, match="cannot be"):
        pass_at_k(samples, successes, k)


@pytest.mark.parametrize(
    ("answers", "right", "value"),
    [
        (["7", "7", "8"], "7", 1.0),
        (["7", "8", "8"], "7", 0.0),
        (["7", "8"], "7", 0.5),  # a tie, broken by lot
        (["7", "8", "9"], "7", 1 / 3),
        (["7", "7", "8", "8", "9"], "9", 0.0),
        (["7", None, None], "7", 1.0),  # None has no vote
        ([None, None], "7", 0.0),
    ],
)
def test_majority_by_hand(answers, right, value):
    won = [answer == right for answer in answers]
    assert majority(answers, won) == pytest.approx(value)
    assert majority(["7", "7", "7", "8"], [True, True, False, False]) == pytest.approx(2 / 3)
    assert majority(answers[::-1], won[::-1]) == pytest.approx(value), "order plays no part"
