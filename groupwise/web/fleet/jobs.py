"""Jobs of a fleet: a list, and one of them with its attempts over time, the evidence of their failures, its log and why it waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from groupwise.fleet.states import FINAL, JobStatus
from groupwise.web.fleet.machines import LIVE, Action, changes, of, words_of
from groupwise.web.fleet.watched import Document
from groupwise.web.pages import Page, Query, Visit, done, shown
from groupwise.web.templates import text

PER_PAGE = 50
TAIL = 300
"""Lines of a log that a page shows."""
TEXT_LIMIT = 200_000
"""Characters of them."""
ACTIONS: Mapping[str, Action] = {
    "cancel": Action("Cancel", lambda fleet, job: fleet.cancel(job), ("queued", "pending", "held", "running")),
    "hold": Action("Hold", lambda fleet, job: fleet.hold(job), ("queued", "pending")),
    "release": Action("Release", lambda fleet, job: fleet.release(job), ("held",)),
    "retry": Action("Retry", lambda fleet, job: fleet.retry(job), ("failed", "cancelled")),
}  # fmt: skip
"""What may be done with a job."""
WIDTH = 1000.0
"""Of the picture of its attempts, in units of its own."""


class Asked(Query):
    """Which jobs."""

    status: str | None = None
    project: str | None = None
    name: str | None = None
    older_than: str | None = None
    """The last job of the page before."""


class Log(Query):
    """Which part of a log."""

    epoch: int | None = Field(None, ge=1)
    offset: int = Field(0, ge=0)


def jobs(visit: Visit) -> Page:
    """A page of the list, the newest first."""
    asked = visit.query(Asked)
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
    found = of(visit).ask(lambda fleet: fleet.show(name))
    part = of(visit).ask(lambda fleet: fleet.log(name, epoch=asked.epoch, tail=TAIL))
    over = found["status"] in FINAL
    follows = not over and asked.epoch is None
    now = of(visit).status()["time"]
    beginning = whole_letters(part.data) if follows else part.data
    data = {
        "job": found,
        "log": beginning.decode("utf-8", "replace")[-TEXT_LIMIT:],
        "epoch": part.epoch,
        "offset": part.offset - len(part.data) + len(beginning),
        "follows": follows,
        "timeline": timeline(found["attempts"], now),
        "span": span(found["attempts"], now),
        "actions": words_of(ACTIONS, found["status"]),
    }
    return Page("fleet_job.html", data, live="" if over else LIVE)


def log(visit: Visit) -> Response:
    """What a log has from some place on, at most a piece of it; and where the next one begins."""
    asked, name = visit.query(Log), visit.named("job")
    part = of(visit).ask(lambda fleet: fleet.log(name, epoch=asked.epoch, offset=asked.offset))
    data = part.data if part.ended else whole_letters(part.data)
    return JSONResponse(
        {
            "text": text(data.decode("utf-8", "replace"), len(data)),
            "epoch": part.epoch,
            "offset": part.offset - len(part.data) + len(data),
            "ended": part.ended,
        }
    )


def whole_letters(data: bytes) -> bytes:
    """Without the beginning of a letter whose end is still to come."""
    for back in range(1, min(4, len(data)) + 1):
        first = data[-back]
        if first >= 0b1100_0000:
            length = 2 if first < 0b1110_0000 else 3 if first < 0b1111_0000 else 4
            return data[:-back] if back < length else data
        if first < 0b1000_0000:
            break
    return data


def span(attempts: list[Document], now: float) -> list[float]:
    """From the beginning of the first attempt until the end of the last one, or now; nothing where there is none."""
    if not attempts:
        return []
    begin = min(each["created_at"] for each in attempts)
    return [begin, max(begin, *(each["ended_at"] or now for each in attempts))]


def timeline(attempts: list[Document], now: float) -> list[Document]:
    """Bars over their span: what of each attempt was waiting, and what ran."""
    if not attempts:
        return []
    begin, end = span(attempts, now)
    scale = WIDTH / max(end - begin, 1e-9)

    def bar(each: Document) -> Document:
        ended = each["ended_at"] or now
        runs = each["running_at"] or ended
        return {
            "epoch": each["epoch"],
            "outcome": each["outcome"] or each["state"],
            "x": (each["created_at"] - begin) * scale,
            "waits": max(1.0, (runs - each["created_at"]) * scale),
            "runs_at": (runs - begin) * scale,
            "runs": max(1.0, (ended - runs) * scale),
            "seconds": ended - each["created_at"],
        }

    return [bar(each) for each in attempts]


ROUTES = (
    shown("/fleet/jobs", jobs),
    shown("/fleet/jobs/{job}", job),
    done("/fleet/jobs/{job}", changes("job", ACTIONS)),
    shown("/fleet/jobs/{job}/log", log),
)
