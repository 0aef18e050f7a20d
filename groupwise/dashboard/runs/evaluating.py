"""Evaluations, of one run and of all: their metrics, pass@k as curves over k, and two of them compared prompt by prompt with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field

from groupwise.core.atomic_files import without_nan
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.dashboard.pages import Page, Query, Visit, cut, live_of, shown
from groupwise.dashboard.runs.listing import are_in, has_words
from groupwise.dashboard.runs.overview import head_of
from groupwise.dashboard.sources.evaluations import (
    Evaluated,
    beside,
    by_k,
    evaluations_of,
    side_beside,
)
from groupwise.dashboard.templates import line
from groupwise.runs.folder import RECORD
from groupwise.runs.store import Store
from groupwise.training.review.compare import (
    NO_MERIT,
    Comparison,
    Side,
    compare_sides,
    side_of,
    what_is_meant,
)

PER_PAGE = 50
"""Prompts that a page lists."""
MOST_CURVES = 12
"""Curves of pass@k in one picture, the newest."""
WITH_INTERVALS, WITH_INTERVALS_IN_ALL = 20, 2
"""Evaluations of a run, the newest, of which every answer is read for their intervals: on its own page, and in the list of all."""
LONGEST = 1000
"""Characters by which an evaluation is named."""
RUNS = 50
"""Runs whose evaluations one page lists."""
MOST_OF_EACH = 20
"""Evaluations of a run that the list of all has, the newest."""
MOST_METRICS = 8
"""Columns of that list, those that most have."""
FIRST = ("reward", "pass@1")
"""Metrics that come first."""


def evaluations(visit: Visit) -> Page:
    """All of a run."""
    path = visit.place.run(visit.named("run"))
    with Store.open(path / RECORD, readonly=True) as store:
        found = evaluations_of(path, store, intervals=WITH_INTERVALS)
    names = _columns(name for each in found for name in each.metrics)
    data = {
        **head_of(visit, path),
        "evaluations": [asdict(each) for each in found],
        "names": names,
        "pass_at": pass_curves(found),
    }
    return Page("evaluations.html", data, live=live_of(path.name))


class Listing(Query):
    """Of which runs."""

    q: str = ""
    """Words that stand in their name, model or task; of results beside the runs in policy, task or file."""
    page: int = Field(1, ge=1)


def every_evaluation(visit: Visit) -> Page:
    """Those of all runs, those that began last first, and on the first page those beside the runs: to compare any two."""
    asked, known = visit.query(Listing), visit.place.runs.known()
    runs = [
        each.info.path for each in known.runs if not each.info.broken and has_words(each, asked.q)
    ]
    here = cut(runs, asked.page, RUNS)
    found = [(path.name, each) for path in here.rows for each in _quietly(path)]
    if here.page == 1:
        there = beside(visit.place.runs.folder)
        found += [
            ("", each) for each in there if are_in(asked.q, (each.policy, each.name, each.file))
        ]
    data = {
        "asked": asked.model_dump(),
        "folder": str(visit.place.runs.folder),
        "page": here.page,
        "pages": here.pages,
        "unread": known.unread,
        "evaluations": [{"run": run, **asdict(each)} for run, each in found],
        "names": _columns(name for _, each in found for name in each.metrics)[:MOST_METRICS],
    }
    return Page("evaluations_all.html", data, live="/live")


def _columns(names: Iterable[str]) -> list[str]:
    """The metrics, what people look for first, then those that most have; what says nothing of success comes last."""
    counts = Counter(names)

    def place(name: str) -> tuple[int, int, str]:
        rank = FIRST.index(name) if name in FIRST else len(FIRST) + (name in NO_MERIT)
        return rank, -counts[name], name

    return sorted(counts, key=place)


def _quietly(path: Path) -> list[Evaluated]:
    """Evaluations of one run, the newest first; none if it cannot be read, which the list of runs shows."""
    with suppress(GroupwiseError), Store.open(path / RECORD, readonly=True) as store:
        found = evaluations_of(path, store, intervals=WITH_INTERVALS_IN_ALL)
        return sorted(found, key=_newness, reverse=True)[:MOST_OF_EACH]
    return []


def _newness(each: Evaluated) -> tuple[bool, int, float]:
    """Sort key that puts evaluations without a step last when the newest come first."""
    return each.step is not None, each.step or 0, each.at


def pass_curves(found: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """pass@k over k of the newest evaluations that have measured it for several, with its interval where that is known."""
    curves: list[dict[str, Any]] = []
    for each in found:
        named = by_k(each.metrics)
        if len(named) < 2:
            continue
        bounds = [each.intervals.get(name, (None, None)) for name in named.values()]
        curves.append(
            {
                "label": line(_label(each)),
                "k": list(named),
                "y": [each.metrics[name] for name in named.values()],
                "low": [low for low, _ in bounds],
                "high": [high for _, high in bounds],
            }
        )
    return without_nan(curves[-MOST_CURVES:])


def _label(each: Evaluated) -> str:
    name = each.name if each.file is None else f"{each.name} ({each.file})"
    return name if each.step is None else f"{name} after {each.step} steps"


class EvaluationQuery(Query):
    """Which two: `RUN@STEP:NAME`, `RUN:FILE.json` of its results, `RUN@STEP`, or `RUN` for its newest evaluation; of no run are
    `:FILE.json`, among the runs, and `:results/FILE.json`, beside them."""

    a: str = Field("", max_length=LONGEST)
    b: str = Field("", max_length=LONGEST)
    page: int = Field(1, ge=1)


def compare(visit: Visit) -> Page:
    """Two policies on the same held-out prompts."""
    asked = visit.query(EvaluationQuery)
    if not asked.a or not asked.b:
        raise UsageError("Choose two evaluations to compare: ?a=RUN@STEP&b=RUN@STEP.")
    found: Comparison = compare_sides(side(visit, asked.a), side(visit, asked.b))
    here = cut(found.changed, asked.page, PER_PAGE)
    data = {
        "asked": asked.model_dump(),
        "a": found.a.label,
        "b": found.b.label,
        "prompts": found.prompts,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "metrics": [asdict(each) for each in found.metrics],
        "pass_at": _pass_of_both(found),
        "notes": list(found.notes),
        "changed": [asdict(each) for each in here.rows],
        "all_changed": len(found.changed),
        "page": here.page,
        "pages": here.pages,
        "config": {key: list(change) for key, change in found.config.items()},
    }
    return Page("evaluations_compare.html", data)


def _pass_of_both(found: Comparison) -> list[dict[str, Any]]:
    """pass@k over k of both, where several k were measured of both."""
    metrics = {each.name: each for each in found.metrics}
    named = by_k(metrics)
    if len(named) < 2:
        return []
    ks, unknown, both = list(named), [None] * len(named), [metrics[name] for name in named.values()]
    sides = {"A": [each.a for each in both], "B": [each.b for each in both]}
    return without_nan(
        [
            {"label": side, "k": ks, "y": values, "low": unknown, "high": unknown}
            for side, values in sides.items()
        ]
    )


def side(visit: Visit, reference: str) -> Side:
    """An evaluation of this dashboard; a path elsewhere is none."""
    if reference.startswith(":"):
        return side_beside(visit.place.runs.folder, reference)
    return side_of(*what_is_meant(reference, visit.place.run_and_step))


ROUTES = (
    shown("/runs/{run}/evaluations", evaluations),
    shown("/evaluations", every_evaluation),
    shown("/evaluations/compare", compare),
)
