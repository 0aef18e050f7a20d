"""The schedule of the easy pool."""

from __future__ import annotations

from groupwise.tasks.data.easy_pool import EasyPoolConfig

PUBLISHED = {
    0: 1.0, 49: 1.0, 50: 0.9, 100: 0.8, 249: 0.6, 250: 0.55, 899: 0.42, 900: 0.40, 3000: 0.01,
}  # fmt: skip
"""The first steps of some rows of the table, and the last before another."""


def test_the_default_table():
    config = EasyPoolConfig()
    assert {step: config.probability(step) for step in PUBLISHED} == PUBLISHED
    assert config.probability(100_000) == 0.01
