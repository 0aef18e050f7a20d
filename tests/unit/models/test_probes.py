"""Measurements on devices."""

from __future__ import annotations

from groupwise.models.probes import free_memory, peak_memory, random_start


def test_memory_is_told_in_bytes():
    assert peak_memory("cpu") > 50 << 20
    free = free_memory("cpu")
    assert free is None or free > 1 << 20


def test_a_start_depends_on_the_seed_alone():
    assert random_start(1, 3) == random_start(1, 3) != random_start(2, 3)
