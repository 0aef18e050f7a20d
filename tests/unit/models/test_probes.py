"""Measurements on devices."""

from __future__ import annotations

from groupwise.models import probes
from groupwise.models.probes import free_memory, peak_memory, random_start, shared_memory


def test_memory_is_told_in_bytes():
    assert peak_memory("cpu") > 50 << 20
    free = free_memory("cpu")
    assert free is None or free > 1 << 20


def test_shared_memory_is_told_where_the_system_does(monkeypatch, tmp_path):
    monkeypatch.setattr(probes, "SIZES", tmp_path / "smaps_rollup")
    assert shared_memory() is None
    probes.SIZES.write_text(
        "1-2 [rollup]\nRss: 9 kB\nShared_Clean: 3 kB\nShared_Dirty: 4 kB\nPrivate_Dirty: 2 kB\n"
    )
    assert shared_memory() == 7 << 10


def test_a_start_depends_on_the_seed_alone():
    assert random_start(1, 3) == random_start(1, 3) != random_start(2, 3)
