"""Compares two policies' answers to the same prompts: of two runs, or of one run at two of its steps.

Each side is a run until a step. For each prompt that both have answered, the newest group of each side is taken (if a run is compared
with itself and no step is given: the oldest and the newest). The prompts whose rewards differ most come first.

A run may have a hundred thousand groups. `MOST_GROUPS` groups of each side are looked at, and the rewards of `MOST_PROMPTS` prompts
are compared; the page says if that has left something out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import Field

from groupwise.core.errors import StoreError, UsageError
from groupwise.dashboard.pages import LARGEST, Page, Query, Visit, cut, shown
from groupwise.dashboard.runs.comparing import differences
from groupwise.dashboard.runs.reading import LISTED, MOST_TASKS
from groupwise.runs.folder import RECORD, read_config
from groupwise.runs.prompt_queries import AskedFilter
from groupwise.runs.records import GroupAsked, GroupScore, RolloutFilter, RolloutView
from groupwise.runs.store import Store

PER_PAGE = 10
MOST_GROUPS = 10_000
"""Groups of each side that are looked at."""
MOST_PROMPTS = 3_000
"""Prompts answered by both whose rewards are read."""
MOST_MEMBERS = 64
"""Members of a group that are shown."""
ORDERS = {
    "changed": "largest difference first",
    "better": "where B is better",
    "worse": "where B is worse",
}
SCORING = ("rewards.", "task.", "rollout.")
"""Settings that say what a reward means."""
Key = tuple[int, str] | str
"""Identifies a prompt: with the number of its example if both sides have the same data, else its text alone."""


class AnswersQuery(Query):
    """Which two, and which prompts: a side is `RUN`, or `RUN@STEP` for its answers until that step."""

    a: str = ""
    b: str = ""
    example: int | None = Field(None, ge=0, le=LARGEST)
    """Of A."""
    task: str | None = None
    order: Literal["changed", "better", "worse"] = "changed"
    page: int = Field(1, ge=1)


@dataclass(frozen=True, slots=True)
class Side:
    """A policy whose answers are looked at."""

    run: str
    until: int | None
    oldest: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt that both have answered."""

    prompt: str
    a: GroupAsked
    b: GroupAsked
    score_a: GroupScore
    score_b: GroupScore

    @property
    def difference(self) -> float | None:
        """B − A of the mean rewards; None if a side has none."""
        if self.score_a.mean is None or self.score_b.mean is None:
            return None
        return self.score_b.mean - self.score_a.mean


def compare(visit: Visit) -> Page:
    """A page of the prompts that both have answered."""
    asked = visit.query(AnswersQuery)
    side_a, side_b = _sides(visit, asked)
    with (
        Store.open(visit.place.run(side_a.run) / RECORD, readonly=True) as store_a,
        Store.open(visit.place.run(side_b.run) / RECORD, readonly=True) as store_b,
    ):
        groups_a = store_a.asked(_filter(side_a, asked))
        groups_b, matched = _matched(groups_a, side_b, store_b, asked)
        if side_a.run == side_b.run:
            matched = [(a, b) for a, b in matched if a.draw != b.draw]
        pairs = _scored(matched[:MOST_PROMPTS], store_a, store_b)
        here = cut(in_order(pairs, asked.order), asked.page, PER_PAGE)
        shown_pairs = [_told(each, store_a, store_b) for each in here.rows]
        tasks = store_a.tasks(MOST_TASKS + 1)
    data: dict[str, Any] = {
        "asked": asked.model_dump(),
        "a": asdict(side_a),
        "b": asdict(side_b),
        "summary": summary_of(pairs),
        "pairs": shown_pairs,
        "page": here.page,
        "pages": here.pages,
        "orders": ORDERS,
        "tasks": tasks,
        "most_tasks": MOST_TASKS,
        "scored_otherwise": _scored_otherwise(visit, side_a.run, side_b.run),
        "limits": {
            "groups": MOST_GROUPS if MOST_GROUPS in (len(groups_a), len(groups_b)) else None,
            "prompts": MOST_PROMPTS if len(matched) > MOST_PROMPTS else None,
        },
    }
    return Page("answers_compare.html", data)


def _sides(visit: Visit, asked: AnswersQuery) -> tuple[Side, Side]:
    if not asked.a or not asked.b:
        raise UsageError(
            "Say whose answers are to be compared: ?a=RUN&b=RUN, each with @STEP for those until a step."
        )
    a, b = _side(visit, asked.a), _side(visit, asked.b)
    if a == b and a.until is None:
        return Side(a.run, None, oldest=True), b
    return a, b


def _side(visit: Visit, reference: str) -> Side:
    path, step = visit.place.run_and_step(reference)
    return Side(path.name, step)


def _filter(side: Side, asked: AnswersQuery) -> AskedFilter:
    return AskedFilter(side.until, asked.example, asked.task, side.oldest, MOST_GROUPS)


def _matched(
    groups_a: Sequence[GroupAsked], side_b: Side, store_b: Store, asked: AnswersQuery
) -> tuple[list[GroupAsked], list[tuple[GroupAsked, GroupAsked]]]:
    """The groups of B that were looked at, and those that match; an example has the same number in B, or another where the data differ."""
    wanted = _filter(side_b, asked)
    groups = store_b.asked(wanted)
    found = matches(groups_a, groups)
    if found or asked.example is None:
        return groups, found
    groups = store_b.asked(replace(wanted, example=None))
    return groups, matches(groups_a, groups)


def matches(
    a: Sequence[GroupAsked], b: Sequence[GroupAsked]
) -> list[tuple[GroupAsked, GroupAsked]]:
    """The groups of the prompts that both have, each time the first one, in the order of A.

    By text and number of the example; of what is left, because the data are others or have shifted, the text alone decides.
    """
    found: list[tuple[GroupAsked, GroupAsked]] = []
    seen_a: set[Key] = set()
    seen_b: set[Key] = set()
    for key in (_numbered, _text):
        of_b = _firsts([each for each in b if _numbered(each) not in seen_b], key)
        left = [each for each in a if _numbered(each) not in seen_a]
        pairs = [(each, of_b[name]) for name, each in _firsts(left, key).items() if name in of_b]
        seen_a |= {_numbered(each) for each, _ in pairs}
        seen_b |= {_numbered(each) for _, each in pairs}
        found += pairs
    places = {each.draw: place for place, each in enumerate(a)}
    return sorted(found, key=lambda pair: places[pair[0].draw])


def _numbered(group: GroupAsked) -> Key:
    return group.example, group.prompt


def _text(group: GroupAsked) -> Key:
    return group.prompt


def _firsts(
    groups: Sequence[GroupAsked], key: Callable[[GroupAsked], Key]
) -> dict[Key, GroupAsked]:
    found: dict[Key, GroupAsked] = {}
    for each in groups:
        found.setdefault(key(each), each)
    return found


def _scored(
    matched: Sequence[tuple[GroupAsked, GroupAsked]], store_a: Store, store_b: Store
) -> list[Pair]:
    scores_a = store_a.scores(a.draw for a, _ in matched)
    scores_b = store_b.scores(b.draw for _, b in matched)
    none = GroupScore(None, None)
    return [
        Pair(a.prompt, a, b, scores_a.get(a.draw, none), scores_b.get(b.draw, none))
        for a, b in matched
    ]


def in_order(pairs: Sequence[Pair], order: str) -> list[Pair]:
    """Sort pairs; `better` and `worse` keep only such pairs. Pairs that cannot be compared come last."""
    told = [(each, each.difference) for each in pairs]
    if order == "better":
        return [each for each, by in sorted(told, key=_by(-1)) if by is not None and by > 0]
    if order == "worse":
        return [each for each, by in sorted(told, key=_by(1)) if by is not None and by < 0]
    return [each for each, _ in sorted(told, key=lambda pair: -1 if pair[1] is None else abs(pair[1]), reverse=True)]  # fmt: skip


def _by(sign: int) -> Callable[[tuple[Pair, float | None]], float]:
    return lambda pair: sign * (pair[1] or 0.0)


def summary_of(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Summary over all prompts that both have answered."""
    compared = [(each, by) for each in pairs if (by := each.difference) is not None]
    return {
        "prompts": len(pairs),
        "compared": len(compared),
        "mean_a": _mean([each.score_a.mean or 0.0 for each, _ in compared]),
        "mean_b": _mean([each.score_b.mean or 0.0 for each, _ in compared]),
        "better": sum(by > 0 for _, by in compared),
        "worse": sum(by < 0 for _, by in compared),
        "equal": sum(by == 0 for _, by in compared),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _told(pair: Pair, store_a: Store, store_b: Store) -> dict[str, Any]:
    return {
        "prompt": pair.prompt,
        "difference": pair.difference,
        "a": _answers(pair.a, pair.score_a, store_a),
        "b": _answers(pair.b, pair.score_b, store_b),
    }


def _answers(group: GroupAsked, score: GroupScore, store: Store) -> dict[str, Any]:
    members = store.rollouts(RolloutFilter(draw=group.draw, limit=MOST_MEMBERS), LISTED)
    return {
        "draw": group.draw,
        "step": group.step,
        "example": group.example,
        **asdict(score),
        "members": [asdict(each) for each in sorted(members, key=_best_first)],
    }


def _best_first(view: RolloutView) -> tuple[bool, float]:
    return view.reward is None, -(view.reward or 0.0)


def _scored_otherwise(visit: Visit, a: str, b: str) -> list[str]:
    """The settings by which the two may have given other rewards for the same answer."""
    if a == b:
        return []
    configs: dict[str, Mapping[str, Any]] = {}
    for name in (a, b):
        with suppress(StoreError):  # of a run that ended before it had one
            configs[name] = read_config(visit.place.run(name))
    return [key for key in differences(configs) if key.startswith(SCORING)]


ROUTES = (shown("/rollouts/compare", compare),)
