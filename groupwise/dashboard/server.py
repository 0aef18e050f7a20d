"""The training server: its run, the groups that wait for rewards and steps, requests that wait for capacity, its clients, and their
sessions.
"""

from __future__ import annotations

from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.training import StatusAnswer
from groupwise.core.errors import RunNotFoundError
from groupwise.dashboard.pages import Page, Visit, page_route

LIVE = "/live?server"
LONG = 10.0
"""Seconds that a request may wait before the page explains why."""
STATES = {
    "open": "sampled, and not rewarded yet",
    "rewarded": "waits for a step",
    "held": "rewarded, and waits to be named",
    "planned": "part of a step that is not done",
    "trained": "a step has learnt from it",
    "expired": "not rewarded within its lease",
    "given_up": "its client did not want it",
    "stale": "too old when a step could have taken it",
    "quarantined": "left out, because a step with it ended the engine twice",
}
"""States of groups, in the order of their life cycle, with their meanings."""


def server(visit: Visit) -> Page:
    """All of it at one instant."""
    if visit.context.server is None:
        raise RunNotFoundError(
            "This dashboard shows no training server; `groupwise web --server URL` does, and `groupwise serve` has a dashboard of its own."
        )
    status, activity = visit.context.server.ask()
    data = {
        "status": status.model_dump(),
        "activity": activity.model_dump(),
        "states": STATES,
        "run": status.run_id if status.run_id and visit.context.has(status.run_id) else None,
        "advice": advice(status, activity),
    }
    return Page("server.html", data, live=LIVE)


def advice(status: StatusAnswer, activity: ActivityAnswer) -> list[str]:
    """Problems that need attention, in words, and what to do about them."""
    counts = status.counters
    lines: list[str] = []
    if status.phase == "recovering":
        lines.append(
            "The engine has ended and is being started again; clients are told to come back. Nothing that was acknowledged is lost."
        )
    if counts.expired and counts.expired >= max(5, counts.trained):
        lines.append(
            f"{counts.expired} groups were not rewarded within their lease, and {counts.trained} were trained. Clients that reward slowly "
            "need a longer one (`lease_seconds` of POST /start); those that are gone should give up what they hold."
        )
    if counts.stale and counts.stale >= max(5, counts.trained // 2):
        lines.append(
            f"{counts.stale} groups were too old when a step could have taken them. A higher `staleness` keeps more of them, and fewer "
            "groups asked for at once waste fewer."
        )
    waiting = sum(request.seconds >= LONG for request in activity.waiting)
    if waiting and counts.open and not counts.rewarded and not counts.planned:
        lines.append(
            f"{waiting} of those who ask wait for room, for {LONG:.0f} seconds and more, and {counts.open} of the groups wait for their "
            "rewards: the clients' rewards are what everything waits for."
        )
    return lines


ROUTES = (page_route("/server", server),)
