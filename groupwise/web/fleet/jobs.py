"""Jobs of a fleet: a list, and one of them with its attempts over time, the evidence of their failures, its log and why it waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from groupwise.errors import RunNotFoundError
from groupwise.fleet.states import FINAL, JobStatus
from groupwise.web.fleet.machines import LIVE, of
from groupwise.web.fleet.watched import Document, FleetLike
from groupwise.web.pages import Page, Query, Visit, done, shown

PER_PAGE = 50
TAIL = 300
"""Lines of a log that a page shows."""
TEXT_LIMIT = 200_000
"""Characters of them."""
Action = Callable[[FleetLike, str], Document]
ACTIONS: Mapping[str, tuple[str, tuple[str, ...], Action]] = {
    "cancel": ("Cancel", ("queued", "pending", "held", "running"), lambda f, job: f.cancel(job)),
    "hold": ("Hold", ("queued", "pending"), lambda f, job: f.hold(job)),
    "release": ("Release", ("held",), lambda f, job: f.release(job)),
    "retry": ("Retry", ("failed", "cancelled"), lambda f, job: f.retry(job)),
}
"""What may be done with a job: its word, the statuses in which that is offered, and the verb."""
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
    data = {
        "job": found,
        "log": part.data.decode("utf-8", "replace")[-TEXT_LIMIT:],
        "epoch": part.epoch,
        "timeline": timeline(found["attempts"], of(visit).status()["time"]),
        "actions": {
            name: word
            for name, (word, statuses, _) in ACTIONS.items()
            if found["status"] in statuses
        },
    }
    return Page("fleet_job.html", data, live=LIVE if found["status"] not in FINAL else "")


def change(visit: Visit, form: Mapping[str, str]) -> str:
    """Cancel, hold, release or retry it."""
    name, action = visit.named("job"), form.get("action", "")
    if action not in ACTIONS:
        raise RunNotFoundError(f"{action[:40]!r} is nothing that can be done with a job here.")
    of(visit).ask(lambda fleet: ACTIONS[action][2](fleet, name))
    of(visit).forget()
    return visit.request.url.path


def timeline(attempts: list[Document], now: float) -> list[Document]:
    """Bars from the beginning of the first attempt until the end of the last one, or now: what of each was waiting, and what ran."""
    if not attempts:
        return []
    begin = min(each["created_at"] for each in attempts)
    end = max(each["ended_at"] or now for each in attempts)
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
    done("/fleet/jobs/{job}", change),
)
