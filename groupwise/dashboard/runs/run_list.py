"""All runs: their state, the curve of their reward, and search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from groupwise.dashboard.pages import Page, Query, Visit, page_route, paginate
from groupwise.dashboard.sources.runs import RunEntry

PER_PAGE = 50
SORTS = {
    "newest": "newest first",
    "changed": "last written to",
    "reward": "highest reward",
    "name": "name",
}
Sort = Literal["newest", "changed", "reward", "name"]


class RunsQuery(Query):
    """Parameters of the list of runs."""

    q: str = ""
    """Words that occur in name, model or task."""
    state: str = ""
    sort: Sort = "newest"
    page: int = Field(1, ge=1)


def runs(visit: Visit) -> Page:
    """The list."""
    query, all_runs = visit.query(RunsQuery), visit.context.runs.all_runs()
    matching = [
        run
        for run in all_runs.runs
        if query.state in ("", run.info.state or "broken") and matches_words(run, query.q)
    ]
    if query.sort == "changed":
        matching.sort(key=lambda run: -run.written)
    elif query.sort == "name":
        matching.sort(key=lambda run: run.info.name.casefold())
    elif query.sort == "reward":
        matching.sort(
            key=lambda run: (run.info.reward_last is None, -(run.info.reward_last or 0.0))
        )
    list_page = paginate(matching, query.page, PER_PAGE)
    data: dict[str, Any] = {
        "folder": str(visit.context.runs.folder),
        "runs": [
            {
                "name": run.info.name,
                "state": run.info.state or "broken",
                "broken": run.info.broken,
                "steps": run.info.steps,
                "max_steps": run.info.max_steps,
                "metric": run.metric,
                "first": run.ends[0],
                "last": run.ends[1],
                "curve": run.curve,
                "started": run.info.started,
                "written": run.written,
                "model": run.info.model,
                "task": run.info.task,
            }
            for run in list_page.rows
        ],
        "all": len(all_runs.runs),
        "matching": len(matching),
        "unread": all_runs.unread,
        "states": dict(Counter(run.info.state or "broken" for run in all_runs.runs)),
        "asked": query.model_dump(),
        "page": list_page.page,
        "pages": list_page.pages,
        "sorts": SORTS,
    }
    return Page("runs.html", data, live="/live")


def matches_words(entry: RunEntry, words: str) -> bool:
    """True if a run's name, model and task have all of these words."""
    return contains_words(words, (entry.info.name, entry.info.model, entry.info.task))


def contains_words(words: str, texts: Iterable[str | None]) -> bool:
    """True if all words occur in these texts, ignoring case."""
    text = " ".join(filter(None, texts)).casefold()
    return all(word in text for word in words.casefold().split())


ROUTES = (page_route("/runs", runs),)
