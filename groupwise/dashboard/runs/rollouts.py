"""Rollouts: search results, a group side by side, the same example over all steps, and one rollout token by token."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from groupwise.core.errors import RunNotFoundError
from groupwise.dashboard.pages import LARGEST, Page, Query, Visit, live_url, page_route
from groupwise.dashboard.runs.overview import run_header
from groupwise.dashboard.runs.tokens import segments_of, tokenizer_of, without_ratios
from groupwise.dashboard.templates import outcome as outcome_in_words
from groupwise.runs.folder import RECORD
from groupwise.runs.records import RolloutFilter, RolloutView
from groupwise.runs.store import Store
from groupwise.runs.tables import prompt_text

PER_PAGE = 30
LISTED, BESIDE, WHOLE = 4_000, 1_500, 20_000
"""Most characters of a text: in a list, next to many others, and next to the others of its group. The rollout's own page shows all
of it.
"""
GROUPS_OF_EXAMPLE = 20
MAX_MEMBERS = 64
"""Members of each group shown on the page of an example."""
MAX_STEPS = 200
"""Most steps offered for comparison, spread evenly."""
TOKENS = 4_000
"""Tokens of a rollout shown on one page."""
MAX_SHOWN = 1000
"""Most members of a group that its page shows."""
MAX_OF_GROUP = 100_000
"""Most members of a group that are searched for one of them."""
ADDRESS = re.compile(r"(\d{1,18})\.(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)
MAX_PAGES = 4000
"""Most pages of a search; beyond it the user must refine the search, because skipped rows have to be read."""
MAX_TASKS = 200
"""Most tasks offered as choices; if there are more, the user types one."""
MAX_OTHERS = 100
"""Most runs offered for comparison."""
ORDERS = {
    "newest": "newest first",
    "draw": "as drawn",
    "best": "highest first",
    "worst": "lowest first",
}
OUTCOMES = ("scored", "failed", "timed_out", "unscored", "pending")
CHIPS = {
    "text": "{}",
    "step": "step {}",
    "example": "example {}",
    "task": "task {}",
    "outcome": "{}",
    "truncated": "cut off: {}",
    "part": "part {}",
    "low": "reward ≥ {}",
    "high": "reward ≤ {}",
    "shortest": "≥ {} tokens",
    "longest": "≤ {} tokens",
}
"""What a page says of each filter in use, by its parameter."""
UNSCORED = ("failed", "timed_out")


class RolloutsQuery(Query):
    """Parameters of a search for rollouts."""

    step: int | None = Field(None, ge=1, le=LARGEST)
    example: int | None = Field(None, ge=0, le=LARGEST)
    task: str | None = None
    outcome: Literal["scored", "failed", "timed_out", "unscored", "pending"] | None = None
    part: str | None = None
    low: float | None = Field(None, allow_inf_nan=False)
    high: float | None = Field(None, allow_inf_nan=False)
    shortest: int | None = Field(None, ge=0, le=LARGEST)
    longest: int | None = Field(None, ge=0, le=LARGEST)
    truncated: Literal["yes", "no"] | None = None
    text: str | None = Field(None, max_length=500)
    order: Literal["newest", "draw", "best", "worst"] = "newest"
    page: int = Field(1, ge=1)

    @field_validator("page")
    @classmethod
    def _not_too_far(cls, page: int) -> int:
        if page > MAX_PAGES:
            raise PydanticCustomError(
                "too_far",
                "there are no pages beyond {most}: add filters, or choose another order",
                {"most": MAX_PAGES},
            )
        return page

    @property
    def rollout_filter(self) -> RolloutFilter:
        """Filter for the record; one extra row shows if there is a next page."""
        return RolloutFilter(
            step=self.step,
            example=self.example,
            task=self.task,
            outcome=UNSCORED if self.outcome == "unscored" else self.outcome,
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
    """One page of search results."""
    path = visit.context.run(visit.path_part("run"))
    query = visit.query(RolloutsQuery)
    with Store.open(path / RECORD, readonly=True) as store:
        views = store.rollouts(query.rollout_filter, LISTED)
        data: dict[str, Any] = {
            **run_header(visit, path),
            "rollouts": [asdict(rollout) for rollout in views[:PER_PAGE]],
            "more": len(views) > PER_PAGE and query.page < MAX_PAGES,
            "asked": query.model_dump(),
            "chips": [
                (name, text.format(outcome_in_words(value) if name == "outcome" else value))
                for name, text in CHIPS.items()
                if (value := getattr(query, name)) is not None
            ],
            "part_names": store.part_names(),
            "tasks": store.tasks(MAX_TASKS + 1),
            "most_tasks": MAX_TASKS,
            "steps": store.step_count(),
            "orders": ORDERS,
            "outcomes": OUTCOMES,
        }
    newest = query.order == "newest" and query.page == 1
    return Page("rollouts.html", data, live=live_url(path.name) if newest else "")


def group(visit: Visit) -> Page:
    """The rollouts of a group side by side."""
    path = visit.context.run(visit.path_part("run"))
    number = _parse_number(visit.path_part("group"), "group")
    with Store.open(path / RECORD, readonly=True) as store:
        members = store.rollouts(RolloutFilter(group=number, limit=MAX_SHOWN + 1), WHOLE)
        origin_and_columns = store.origin_of(number - 1)
        if not members or origin_and_columns is None:
            raise RunNotFoundError(f"{path.name} has no group {number}.")
    origin, again, columns = origin_and_columns
    data = {
        **run_header(visit, path),
        "group": number,
        "step": members[0].step,
        "example": members[0].example,
        "prompt": members[0].prompt,
        "columns": columns,
        "origin": origin,
        "again": None if again is None else again + 1,
        "members": [asdict(member) for member in members[:MAX_SHOWN]],
        "more": len(members) > MAX_SHOWN,
    }
    return Page("group.html", data)


class Paged(Query):
    """Which page of a long list to show."""

    page: int = Field(1, ge=1, le=MAX_PAGES)


def example(visit: Visit) -> Page:
    """The groups of an example, the newest first: how its answers changed."""
    path = visit.context.run(visit.path_part("run"))
    index, page = _parse_number(visit.path_part("example"), "example"), visit.query(Paged).page
    with Store.open(path / RECORD, readonly=True) as store:
        steps, groups = store.steps_of(index)
        draws = store.draws_of(index, GROUPS_OF_EXAMPLE, (page - 1) * GROUPS_OF_EXAMPLE)
        scores = store.scores(draws)
        members_by_draw = {
            draw: store.rollouts(RolloutFilter(group=draw + 1, limit=MAX_MEMBERS + 1), BESIDE)
            for draw in draws
        }
    if not any(members_by_draw.values()):
        if groups and page > 1:
            raise RunNotFoundError(
                f"{path.name} has {groups} groups of example {index}, which do not reach page {page}."
            )
        raise RunNotFoundError(f"{path.name} has no group of example {index} yet.")
    shown_groups = [
        {
            "group": draw + 1,
            "step": members[0].step,
            "mean": scores[draw].mean if draw in scores else None,
            "best": scores[draw].best if draw in scores else None,
            "members": [asdict(member) for member in members[:MAX_MEMBERS]],
            "more": len(members) > MAX_MEMBERS,
        }
        for draw, members in members_by_draw.items()
        if members
    ]
    if len(steps) > MAX_STEPS:  # an even selection, with the first and the last
        last = len(steps) - 1
        steps = [steps[round(n * last / (MAX_STEPS - 1))] for n in range(MAX_STEPS)]
    infos = (run.info for run in visit.context.runs.all_runs().runs)
    other_runs = [info.name for info in infos if not info.broken and info.name != path.name]
    data = {
        **run_header(visit, path),
        "example": index,
        "prompt": next(members[0].prompt for members in members_by_draw.values() if members),
        "groups": shown_groups,
        "all": groups,
        "page": page,
        "pages": -(-groups // GROUPS_OF_EXAMPLE),
        "steps": steps,
        "others": other_runs[:MAX_OTHERS],  # the newest
    }
    return Page("example.html", data)


def rollout(visit: Visit) -> Page:
    """One rollout, token by token."""
    path = visit.context.run(visit.path_part("run"))
    name = visit.path_part("rollout")
    page = visit.query(Paged).page
    with Store.open(path / RECORD, readonly=True) as store:
        draw, matches = _find_rollout(store, name)
        views: list[RolloutView] = []
        if draw is not None:
            views = store.rollouts(RolloutFilter(group=draw + 1, limit=MAX_OF_GROUP), BESIDE)
        full_group = None if draw is None else store.group(draw)
    index = next((position for position, rollout in enumerate(views) if matches(rollout)), None)
    if index is None or full_group is None:
        raise RunNotFoundError(f"{path.name} has no rollout {name[:40]}.")
    view = views[index]
    members = {(rollout.member, rollout.attempt): rollout for rollout in full_group.rollouts}
    rollout_record = members.get((view.rollout - 1, view.attempt))
    if rollout_record is None:
        raise RunNotFoundError(
            "The run was set back to an earlier step a moment ago, which removed this rollout."
        )
    prompt = full_group.prompt_seen or prompt_text(full_group.example.prompt)
    # One page of the sampled tokens; none if they were not kept.
    count = sum(len(segment.token_ids) for segment in rollout_record.segments)
    pages = max(1, -(-count // TOKENS))
    if page > pages:
        raise RunNotFoundError(f"The rollout has {count} tokens: there is no page {page} of them.")
    first_token = (page - 1) * TOKENS
    data = {
        **run_header(visit, path),
        "rollout": {**asdict(view), "prompt": prompt, "completion": rollout_record.completion},
        "prompt": prompt,
        "columns": full_group.example.columns,
        "notes": rollout_record.notes,
        "messages": rollout_record.messages,
        "segments": segments_of(rollout_record, tokenizer_of(path), first_token, TOKENS)
        if count
        else [],
        "tokens": {
            "first": first_token + 1,
            "last": min(count, first_token + TOKENS),
            "all": count,
        },
        "page": page,
        "pages": pages,
        "version": rollout_record.segments[0].policy_version if rollout_record.segments else None,
        "finish": rollout_record.segments[-1].finish_reason if rollout_record.segments else None,
        "seeds": [segment.seed for segment in rollout_record.segments if segment.seed is not None],
        "without_ratios": without_ratios(rollout_record, full_group),
        "before": asdict(views[index - 1]) if index else None,
        "after": asdict(views[index + 1]) if index + 1 < len(views) else None,
    }
    return Page("rollout.html", data)


def _find_rollout(store: Store, name: str) -> tuple[int | None, Callable[[RolloutView], bool]]:
    """The draw of a rollout, and a test that finds it in its group. `name` is `GROUP.ROLLOUT`, `GROUP.ROLLOUT.ATTEMPT`, or the current
    id in the record.

    A resumed run repeats draws; ids are row ids, which may change then.
    """
    if match := ADDRESS.fullmatch(name):
        group, rollout, attempt = (int(text or 0) for text in match.groups())
        return group - 1, lambda view: (view.rollout, view.attempt) == (rollout, attempt)
    number = _parse_number(name, "rollout")
    return store.draw_of(number), lambda view: view.id == number


def _parse_number(text: str, name: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise RunNotFoundError(f"{text[:40]!r} is not the number of a {name}.")
    return int(text)


ROUTES = (
    page_route("/runs/{run}/rollouts", rollouts),
    page_route("/runs/{run}/rollouts/{rollout}", rollout),
    page_route("/runs/{run}/groups/{group}", group),
    page_route("/runs/{run}/examples/{example}", example),
)
