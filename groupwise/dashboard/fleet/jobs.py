"""Jobs of a fleet: a list, and one of them with its attempts over time, the evidence of their failures, its log and why it waits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field
from starlette.responses import JSONResponse, Response

from groupwise.api.schemas.fleet import MAX_SERIAL, LogPart
from groupwise.core.errors import RunNotFoundError, UsageError
from groupwise.core.terminal.text import command_line
from groupwise.dashboard.fleet.machines import (
    LIVE,
    Action,
    action_handler,
    fleet_of,
    offered_buttons,
)
from groupwise.dashboard.pages import Page, Query, Visit, form_route, page_route
from groupwise.dashboard.sources.fleet import Document
from groupwise.dashboard.templates import moment, text
from groupwise.jobs.fleet.states import FINAL, JobStatus

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient

PER_PAGE = 50
TAIL = 300
"""Most lines of a log that a page shows."""
TEXT_LIMIT = 200_000
"""Most characters of these lines."""
MAX_REASON_CHARACTERS = 1000
"""Longest reason for cancelling a job, in characters, that the API accepts."""
WIDTH = 1000.0
"""Width of the timeline image, in SVG units."""
MAX_DEPTH = 5
"""Most levels of names before a value; anything deeper is shown as JSON."""
Fact = tuple[str, str]
"""A name and its value, written by users: they must be escaped before they are put in a page."""


def _cancel_job(fleet: FleetClient, job: str, form: Mapping[str, str]) -> Document:
    reason = form.get("reason", "").strip()
    if len(reason) > MAX_REASON_CHARACTERS:
        raise UsageError(
            f"The reason has {len(reason)} characters; {MAX_REASON_CHARACTERS} at most."
        )
    return fleet.cancel(job, reason or None)


ACTIONS: Mapping[str, Action] = {
    "cancel": Action("Cancel", _cancel_job, ("queued", "pending", "held", "running")),
    "hold": Action("Hold", lambda fleet, job, _: fleet.hold(job), ("queued", "pending")),
    "release": Action("Release", lambda fleet, job, _: fleet.release(job), ("held",)),
    "retry": Action("Retry", lambda fleet, job, _: fleet.retry(job), ("failed", "cancelled")),
}
"""Actions on a job."""


class JobsQuery(Query):
    """Parameters of the list of jobs."""

    status: str | None = None
    project: str | None = None
    name: str | None = None
    older_than: str | None = None
    """The last job of the previous page."""


class Log(Query):
    """Parameters of a log: which part of it."""

    epoch: int | None = Field(None, ge=1, le=MAX_SERIAL)
    offset: int = Field(0, ge=0, le=MAX_SERIAL)


def jobs(visit: Visit) -> Page:
    """A page of the list, the newest first."""
    query = visit.query(JobsQuery)
    filters = {**query.model_dump(), "status": None if query.status is None else [query.status]}
    documents = fleet_of(visit).ask(lambda fleet: fleet.jobs(**filters, limit=PER_PAGE + 1))
    data: dict[str, Any] = {
        "jobs": documents[:PER_PAGE],
        "more": documents[PER_PAGE - 1]["job_id"] if len(documents) > PER_PAGE else None,
        "asked": query.model_dump(),
        "statuses": [status.value for status in JobStatus],
    }
    return Page("fleet_jobs.html", data, live=LIVE if query.older_than is None else "")


def job(visit: Visit) -> Page:
    """All about one."""
    query, name = visit.query(Log), visit.path_part("job")
    document = describe_job(fleet_of(visit).ask(lambda fleet: fleet.show(name)))
    attempts = document["attempts"]
    require_attempt(name, query.epoch, [attempt["epoch"] for attempt in attempts])
    log_part = fleet_of(visit).ask(lambda fleet: fleet.log(name, epoch=query.epoch, tail=TAIL))
    if query.epoch not in (None, log_part.epoch):  # it wrote nothing; the next log is of another
        log_part = LogPart(b"", query.epoch, 0, log_part.ended)
    ended = document["status"] in FINAL
    follows = not ended and query.epoch is None
    now = fleet_of(visit).status()["time"]
    data_shown = complete_characters(log_part.data) if follows else log_part.data
    data = {
        "job": document,
        "command": command_line(document["arguments"] or ()),
        "ran": run_seconds(document, now),
        "log": data_shown.decode("utf-8", "replace")[-TEXT_LIMIT:],
        "epoch": log_part.epoch,
        "attempt": attempt_names(attempts).get(log_part.epoch or 0),
        "offset": log_part.offset - len(log_part.data) + len(data_shown),
        "follows": follows,
        "timeline": timeline(attempts, now),
        "axis": axis(attempts, now),
        "actions": offered_buttons(ACTIONS, document["status"]),
    }
    return Page("fleet_job.html", data, live="" if ended else LIVE)


def run_seconds(job: Document, now: float) -> float | None:
    """Seconds from the start of the newest attempt's command until its end, or until now; None if it has not started."""
    if job["running_at"] is None:
        return None
    return max(0.0, (job["ran_until"] or now) - job["running_at"])


def log(visit: Visit) -> Response:
    """A piece of a log from an offset on, and the offset of the next piece. Without `epoch`, the log of the newest attempt."""
    query, name = visit.query(Log), visit.path_part("job")
    epochs = fleet_of(visit).ask(lambda fleet: fleet.progress(name))["epochs"]
    require_attempt(name, query.epoch, epochs)
    epoch = query.epoch or max(epochs, default=None)
    log_part = fleet_of(visit).ask(lambda fleet: fleet.log(name, epoch=epoch, offset=query.offset))
    data = log_part.data if log_part.ended else complete_characters(log_part.data)
    attempt = None
    if log_part.epoch != query.epoch:  # the reader may not know its epoch yet
        attempts = fleet_of(visit).ask(lambda fleet: fleet.show(name))["attempts"]
        attempt = attempt_names(attempts).get(log_part.epoch or 0)
    return JSONResponse(
        {
            "text": text(data.decode("utf-8", "replace"), len(data)),
            "epoch": log_part.epoch,
            "attempt": attempt,
            "offset": log_part.offset - len(log_part.data) + len(data),
            "ended": log_part.ended,
        }
    )


def complete_characters(data: bytes) -> bytes:
    """Bytes up to the last whole character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0b1100_0000:
            length = 2 if byte < 0b1110_0000 else 3 if byte < 0b1111_0000 else 4
            return data[:-back] if back < length else data
        if byte < 0b1000_0000:
            break
    return data


def attempt_names(attempts: Sequence[Document]) -> dict[int, str]:
    """The name of each attempt, by its epoch: its place among the attempts of the job from 1 on, as in `groupwise fleet show`."""
    return {attempt["epoch"]: str(place) for place, attempt in enumerate(attempts, 1)}


def require_attempt(job_id: str, epoch: int | None, epochs: Sequence[int]) -> None:
    """Raise RunNotFoundError if the job does not have the requested attempt; `epoch` None means that none was requested."""
    if epoch is not None and epoch not in epochs:
        known_epochs = ", ".join(str(number) for number in epochs) or "none yet"
        raise RunNotFoundError(
            f"Job {job_id} has no attempt with epoch {epoch}. There are: {known_epochs}."
        )


def describe_job(job: Document) -> Document:
    """A job document with additions: attempts and checkpoints get the attempt's name (`name`), attempts and events their details
    (`facts`).
    """
    names = attempt_names(job["attempts"])
    attempts = [
        {
            **attempt,
            "name": names[attempt["epoch"]],
            "times": format_times(attempt["created_at"], attempt["ended_at"]),
            "facts": facts(attempt["evidence"] or {}),
        }
        for attempt in job["attempts"]
    ]
    # the API of an earlier version returns none
    checkpoints = [
        {**checkpoint, "name": names.get(checkpoint["epoch"], "")}
        for checkpoint in job.get("checkpoints") or ()
    ]
    events: list[Document] = []
    for event in job["events"]:
        # Changed facts, as `queued → held`, followed by the other details.
        before = dict(facts(event["before"] or {}))
        after = [*facts(event["after"] or {}), *facts(event["detail"] or {})]
        changed_facts = [
            (n, f"{before[n]} → {v}" if before.get(n, v) != v else v) for n, v in after
        ]
        events.append({**event, "facts": changed_facts})
    return {**job, "attempts": attempts, "checkpoints": checkpoints, "events": events}


def facts(value: Any, *names: str) -> list[Fact]:
    """Plain data as names and values. A nested value is named by its whole path, such as `members exit code`. Empty values are left out."""
    if value in (None, "", [], {}):
        return []
    if len(names) < MAX_DEPTH and isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return [fact for name, inner in items for fact in facts(inner, *names, name)]
    records = cast("list[Any]", value) if isinstance(value, list) else []
    if (
        len(names) < MAX_DEPTH
        and records
        and all(isinstance(record, Mapping) for record in records)
    ):
        numbers = [] if len(records) == 1 else [str(n) for n in range(len(records))]
        return [
            fact
            for n, record in enumerate(records)
            for fact in facts(record, *names, *numbers[n : n + 1])
        ]
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return [(" ".join(names).replace("_", " "), text)]


def format_times(*times: float | None) -> list[str]:
    """Times for readers, from seconds since 1970. If all are on the same date in the same zone, only the first shows these. None
    values are left out.
    """
    texts = [moment(time) for time in times if time is not None]
    parts = [label.split(" ", 2) for label in texts]
    one_day = len({(day, zone) for day, _, zone in parts}) == 1
    return [*texts[:1], *([clock for _, clock, _ in parts[1:]] if one_day else texts[1:])]


def span(attempts: list[Document], now: float) -> list[float]:
    """Start of the first attempt and end of the last one (or now), in seconds since 1970; empty if there are no attempts."""
    if not attempts:
        return []
    start = min(attempt["created_at"] for attempt in attempts)
    return [start, max(start, *(attempt["ended_at"] or now for attempt in attempts))]


def axis(attempts: list[Document], now: float) -> list[str]:
    """Labels below the bars: start, middle and end of the time span; empty if there is none."""
    bounds = span(attempts, now)
    return format_times(bounds[0], sum(bounds) / 2, bounds[1]) if bounds else []


def timeline(attempts: list[Document], now: float) -> list[Document]:
    """Bars of all attempts over their time span, each divided into waiting and running."""
    if not attempts:
        return []
    start, end = span(attempts, now)
    scale = WIDTH / max(end - start, 1e-9)
    names = attempt_names(attempts)

    def bar(attempt: Document) -> Document:
        ended = attempt["ended_at"] or now
        runs = attempt["running_at"] or ended
        return {
            "name": names[attempt["epoch"]],
            "outcome": attempt["outcome"] or attempt["state"],
            "x": (attempt["created_at"] - start) * scale,
            "waits": max(1.0, (runs - attempt["created_at"]) * scale),
            "runs_at": (runs - start) * scale,
            "runs": max(1.0, (ended - runs) * scale),
            "seconds": ended - attempt["created_at"],
        }

    return [bar(attempt) for attempt in attempts]


ROUTES = (
    page_route("/fleet/jobs", jobs),
    page_route("/fleet/jobs/{job}", job),
    form_route("/fleet/jobs/{job}", action_handler("job", ACTIONS)),
    page_route("/fleet/jobs/{job}/log", log),
)
