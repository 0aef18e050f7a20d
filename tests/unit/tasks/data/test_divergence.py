"""The training reward rises while held-out prompts do worse: cases computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.data.divergence import HeldOutDrop, divergence, tolerance

RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
BEST = [1.0, 1.0, 1.0, 0.0]


def fall(last: list[float], evaluations: int = 2) -> HeldOutDrop:
    return HeldOutDrop("reward", BEST, last, evaluations)


def test_the_tolerance_is_that_of_a_95_percent_interval_and_grows_with_the_pairs():
    """Two evaluations make 1 pair, three 3, five 10: quantiles 0.975, 1 − 0.025/3, 0.9975."""
    assert [round(tolerance(n), 3) for n in (2, 3, 5)] == [1.960, 2.394, 2.807]


def test_strength_by_hand():
    """Differences −1, −1, 0, 0: mean −½, standard error √(1/3 / 4); rewards 0.2 and 0.8 with error √(0.01/3 + 0.01/3)."""
    found = divergence(fall([0.0, 0.0, 1.0, 0.0]), RISING)
    assert found is not None
    lost, rise = 0.5 / math.sqrt(1 / 12), 0.6 / math.sqrt(0.02 / 3)
    assert found.strength == pytest.approx(min(lost / tolerance(2), rise / 1.96))
    assert found.values == {
        "best reward": 0.75, "last reward": 0.25, "reward then": pytest.approx(0.2), "reward now": pytest.approx(0.8),
    }  # fmt: skip


@pytest.mark.parametrize(("last", "rewards", "given"), [
    ([0.0, 0.0, 0.0, 0.0], RISING, True), ([0.9, 0.9, 0.9, -0.1], RISING, True), ([0.0, 1.0, 1.0, 0.0], RISING, False),
    (BEST, RISING, False), ([1.0, 1.0, 1.0, 1.0], RISING, False), ([0.0, 0.0, 0.0, 0.0], RISING[::-1], False),
    ([0.0, 0.0, 0.0, 0.0], [0.5] * 9, False), ([0.0, 0.0, 0.0, 0.0], [0.1, 0.9, 0.1, 0.1, 0.9, 0.1, 0.9, 0.1, 0.9], False),
], ids=["parted", "fallen alike", "within the tolerance", "same", "better", "falling", "flat", "noise"])  # fmt: skip
def test_both_must_be_beyond_their_noise(last, rewards, given):
    found = divergence(fall(last), rewards)
    assert found is not None
    assert (found.strength >= 1) == given


def test_the_best_of_many_may_be_best_by_luck():
    last = [0.0, 0.0, 0.0, 0.0]
    strengths = [divergence(fall(last, n), RISING) for n in (2, 12)]
    assert [found is not None and found.strength >= 1 for found in strengths] == [True, False]


@pytest.mark.parametrize(
    ("prompts", "steps"), [(1, 9), (0, 9), (4, 8), (4, 0)], ids=["one", "none", "few", "no steps"]
)
def test_no_divergence_from_too_few_prompts_or_steps(prompts, steps):
    assert (
        divergence(HeldOutDrop("reward", BEST[:prompts], BEST[:prompts], 2), RISING[:steps]) is None
    )


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=5),
    st.lists(st.floats(-1e9, 1e9), max_size=12),
    st.integers(2, 500),
)
def test_divergence_is_finite_for_any_numbers(pairs, rewards, evaluations):
    found = divergence(
        HeldOutDrop("reward", [a for a, _ in pairs], [b for _, b in pairs], evaluations), rewards
    )
    assert found is None or math.isfinite(found.strength)
