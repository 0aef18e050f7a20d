"""Prometheus metrics of a fleet, made from the document of `groupwise fleet status`.

Metrics to watch: `groupwise_fleet_alarms` by kind (any above 0 needs attention), `groupwise_fleet_jobs` by status, the share of GPUs that
are free while jobs are pending, and the seconds since the last heartbeat of each role, for which every fleet has a series.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.api.http.prometheus import family, one
from groupwise.jobs.fleet.verbs.status import NEEDED_ROLES


def render(overview: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the metrics. `overview`: see `groupwise.jobs.fleet.verbs.status.overview`."""
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
    oldest_waiting = overview["oldest_waiting_seconds"]
    yield from one(
        "fleet_oldest_waiting_seconds",
        "gauge",
        "Of the job that has waited longest.",
        oldest_waiting,
    )
    alarm_counts = Counter(alarm["kind"] for alarm in overview["alarms"])
    alarms = [({"kind": kind}, count) for kind, count in sorted(alarm_counts.items())]
    yield from family("fleet_alarms", "gauge", "What an operator should look at.", alarms)
    processes = overview["processes"]
    alive_by_role = Counter(process["role"] for process in processes if process["alive"])
    roles = sorted({*NEEDED_ROLES, *(process["role"] for process in processes)})
    role_counts = [({"role": role}, alive_by_role[role]) for role in roles]
    yield from family(
        "fleet_role_processes", "gauge", "Living processes of each role.", role_counts
    )
    # Infinite if there was no heartbeat for a day: if the series ended, so would the alert about it.
    silent_seconds = dict.fromkeys(roles, math.inf)
    for process in processes:
        role = process["role"]
        silent_seconds[role] = min(silent_seconds[role], process["silent_seconds"])
    silences = [({"role": role}, silence) for role, silence in silent_seconds.items()]
    yield from family(
        "fleet_role_silent_seconds",
        "gauge",
        "Since the last word of anybody in the role.",
        silences,
    )
