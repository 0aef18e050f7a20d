"""Jobs of a fleet: a list, and one of them with its attempts over time, the evidence of their failures, its log and why it waits."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from groupwise.api.schemas.fleet import MOST_SERIAL, LogPart
from groupwise.core.errors import UsageError
from groupwise.dashboard.fleet.attempts import axis, described, expect_one, names, timeline
from groupwise.dashboard.fleet.machines import LIVE, Action, changes, of, words_of
from groupwise.dashboard.pages import Page, Query, Visit, done, shown
from groupwise.dashboard.sources.fleet import Document, FleetLike
from groupwise.dashboard.templates import text
from groupwise.jobs.fleet.states import FINAL, JobStatus

PER_PAGE = 50
TAIL = 300
"""Lines of a log that a page shows."""
TEXT_LIMIT = 200_000
"""Characters of them."""
MOST_OF_REASON = 1000
"""Longest reason for cancelling a job, in characters, that an API takes."""


def _cancel(fleet: FleetLike, job: str, form: Mapping[str, str]) -> Document:
    reason = form.get("reason", "").strip()
    if len(reason) > MOST_OF_REASON:
        raise UsageError(f"The reason has {len(reason)} characters; {MOST_OF_REASON} at most.")
    return fleet.cancel(job, reason or None)


ACTIONS: Mapping[str, Action] = {
    "cancel": Action("Cancel", _cancel, ("queued", "pending", "held", "running")),
    "hold": Action("Hold", lambda fleet, job, _: fleet.hold(job), ("queued", "pending")),
    "release": Action("Release", lambda fleet, job, _: fleet.release(job), ("held",)),
    "retry": Action("Retry", lambda fleet, job, _: fleet.retry(job), ("failed", "cancelled")),
}
"""Actions on a job."""


class JobsQuery(Query):
    """Which jobs."""

    status: str | None = None
    project: str | None = None
    name: str | None = None
    older_than: str | None = None
    """The last job of the page before."""


class Log(Query):
    """Which part of a log."""

    epoch: int | None = Field(None, ge=1, le=MOST_SERIAL)
    offset: int = Field(0, ge=0, le=MOST_SERIAL)


def jobs(visit: Visit) -> Page:
    """A page of the list, the newest first."""
    asked = visit.query(JobsQuery)
    wanted = {**asked.model_dump(), "status": None if asked.status is None else [asked.status]}
    found = of(visit).ask(lambda fleet: fleet.jobs(**wanted, limit=PER_PAGE + 1))
    data: dict[str, Any] = {
        "jobs": found[:PER_PAGE],
        "more": found[PER_PAGE - 1]["job_id"] if len(found) > PER_PAGE else None,
        "asked": asked.model_dump(),
        "statuses": [each.value for each in JobStatus],
    }
    return Page("fleet_jobs.html", data, live=LIVE if asked.older_than is None else "")


def job(visit: Visit) -> Page:
    """All about one."""
    asked, name = visit.query(Log), visit.named("job")
    found = described(of(visit).ask(lambda fleet: fleet.show(name)))
    attempts = found["attempts"]
    expect_one(name, asked.epoch, [each["epoch"] for each in attempts])
    part = of(visit).ask(lambda fleet: fleet.log(name, epoch=asked.epoch, tail=TAIL))
    if asked.epoch not in (None, part.epoch):  # it wrote nothing, and what follows is of another
        part = LogPart(b"", asked.epoch, 0, part.ended)
    over = found["status"] in FINAL
    follows = not over and asked.epoch is None
    now = of(visit).status()["time"]
    beginning = whole_letters(part.data) if follows else part.data
    data = {
        "job": found,
        "command": shlex.join(found["arguments"] or ()),
        "ran": ran(found, now),
        "log": beginning.decode("utf-8", "replace")[-TEXT_LIMIT:],
        "epoch": part.epoch,
        "attempt": names(attempts).get(part.epoch or 0),
        "offset": part.offset - len(part.data) + len(beginning),
        "follows": follows,
        "timeline": timeline(attempts, now),
        "axis": axis(attempts, now),
        "actions": words_of(ACTIONS, found["status"]),
    }
    return Page("fleet_job.html", data, live="" if over else LIVE)


def ran(job: Document, now: float) -> float | None:
    """Seconds from its start until its end, or now; None: it has not begun."""
    if job["start_time"] is None:
        return None
    end = now if job["end_time"] is None else _seconds(job["end_time"])
    return max(0.0, end - _seconds(job["start_time"]))


def _seconds(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()


def log(visit: Visit) -> Response:
    """What a log has from some place on, at most a piece of it; and where the next one begins. Without `epoch` of the newest attempt."""
    asked, name = visit.query(Log), visit.named("job")
    epochs = of(visit).ask(lambda fleet: fleet.progress(name))["epochs"]
    expect_one(name, asked.epoch, epochs)
    epoch = asked.epoch or max(epochs, default=None)
    part = of(visit).ask(lambda fleet: fleet.log(name, epoch=epoch, offset=asked.offset))
    data = part.data if part.ended else whole_letters(part.data)
    return JSONResponse(
        {
            "text": text(data.decode("utf-8", "replace"), len(data)),
            "epoch": part.epoch,
            "attempt": None if part.epoch == asked.epoch else _called(visit, name, part.epoch),
            "offset": part.offset - len(part.data) + len(data),
            "ended": part.ended,
        }
    )


def _called(visit: Visit, name: str, epoch: int | None) -> str | None:
    """Name of the log's attempt, which the reader may not know yet."""
    found = of(visit).ask(lambda fleet: fleet.show(name))
    return names(found["attempts"]).get(epoch or 0)


def whole_letters(data: bytes) -> bytes:
    """Bytes up to the last whole character."""
    for back in range(1, min(4, len(data)) + 1):
        first = data[-back]
        if first >= 0b1100_0000:
            length = 2 if first < 0b1110_0000 else 3 if first < 0b1111_0000 else 4
            return data[:-back] if back < length else data
        if first < 0b1000_0000:
            break
    return data


ROUTES = (
    shown("/fleet/jobs", jobs),
    shown("/fleet/jobs/{job}", job),
    done("/fleet/jobs/{job}", changes("job", ACTIONS)),
    shown("/fleet/jobs/{job}/log", log),
)
