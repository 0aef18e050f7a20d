"""How many cores may be used, by files such as containers have.

1. Without a limit it is those that the process is bound to.
2. A limit counts in either version of control groups, a part of a core as a whole one.
3. The narrowest limit holds: of the process's own group, of one around it, or of the root, which may be all that is in sight.
4. What is missing or means nothing is no limit.
"""

import os

import pytest

from groupwise.engine.models import cores
from groupwise.engine.models.cores import available_cores

NARROW = "/kubepods/pod7/app"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """32 cores, and no groups yet."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32), raising=False)
    monkeypatch.setattr(cores, "GROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")


def limited(group: str, quota: object, period: object = 100_000, *, version: int = 2) -> None:
    """Give a group a limit."""
    folder = (cores.GROUPS if version == 2 else cores.GROUPS / "cpu") / group.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


def test_those_that_the_process_is_bound_to(monkeypatch):
    assert available_cores() == 32
    monkeypatch.delattr(os, "sched_getaffinity")
    for told, expected in ((8, 8), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda told=told: told)
        assert available_cores() == expected


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("quota", "period", "expected"), [
    (200_000, 100_000, 2), (150_000, 100_000, 2), (25_000, 5_000, 5), ("max", 100_000, 32), (-1, 100_000, 32), (200_000, 0, 32),
    ("", "", 32),
])  # fmt: skip
def test_a_limit_of_a_container(version, quota, period, expected):
    limited("/", quota, period, version=version)
    assert available_cores() == expected


@pytest.mark.parametrize(("version", "own"), [
    (2, f"0::{NARROW}"), (1, f"12:memory:/elsewhere\n4:cpu,cpuacct:{NARROW}\n1:name=systemd:/elsewhere\n0::/"),
    (1, f"4:cpuacct,cpu:{NARROW}"),
])  # fmt: skip
def test_the_narrowest_limit_holds(version, own):
    cores.OWN_GROUPS.write_text(own)
    limited("/elsewhere", 100_000, version=version)
    assert available_cores() == 32
    limited("/", 800_000, version=version)
    assert available_cores() == 8, "of the root"
    limited("/kubepods/pod7", 300_000, version=version)
    assert available_cores() == 3, "of a group around its own"
    limited(NARROW, 400_000, version=version)
    assert available_cores() == 3
    limited(NARROW, 200_000, version=version)
    assert available_cores() == 2, "of its own"


def test_a_group_that_is_out_of_sight():
    cores.OWN_GROUPS.write_text("0::/../../docker/0123\n")
    assert available_cores() == 32
    limited("/", 200_000)
    assert available_cores() == 2
