"""A number against its own start: cases computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.data.drift import MANY, Gauge


def gauge(*values: float, start_steps: int = 3, memory: float = 0.5) -> Gauge:
    made = Gauge()
    for value in values:
        made.observe(value, start_steps, memory)
    return made


def test_the_running_mean_follows_and_the_start_stays():
    """2 → 0.5 · 2 + 0.5 · 4 = 3 → 0.5 · 3 + 0.5 · 5 = 4."""
    assert not gauge(1.0, 2.0).ready
    made = gauge(1.0, 2.0, 3.0)
    assert (made.ready, made.mean, made.now, made.errors(0.5)) == (True, 2.0, 2.0, 0.0)
    made = gauge(1.0, 2.0, 3.0, 4.0, 5.0)
    assert (made.mean, made.now) == (2.0, 4.0)


def test_standard_errors():
    """Differences −2 and 1: s² = (4 + 1) / (2 · 2). From 2 to 3, 1 / (s · √(1/3 + 0.5/1.5)) = √1.2."""
    assert gauge(3.0, 1.0, 2.0, 4.0).errors(0.5) == pytest.approx(math.sqrt(1.2))
    assert gauge(3.0, 1.0, 2.0, 0.0).errors(0.5) == pytest.approx(-math.sqrt(1.2))


def test_a_move_within_the_start_is_no_noise():
    """4, 3, 2, 1 and 4, 2, 3, 1 … differ by 1 from neighbour to neighbour in the one, by 2, 1, 2 in the other, whose s² is thrice that."""
    falling, jumping = (4.0, 3.0, 2.0, 1.0, 0.0), (4.0, 2.0, 3.0, 1.0, 0.0)
    sure, unsure = (gauge(*each, start_steps=4).errors(0.5) for each in (falling, jumping))
    assert sure / unsure == pytest.approx(math.sqrt(3))


def test_a_start_that_does_not_vary_makes_any_move_sure():
    assert gauge(2.0, 2.0, 2.0, 2.0).errors(0.5) == 0.0
    assert gauge(2.0, 2.0, 2.0, 2.1).errors(0.5) == MANY
    assert gauge(2.0, 2.0, 2.0, 1.9).errors(0.5) == -MANY


def test_nan_and_infinity_are_ignored():
    made = gauge(1.0, math.nan, 2.0, math.inf, 3.0, -math.inf, 4.0)
    assert (made.start, made.now) == ([1.0, 2.0, 3.0], 3.0)


@given(st.lists(st.floats(), min_size=3), st.floats(0, 0.99))
def test_drift_is_finite_for_any_values(values, memory):
    made = gauge(*values, memory=memory)
    if made.ready:
        assert math.isfinite(made.now)
        assert abs(made.errors(memory)) <= MANY
