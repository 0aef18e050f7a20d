"""A fleet in numbers for Prometheus, made of the same document that `groupwise fleet status` shows.

What to watch: `groupwise_fleet_alarms` by kind (any above 0 wants somebody's look), `groupwise_fleet_jobs` by status, the share of GPUs
that are free while jobs are pending, and the age of the last word of each role.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.http.prometheus import family, one


def render(overview: Mapping[str, Any]) -> Iterator[str]:
    """The lines. `overview`: see `groupwise.fleet.verbs.status.overview`."""
    jobs = [({"status": status}, count) for status, count in overview["jobs"].items()]
    yield from family("fleet_jobs", "gauge", "Jobs by status.", jobs)
    machines = overview["machines"]
    yield from one("fleet_machines", "gauge", "Machines of the fleet.", machines["total"])
    yield from one("fleet_machines_ready", "gauge", "Those that take work.", machines["ready"])
    yield from one("fleet_gpus", "gauge", "GPUs that were seen.", machines["gpus"])
    yield from one(
        "fleet_gpus_available",
        "gauge",
        "Those that a job could have now.",
        machines["gpus_available"],
    )
    waiting = overview["oldest_waiting_seconds"]
    yield from one(
        "fleet_oldest_waiting_seconds", "gauge", "Of the job that has waited longest.", waiting
    )
    counted = Counter(alarm["kind"] for alarm in overview["alarms"])
    alarms = [({"kind": kind}, count) for kind, count in sorted(counted.items())]
    yield from family("fleet_alarms", "gauge", "What somebody should look at.", alarms)
    silent = [
        ({"role": process["role"], "owner": process["owner"]}, process["silent_seconds"])
        for process in overview["processes"]
        if process["alive"]
    ]
    yield from family(
        "fleet_role_silent_seconds", "gauge", "Since the last word of a living role.", silent
    )
