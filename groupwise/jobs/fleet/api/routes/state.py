"""The state of the fleet: one document, the events as they are appended, Prometheus metrics, and whether the process is alive.

The metrics are made from the document of `groupwise fleet status`. Those to watch: `groupwise_fleet_alarms` by kind (any above 0 needs
attention), `groupwise_fleet_jobs` by status, the share of GPUs that are free while jobs are pending, and the seconds since the last
heartbeat of each role, for which every fleet has a series.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response
from sqlalchemy.orm import Session

from groupwise.api.http.prometheus import MEDIA_TYPE, family, one
from groupwise.api.schemas.fleet import MAX_SERIAL
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.api.serving import DOCUMENTS, Context, Serving, document, reads
from groupwise.jobs.fleet.operations import status
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import event_document
from groupwise.jobs.fleet.operations.status import NEEDED_ROLES
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import DatabaseFailure
from groupwise.jobs.fleet.store.schema import is_current

TAG = "state"
MAX_EVENTS = 1000
EVERYTHING = Actor("metrics")


async def healthz() -> Response:
    """Answers while the process lives."""
    return document({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Whether requests can be answered; 503 with the reason if not."""
    serving: Serving = request.app.state.shared
    if serving.ending.is_set():
        return document({"status": "not_ready", "detail": "the server is shutting down"}, 503)
    try:
        ready = await asyncio.to_thread(serving.database.at_rest, is_current)
    except (DatabaseFailure, UsageError):
        ready = False  # without the error's words: they name the database, which only holders of a key may know
    if not ready:
        return document(
            {
                "status": "not_ready",
                "detail": "the database does not answer, or is of another version",
            },
            503,
        )
    return document({"status": "ok"})


async def overview(context: Context) -> Response:
    """Jobs by status, machines and GPUs, the control plane, and what an operator should look at."""
    folders = context.serving.folders.all
    return document(await context.read(status.overview, folders))


async def list_events(
    context: Context,
    after: Annotated[int, Query(ge=0, le=MAX_SERIAL, description="Those after this one.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100,
) -> Response:
    """What happened, the oldest first: every change of a job, an attempt, a machine, a key, with who made it. Ask again after the last
    one's `event_id`: none is skipped."""
    context.actor.require_all_projects("read the events of all projects")

    def read(session: Session, _: Actor) -> list[dict[str, Any]]:
        return [event_document(event) for event in events.after(session, after, limit)]

    return document(await context.run(read))


async def metrics(context: Context) -> Response:
    """Numbers of the fleet and of this process, in the text format of Prometheus."""
    context.actor.require_all_projects("read the numbers of all projects")
    folders = context.serving.folders.all
    fleet_status = await context.read(
        lambda session, _: status.overview(session, EVERYTHING, folders)
    )
    text = "\n".join([*render(fleet_status), *context.serving.metrics.lines()]) + "\n"
    return Response(text, media_type=MEDIA_TYPE)


ROUTES = (
    reads("/healthz", healthz, tag=TAG, role=None),
    reads("/readyz", readyz, tag=TAG, role=None),
    reads("/status", overview, tag=TAG),
    reads("/events", list_events, tag=TAG, answer=DOCUMENTS),
    reads("/metrics", metrics, tag=TAG, answer=None, media_type="text/plain"),
)


def render(overview: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the metrics. `overview`: see `groupwise.jobs.fleet.operations.status.overview`."""
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
