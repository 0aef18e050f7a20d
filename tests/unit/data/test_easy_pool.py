"""The schedule of the easy pool."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from groupwise.data.easy_pool import EasyPoolConfig

PUBLISHED = {
    0: 1.0,
    49: 1.0,
    50: 0.9,
    100: 0.8,
    150: 0.7,
    200: 0.6,
    250: 0.55,
    300: 0.53,
    350: 0.53,
    400: 0.51,
    500: 0.49,
    600: 0.47,
    700: 0.44,
    800: 0.42,
    899: 0.42,
    900: 0.40,
    1000: 0.38,
    1500: 0.28,
    2600: 0.06,
    2700: 0.04,
    2800: 0.03,
    2900: 0.02,
    3000: 0.01,
    100_000: 0.01,
}


@pytest.mark.parametrize(("step", "chance"), PUBLISHED.items())
def test_the_default_table(step, chance):
    assert EasyPoolConfig().probability(step) == chance


def test_a_table_of_ones_own():
    config = EasyPoolConfig(schedule=((0, 0.5), (10, 0.0)))
    assert [config.probability(step) for step in (0, 9, 10, 11)] == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ((), "begin with 0"),
        (((5, 0.5),), "begin with 0"),
        (((0, 0.5), (9, 0.4), (3, 0.1)), "rising"),
        (((0, 0.5), (0, 0.4)), "rising"),
        (((0, 1.5),), "probability 1.5"),
        (((0, 0.5), (9, -0.1)), "probability -0.1"),
    ],
)
def test_what_is_no_table_of_probabilities_is_refused(schedule, said):
    with pytest.raises(ValidationError, match=said):
        EasyPoolConfig(schedule=schedule)
