"""The chance of an example, by its success so far."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.data.curriculum import Curriculum, CurriculumConfig, EasyPoolConfig


def with_success(successes: int, members: int, **config: Any) -> Curriculum:
    curriculum = Curriculum(CurriculumConfig(**config))
    curriculum.observe(0, successes, members)
    return curriculum


def test_chance_falls_on_both_sides_of_the_target():
    """With a target of 0.25, half of the way up to 1 is 0.625, half of the way down 0.125."""
    for successes, chance in ((0, 0.05), (2, 0.525), (4, 1.0), (6, 0.525), (8, 0.05)):
        assert with_success(successes, 8).chance(0) == pytest.approx(chance)
    for successes in (5, 1):
        other = with_success(successes, 8, target=0.25, revisit=0.0)
        assert other.chance(0) == pytest.approx(0.5)
    never_seen = with_success(0, 8)
    assert (never_seen.chance(1), never_seen.success(1)) == (1.0, None)


def test_later_groups_weigh_more():
    """0 of 8, then 8 of 8, with half of the memory: 8 / (4 + 8)."""
    for memory, successes, found in ((0.5, 8, 2 / 3), (0.0, 6, 0.75)):
        curriculum = with_success(0, 8, memory=memory)
        curriculum.observe(0, successes, 8)
        assert curriculum.success(0) == pytest.approx(found)


@given(st.integers(1, 16), st.data())
def test_the_chance_is_a_probability_and_at_least_that_of_a_revisit(members, data):
    successes = data.draw(st.integers(0, members))
    target, revisit = data.draw(st.floats(0.01, 0.99)), data.draw(st.floats(0, 1))
    curriculum = with_success(successes, members, target=target, revisit=revisit)
    assert revisit - 1e-12 <= curriculum.chance(0) <= 1 + 1e-12


def test_its_metrics_count_the_solved_and_the_hopeless():
    curriculum = Curriculum(CurriculumConfig())
    assert curriculum.metrics() == {}
    for example, successes in enumerate((0, 8, 8, 4)):
        curriculum.observe(example, successes, 8)
    assert curriculum.metrics() == {
        "curriculum/success": 0.625, "curriculum/solved": 0.5, "curriculum/hopeless": 0.25, "curriculum/seen": 4.0,
    }  # fmt: skip


def test_its_state_survives_json():
    curriculum = with_success(1, 3)
    curriculum.observe(7, 2, 3)
    again = Curriculum(CurriculumConfig())
    again.load_state(json.loads(json.dumps(curriculum.state())))
    assert again.state() == curriculum.state()
    assert again.success(7) == curriculum.success(7)


# The easy pool

EASY_PROBABILITIES = {
    0: 1.0, 49: 1.0, 50: 0.9, 100: 0.8, 249: 0.6, 250: 0.55, 899: 0.42, 900: 0.40, 3000: 0.01,
}  # fmt: skip
"""The first steps of some rows of the table, and the last before another."""


def test_the_default_table_of_the_easy_pool():
    config = EasyPoolConfig()
    assert {step: config.probability(step) for step in EASY_PROBABILITIES} == EASY_PROBABILITIES
    assert config.probability(100_000) == 0.01
