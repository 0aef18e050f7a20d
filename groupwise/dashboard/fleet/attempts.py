"""Attempts of a job for people: what each is called, when it was, what is known of its end, and all of them on one line of time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from groupwise.core.errors import RunNotFoundError
from groupwise.dashboard.sources.fleet import Document
from groupwise.dashboard.templates import moment

WIDTH = 1000.0
"""Width of the picture of all attempts, in units of its own."""
DEEPEST = 5
"""Names before a value; what lies deeper stands as JSON."""
Fact = tuple[str, str]
"""A name and its value, as users wrote them: not fit for a page before a filter."""


def names(attempts: Sequence[Document]) -> dict[int, str]:
    """The name of each attempt, by its epoch, as `groupwise fleet show` has it: `0`, `1`, and `0 of generation 1` after a retry.

    One that never ran is not counted, and the next has the same number: those have their epoch beside it, `0 (epoch 7)`.
    """
    called = {each["epoch"]: _numbered(each) for each in attempts}
    often = Counter(called.values())
    return {epoch: n if often[n] == 1 else f"{n} (epoch {epoch})" for epoch, n in called.items()}


def _numbered(attempt: Document) -> str:
    generation = attempt["generation"]
    return (
        f"{attempt['number']} of generation {generation}" if generation else str(attempt["number"])
    )


def expect_one(job_id: str, epoch: int | None, epochs: Sequence[int]) -> None:
    """Raise RunNotFoundError if an attempt is asked for that the job does not have. None: no certain one is."""
    if epoch is not None and epoch not in epochs:
        there = ", ".join(str(each) for each in epochs) or "none yet"
        raise RunNotFoundError(
            f"Job {job_id} has no attempt with epoch {epoch}. There are: {there}."
        )


def described(job: Document) -> Document:
    """A job whose attempts and checkpoints say which attempt that is (`name`), and attempts and events what is known of them (`facts`)."""
    called = names(job["attempts"])
    attempts = [
        {
            **each,
            "name": called[each["epoch"]],
            "times": moments(each["created_at"], each["ended_at"]),
            "facts": facts(each["evidence"] or {}),
        }
        for each in job["attempts"]
    ]
    # an API of before tells of none
    checkpoints = [
        {**each, "name": called.get(each["epoch"], "")} for each in job.get("checkpoints") or ()
    ]
    events = [{**each, "facts": _changes(each)} for each in job["events"]]
    return {**job, "attempts": attempts, "checkpoints": checkpoints, "events": events}


def _changes(event: Document) -> list[Fact]:
    """Changed facts, as `queued → held`, and the details beside them."""
    before = dict(facts(event["before"] or {}))
    found = [*facts(event["after"] or {}), *facts(event["detail"] or {})]
    return [(n, f"{before[n]} → {v}" if before.get(n, v) != v else v) for n, v in found]


def facts(value: Any, *names: str) -> list[Fact]:
    """Plain data as names and values; what lies in other data has their names before its own: `members exit code`. Nothing is no fact."""
    if value in (None, "", [], {}):
        return []
    if len(names) < DEEPEST and isinstance(value, Mapping):
        inside = cast("Mapping[str, Any]", value).items()
        return [fact for name, each in inside for fact in facts(each, *names, name)]
    if len(names) < DEEPEST and _are_records(value):
        numbers = [] if len(value) == 1 else [str(n) for n in range(len(value))]
        return [
            fact
            for n, each in enumerate(value)
            for fact in facts(each, *names, *numbers[n : n + 1])
        ]
    return [(" ".join(names).replace("_", " "), _said(value))]


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)  # pyright: ignore[reportUnknownVariableType]


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def moments(*times: float | None) -> list[str]:
    """Points in time for people, in seconds since 1970, the first with day and zone, the others too where theirs differ. None: left out."""
    told = [moment(each) for each in times if each is not None]
    parts = [each.split(" ", 2) for each in told]
    one_day = len({(day, zone) for day, _, zone in parts}) == 1
    return [*told[:1], *([clock for _, clock, _ in parts[1:]] if one_day else told[1:])]


def span(attempts: list[Document], now: float) -> list[float]:
    """Time from the beginning of the first attempt until the end of the last one, or now; empty if there is none."""
    if not attempts:
        return []
    begin = min(each["created_at"] for each in attempts)
    return [begin, max(begin, *(each["ended_at"] or now for each in attempts))]


def axis(attempts: list[Document], now: float) -> list[str]:
    """Labels below the bars: when the first began, the middle, and the end; empty if there is none."""
    found = span(attempts, now)
    return moments(found[0], sum(found) / 2, found[1]) if found else []


def timeline(attempts: list[Document], now: float) -> list[Document]:
    """Bars over their span: what of each attempt was waiting, and what ran."""
    if not attempts:
        return []
    begin, end = span(attempts, now)
    scale = WIDTH / max(end - begin, 1e-9)
    called = names(attempts)

    def bar(each: Document) -> Document:
        ended = each["ended_at"] or now
        runs = each["running_at"] or ended
        return {
            "name": called[each["epoch"]],
            "outcome": each["outcome"] or each["state"],
            "x": (each["created_at"] - begin) * scale,
            "waits": max(1.0, (runs - each["created_at"]) * scale),
            "runs_at": (runs - begin) * scale,
            "runs": max(1.0, (ended - runs) * scale),
            "seconds": ended - each["created_at"],
        }

    return [bar(each) for each in attempts]
