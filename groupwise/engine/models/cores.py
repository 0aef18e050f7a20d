"""Counts the cores that this process may use: those that it is bound to, or its container's share of their time.

A container's limit (`docker --cpus`, a limit of Kubernetes) leaves every core visible. The kernel reports it in files of control groups,
which come in two versions. Groups are nested, and the narrowest limit holds; in a container often only the root is visible.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")

_ROOTS = ("0::/", "0:cpu:/")
"""Root groups of both cgroup versions, as lines of `OWN_GROUPS`."""
_LIMITS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Files of both versions with the microseconds of computing allowed, and the microseconds of the period for them."""


def available_cores() -> int:
    """Number of cores that this process may use, at least 1. A part of a core counts as a whole one."""
    if hasattr(os, "sched_getaffinity"):
        bound_to = len(os.sched_getaffinity(0))
    else:
        bound_to = os.cpu_count() or 1
    limits = map(_limit, _groups())
    return min([bound_to, *(limit for limit in limits if limit is not None)])


def _groups() -> Iterator[Path]:
    """The folders of the groups that this process is in."""
    lines = [*_ROOTS]
    with suppress(OSError):  # a system without them
        lines += OWN_GROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, group = GROUPS / "cpu" if controllers else GROUPS, Path(path.lstrip("/"))
        yield from (root / each for each in (group, *group.parents))


def _limit(group: Path) -> int | None:
    """Cores that the group alone allows; None if it has no limit of its own."""
    for names in _LIMITS:
        with suppress(OSError, ValueError):  # no such files, or `max`
            text = " ".join((group / name).read_text() for name in names)
            quota, period = map(int, text.split())
            if min(quota, period) > 0:
                return -(-quota // period)
    return None
