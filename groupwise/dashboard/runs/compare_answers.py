"""Compares two policies' answers to the same prompts: of two runs, or of one run at two of its steps.

Each side is a run until a step. For each prompt that both have answered, the newest group of each side is used (if a run is
compared with itself without a step: the oldest and the newest). The prompts whose rewards differ most come first.

A run may have a hundred thousand groups. `MAX_GROUPS` groups of each side are read, and the rewards of `MAX_PROMPTS` prompts are
compared; the page says if these limits left something out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from groupwise.core.errors import StoreError, UsageError
from groupwise.dashboard.pages import LARGEST, Page, Query, Visit, page_route, paginate
from groupwise.dashboard.runs.compare_runs import differences
from groupwise.dashboard.runs.rollouts import LISTED, MAX_TASKS
from groupwise.runs.folder import RECORD, read_config
from groupwise.runs.records import CompletedPrompt, GroupScore, RolloutFilter
from groupwise.runs.search import PromptFilter
from groupwise.runs.store import Store

PER_PAGE = 10
MAX_GROUPS = 10_000
"""Most groups of each side that are read."""
MAX_PROMPTS = 3_000
"""Most prompts, answered by both, whose rewards are read."""
MAX_MEMBERS = 64
"""Most members of a group that are shown."""
ORDERS = {
    "changed": "largest difference first",
    "better": "where B is better",
    "worse": "where B is worse",
}
SCORING = ("rewards.", "task.", "rollout.")
"""Settings that define the meaning of a reward."""
Key = tuple[int, str] | str
"""Identifies a prompt: its example number and text if both sides have the same data, else only its text."""


class CompareAnswersQuery(Query):
    """Parameters of a comparison: two sides, and which prompts. A side is `RUN`, or `RUN@STEP` for its answers until that step."""

    a: str = ""
    b: str = ""
    example: int | None = Field(None, ge=0, le=LARGEST)
    """The number of an example in A."""
    task: str | None = None
    order: Literal["changed", "better", "worse"] = "changed"
    page: int = Field(1, ge=1)


@dataclass(frozen=True, slots=True)
class Side:
    """A policy whose answers are compared."""

    run: str
    until: int | None
    oldest: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt that both have answered."""

    prompt: str
    a: CompletedPrompt
    b: CompletedPrompt
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
    query = visit.query(CompareAnswersQuery)
    if not query.a or not query.b:
        raise UsageError(
            "Say whose answers are to be compared: ?a=RUN&b=RUN, each with @STEP for those until a step."
        )
    (path_a, step_a), (path_b, step_b) = map(visit.context.run_and_step, (query.a, query.b))
    itself = path_a.name == path_b.name and step_a is None and step_b is None
    side_a = Side(path_a.name, step_a, oldest=itself)
    side_b = Side(path_b.name, step_b)
    with (
        Store.open(path_a / RECORD, readonly=True) as store_a,
        Store.open(path_b / RECORD, readonly=True) as store_b,
    ):
        groups_a = store_a.completed_prompts(_asked_filter(side_a, query))
        filter_b = _asked_filter(side_b, query)
        groups_b = store_b.completed_prompts(filter_b)
        matched = match_groups(groups_a, groups_b)
        if not matched and query.example is not None:
            # The data differ, so the example has another number in B.
            groups_b = store_b.completed_prompts(replace(filter_b, example=None))
            matched = match_groups(groups_a, groups_b)
        if side_a.run == side_b.run:
            matched = [(a, b) for a, b in matched if a.draw != b.draw]
        compared = matched[:MAX_PROMPTS]
        scores_a = store_a.scores(a.draw for a, _ in compared)
        scores_b = store_b.scores(b.draw for _, b in compared)
        no_score = GroupScore(None, None)
        pairs = [
            Pair(a.prompt, a, b, scores_a.get(a.draw, no_score), scores_b.get(b.draw, no_score))
            for a, b in compared
        ]
        list_page = paginate(sort_pairs(pairs, query.order), query.page, PER_PAGE)
        shown_pairs = [
            {
                "prompt": pair.prompt,
                "difference": pair.difference,
                "a": _side_data(pair.a, pair.score_a, store_a),
                "b": _side_data(pair.b, pair.score_b, store_b),
            }
            for pair in list_page.rows
        ]
        tasks = store_a.tasks(MAX_TASKS + 1)
    data: dict[str, Any] = {
        "asked": query.model_dump(),
        "a": asdict(side_a),
        "b": asdict(side_b),
        "summary": summarize(pairs),
        "pairs": shown_pairs,
        "page": list_page.page,
        "pages": list_page.pages,
        "orders": ORDERS,
        "tasks": tasks,
        "most_tasks": MAX_TASKS,
        "scored_otherwise": _reward_settings_that_differ(path_a, path_b),
        "limits": {
            "groups": MAX_GROUPS if MAX_GROUPS in (len(groups_a), len(groups_b)) else None,
            "prompts": MAX_PROMPTS if len(matched) > MAX_PROMPTS else None,
        },
    }
    return Page("answers_compare.html", data)


def _asked_filter(side: Side, query: CompareAnswersQuery) -> PromptFilter:
    return PromptFilter(side.until, query.example, query.task, side.oldest, MAX_GROUPS)


def match_groups(
    a: Sequence[CompletedPrompt], b: Sequence[CompletedPrompt]
) -> list[tuple[CompletedPrompt, CompletedPrompt]]:
    """The first group on each side for each prompt that both have, in the order of A.

    Groups are matched by example number and text; the rest, from different or shifted data, by text only.
    """
    pairs_by_key: list[tuple[CompletedPrompt, CompletedPrompt]] = []
    seen_a: set[Key] = set()
    seen_b: set[Key] = set()
    for key in (_example_key, _prompt_key):
        of_b = _first_by_key([group for group in b if _example_key(group) not in seen_b], key)
        unmatched = [group for group in a if _example_key(group) not in seen_a]
        pairs = [
            (group, of_b[name])
            for name, group in _first_by_key(unmatched, key).items()
            if name in of_b
        ]
        seen_a |= {_example_key(group) for group, _ in pairs}
        seen_b |= {_example_key(group) for _, group in pairs}
        pairs_by_key += pairs
    order = {group.draw: index for index, group in enumerate(a)}
    return sorted(pairs_by_key, key=lambda pair: order[pair[0].draw])


def _example_key(group: CompletedPrompt) -> Key:
    return group.example, group.prompt


def _prompt_key(group: CompletedPrompt) -> Key:
    return group.prompt


def _first_by_key(
    groups: Sequence[CompletedPrompt], key: Callable[[CompletedPrompt], Key]
) -> dict[Key, CompletedPrompt]:
    first_groups: dict[Key, CompletedPrompt] = {}
    for group in groups:
        first_groups.setdefault(key(group), group)
    return first_groups


def sort_pairs(pairs: Sequence[Pair], order: str) -> list[Pair]:
    """Sort pairs; `better` and `worse` keep only pairs in which B is better or worse. Pairs that cannot be compared come last."""
    comparable = [(pair, by) for pair in pairs if (by := pair.difference) is not None]
    if order == "better":
        return [pair for pair, by in sorted(comparable, key=lambda entry: -entry[1]) if by > 0]
    if order == "worse":
        return [pair for pair, by in sorted(comparable, key=lambda entry: entry[1]) if by < 0]
    ranked = [pair for pair, _ in sorted(comparable, key=lambda entry: -abs(entry[1]))]
    return ranked + [pair for pair in pairs if pair.difference is None]


def summarize(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Summary over all prompts that both have answered."""
    compared = [(pair, by) for pair in pairs if (by := pair.difference) is not None]
    return {
        "prompts": len(pairs),
        "compared": len(compared),
        "mean_a": _mean([pair.score_a.mean or 0.0 for pair, _ in compared]),
        "mean_b": _mean([pair.score_b.mean or 0.0 for pair, _ in compared]),
        "better": sum(by > 0 for _, by in compared),
        "worse": sum(by < 0 for _, by in compared),
        "equal": sum(by == 0 for _, by in compared),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _side_data(group: CompletedPrompt, score: GroupScore, store: Store) -> dict[str, Any]:
    members = store.rollouts(RolloutFilter(group=group.draw + 1, limit=MAX_MEMBERS), LISTED)
    members = sorted(members, key=lambda member: (member.reward is None, -(member.reward or 0.0)))
    return {
        "group": group.draw + 1,
        "step": group.step,
        "example": group.example,
        **asdict(score),
        "members": [asdict(row) for row in members],
    }


def _reward_settings_that_differ(a: Path, b: Path) -> list[str]:
    """Settings that differ between the two runs and may change the rewards of the same answer."""
    if a == b:
        return []
    configs: dict[str, Mapping[str, Any]] = {}
    for path in (a, b):
        with suppress(StoreError):  # a run may end before it has a config
            configs[path.name] = read_config(path)
    return [key for key in differences(configs) if key.startswith(SCORING)]


ROUTES = (page_route("/rollouts/compare", compare),)
