"""Rollouts: those of a search, a group side by side, the same example over all steps, and one rollout token by token."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from groupwise.errors import RunNotFoundError
from groupwise.runs.folder import RECORD
from groupwise.runs.records import RolloutFilter, RolloutView
from groupwise.runs.store import Store
from groupwise.types import Group, Rollout
from groupwise.web.pages import Page, Query, Visit, live_of, shown
from groupwise.web.runs.overview import head_of
from groupwise.web.runs.tokens import segments_of, tokenizer_of, without_ratios

PER_PAGE = 30
MOST_PAGES = 4000
"""Beyond that one says what is looked for: rows that are passed over have to be read."""
MOST_TASKS = 200
"""That are offered to choose from; of more than that one writes which is meant."""
MOST_OTHERS = 100
"""Runs that are offered to compare with."""
ORDERS = {
    "newest": "newest first",
    "draw": "as drawn",
    "best": "highest first",
    "worst": "lowest first",
}
OUTCOMES = ("scored", "failed", "timed_out", "pending")


class Asked(Query):
    """Which rollouts."""

    step: int | None = Field(None, ge=0)
    example: int | None = Field(None, ge=0)
    task: str | None = None
    outcome: Literal["scored", "failed", "timed_out", "pending"] | None = None
    part: str | None = None
    low: float | None = None
    high: float | None = None
    shortest: int | None = Field(None, ge=0)
    longest: int | None = Field(None, ge=0)
    truncated: Literal["yes", "no"] | None = None
    text: str | None = Field(None, max_length=500)
    order: Literal["newest", "draw", "best", "worst"] = "newest"
    page: int = Field(1, ge=1, le=MOST_PAGES)

    @property
    def wanted(self) -> RolloutFilter:
        """As the record is asked; one row more than is shown says whether there is a next page."""
        return RolloutFilter(
            step=self.step,
            example=self.example,
            task=self.task,
            outcome=self.outcome,
            part=self.part,
            min_reward=self.low,
            max_reward=self.high,
            min_tokens=self.shortest,
            max_tokens=self.longest,
            truncated=None if self.truncated is None else self.truncated == "yes",
            text=self.text,
            order=self.order,
            limit=PER_PAGE + 1,
            offset=(self.page - 1) * PER_PAGE,
        )


def rollouts(visit: Visit) -> Page:
    """One page of what was asked for."""
    path = visit.place.run(visit.named("run"))
    asked = visit.query(Asked)
    with Store.open(path / RECORD, readonly=True) as store:
        found = store.rollouts(asked.wanted)
        data: dict[str, Any] = {
            **head_of(visit, path),
            "rollouts": [asdict(each) for each in found[:PER_PAGE]],
            "more": len(found) > PER_PAGE,
            "asked": asked.model_dump(),
            "part_names": store.part_names(),
            "tasks": store.tasks(MOST_TASKS + 1),
            "most_tasks": MOST_TASKS,
            "last_step": store.last_step(),
            "orders": ORDERS,
            "outcomes": OUTCOMES,
        }
    newest = asked.order == "newest" and asked.page == 1
    return Page("rollouts.html", data, live=live_of(path.name) if newest else "")


def group(visit: Visit) -> Page:
    """The members of a draw side by side."""
    path = visit.place.run(visit.named("run"))
    draw = _number(visit, "draw")
    with Store.open(path / RECORD, readonly=True) as store:
        found = store.rollouts(RolloutFilter(draw=draw, limit=1000))
        if not found:
            raise RunNotFoundError(f"{path.name} has no group of draw {draw}.")
        whole = store.group(draw)
    assert whole is not None, "it has rollouts"
    data = {
        **head_of(visit, path),
        "draw": draw,
        "step": found[0].step,
        "example": found[0].example,
        "prompt": found[0].prompt,
        "columns": whole.example.columns,
        "origin": whole.origin,
        "again": whole.again,
        "members": [asdict(each) for each in found],
    }
    return Page("group.html", data)


def example(visit: Visit) -> Page:
    """All groups of an example, the newest first: how its answers changed."""
    path = visit.place.run(visit.named("run"))
    index = _number(visit, "example")
    with Store.open(path / RECORD, readonly=True) as store:
        found = store.rollouts(RolloutFilter(example=index, order="newest", limit=400))
    if not found:
        raise RunNotFoundError(f"{path.name} has asked nothing of example {index} yet.")
    draws: dict[int, list[RolloutView]] = {}
    for each in found:
        draws.setdefault(each.draw, []).append(each)
    data = {
        **head_of(visit, path),
        "example": index,
        "prompt": found[0].prompt,
        "groups": [_summed(members) for members in draws.values()],
        "cut": len(found) == 400,
        "steps": sorted({each.step for each in found if each.step is not None}),
        "others": _others(visit, path.name),
    }
    return Page("example.html", data)


def _others(visit: Visit, name: str) -> list[str]:
    """The newest runs beside this one."""
    known = (each.info for each in visit.place.runs.known().runs)
    return [info.name for info in known if not info.broken and info.name != name][:MOST_OTHERS]


def rollout(visit: Visit) -> Page:
    """One rollout, token by token."""
    path = visit.place.run(visit.named("run"))
    number = _number(visit, "rollout")
    with Store.open(path / RECORD, readonly=True) as store:
        draw = store.draw_of(number)
        views = [] if draw is None else store.rollouts(RolloutFilter(draw=draw, limit=1000))
        whole = None if draw is None else store.group(draw)
    view = next((each for each in views if each.id == number), None)
    if view is None or whole is None:
        raise RunNotFoundError(f"{path.name} has no rollout {number}.")
    beside = [each.id for each in views]
    place = beside.index(number)
    found = _member(whole, view)
    data = {
        **head_of(visit, path),
        "rollout": asdict(view),
        "prompt": view.prompt,
        "columns": whole.example.columns,
        "notes": found.notes,
        "messages": found.messages,
        "segments": _segments(path, found),
        "without_ratios": without_ratios(found, whole),
        "seeds": [each.seed for each in found.segments if each.seed is not None],
        "before": beside[place - 1] if place else None,
        "after": beside[place + 1] if place + 1 < len(beside) else None,
    }
    return Page("rollout.html", data)


def _segments(path: Path, found: Rollout) -> list[dict[str, Any]]:
    if not any(segment.token_ids for segment in found.segments):
        return []  # they were not kept
    return segments_of(found, tokenizer_of(path))


def _member(group: Group, view: RolloutView) -> Rollout:
    return next(
        each
        for each in group.rollouts
        if (each.member, each.attempt) == (view.member, view.attempt)
    )


def _summed(members: list[RolloutView]) -> dict[str, Any]:
    rewards = [each.reward for each in members if each.reward is not None]
    return {
        "draw": members[0].draw,
        "step": members[0].step,
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "best": max(rewards, default=None),
        "members": [asdict(each) for each in sorted(members, key=lambda each: each.member)],
    }


def _number(visit: Visit, name: str) -> int:
    word = visit.named(name)
    if not word.isdecimal() or len(word) > 18:
        raise RunNotFoundError(f"{word[:40]!r} is no number of a {name}.")
    return int(word)


ROUTES = (
    shown("/runs/{run}/rollouts", rollouts),
    shown("/runs/{run}/rollouts/{rollout}", rollout),
    shown("/runs/{run}/groups/{draw}", group),
    shown("/runs/{run}/examples/{example}", example),
)
