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
    249: 0.6,
    250: 0.55,
    899: 0.42,
    900: 0.40,
    3000: 0.01,
}
"""The first steps of some rows of the table, and the last before another."""


def test_the_default_table():
    config = EasyPoolConfig()
    assert {step: config.probability(step) for step in PUBLISHED} == PUBLISHED
    assert config.probability(100_000) == 0.01


def test_a_table_of_ones_own():
    config = EasyPoolConfig(schedule=((0, 0.5), (10, 0.0)))
    assert [config.probability(step) for step in (0, 9, 10, 11)] == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(("schedule", "said"), [
    ((), "begin with 0"), (((5, 0.5),), "begin with 0"), (((0, 0.5), (9, 0.4), (3, 0.1)), "rising"),
    (((0, 0.5), (0, 0.4)), "rising"), (((0, 1.5),), "probability 1.5"),
    (((0, 0.5), (9, -0.1)), "probability -0.1"),
])  # fmt: skip
def test_what_is_no_table_of_probabilities_is_refused(schedule, said):
    with pytest.raises(ValidationError, match=said):
        EasyPoolConfig(schedule=schedule)
