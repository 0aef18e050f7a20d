"""Intervals: Wilson's against published values, the bootstrap against how often it holds the truth."""

import math
import random
from statistics import fmean

import pytest

from groupwise.loops import statistics
from groupwise.loops.statistics import bootstrap_mean, paired_difference, wilson


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


def test_a_share_of_1_with_rounding_is_no_trouble():
    assert wilson(sum([0.1] * 10) + 2e-16, 5).high == 1.0


def test_the_bootstrap_is_the_same_for_the_same_seed():
    chance = random.Random(1)
    values = [chance.gauss(0, 1) for _ in range(30)]
    assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3)
    assert bootstrap_mean(values, seed=3) != bootstrap_mean(values, seed=4)


def test_its_interval_is_that_of_the_mean():
    chance = random.Random(1)
    values = [chance.gauss(5, 2) for _ in range(400)]
    found = bootstrap_mean(values)
    assert found.value == fmean(values)
    wanted = 1.96 * statistics.fmean((v - fmean(values)) ** 2 for v in values) ** 0.5 / 20
    assert found.high - found.value == pytest.approx(wanted, rel=0.15)
    assert found.value - found.low == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("draw", [random.Random.random, lambda chance: chance.expovariate(1)])
def test_it_holds_the_truth_about_as_often_as_it_says(monkeypatch, draw):
    monkeypatch.setattr(statistics, "RESAMPLES", 200)
    chance, truth = random.Random(0), 0.5 if draw is random.Random.random else 1.0
    intervals = [bootstrap_mean([draw(chance) for _ in range(40)], seed) for seed in range(200)]
    covered = fmean(each.low <= truth <= each.high for each in intervals)
    assert 0.88 <= covered <= 0.99


def test_pairs_take_the_difficulty_of_the_prompts_out():
    chance = random.Random(0)
    before = [chance.uniform(0, 10) for _ in range(50)]
    after = [value + 0.3 + chance.uniform(-0.1, 0.1) for value in before]
    found = paired_difference(before, after)
    assert 0.2 < found.low < found.value < found.high < 0.4
    assert found.value == pytest.approx(fmean(after) - fmean(before))
    apart = bootstrap_mean(after).high - bootstrap_mean(after).low
    assert found.high - found.low < apart / 10


def test_the_same_change_everywhere_is_certain():
    found = paired_difference([1.0, 2.0, 3.0], [1.5, 2.5, 3.5])
    assert (found.low, found.value, found.high) == (0.5, 0.5, 0.5)


def test_nothing_observed_is_no_number():
    found = bootstrap_mean([])
    assert all(math.isnan(value) for value in (found.value, found.low, found.high))
    assert found.count == 0


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], [1.0, 2.0])


def test_it_reads_well():
    assert str(wilson(0.5, 10)) == "0.500 [0.237, 0.763]"
