"""Evaluations of a run: their metrics, pass@k as curves over k, and two of them compared prompt by prompt with intervals."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from groupwise.errors import UsageError
from groupwise.review.compare import Comparison, compare_sides, find_side
from groupwise.runs.folder import RECORD
from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store
from groupwise.web.pages import Page, Query, Visit, live_of, shown
from groupwise.web.runs.overview import head_of, told

PASS = re.compile(r"pass@(\d+)")
CHANGED = 100
"""Prompts of a comparison that are listed."""


def evaluations(visit: Visit) -> Page:
    """All of a run."""
    path = visit.place.run(visit.named("run"))
    with Store.open(path / RECORD, readonly=True) as store:
        found = store.evaluations(rows=False)
    names = sorted({name for each in found for name in each.metrics})
    data = {
        **head_of(visit, path),
        "evaluations": told(found),
        "names": names,
        "pass_at": pass_curves(found),
    }
    return Page("evaluations.html", data, live=live_of(path.name))


def pass_curves(found: list[EvaluationRecord]) -> list[dict[str, Any]]:
    """pass@k of each evaluation over k, as far as it was measured for several."""
    curves: list[dict[str, Any]] = []
    for each in found:
        points = sorted(
            (int(match[1]), value)
            for name, value in each.metrics.items()
            if (match := PASS.fullmatch(name))
        )
        if len(points) > 1:
            label = f"{each.name} after {each.step} steps"
            curves.append(
                {"label": label, "k": [k for k, _ in points], "y": [v for _, v in points]}
            )
    return curves


class Asked(Query):
    """Which two: `RUN@STEP`, or `RUN` for its newest evaluation."""

    a: str = ""
    b: str = ""


def compare(visit: Visit) -> Page:
    """Two policies on the same held-out prompts."""
    asked = visit.query(Asked)
    if not asked.a or not asked.b:
        raise UsageError("Choose two evaluations to compare: ?a=RUN@STEP&b=RUN@STEP.")
    runs_dir = visit.place.runs.folder
    sides = [find_side(_here(visit, each), runs_dir) for each in (asked.a, asked.b)]
    found: Comparison = compare_sides(*sides)
    data = {
        "asked": asked.model_dump(),
        "a": found.a.label,
        "b": found.b.label,
        "prompts": found.prompts,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "metrics": [asdict(each) for each in found.metrics],
        "notes": list(found.notes),
        "changed": [asdict(each) for each in found.changed[:CHANGED]],
        "all_changed": len(found.changed),
        "config": {key: list(change) for key, change in found.config.items()},
    }
    return Page("evaluations_compare.html", data)


def _here(visit: Visit, reference: str) -> str:
    """A run of this dashboard, with the step where one was said; a path elsewhere is none."""
    name, at, step = reference.rpartition("@")
    if at and step.isdecimal():
        return f"{visit.place.run(name)}@{step}"
    return str(visit.place.run(reference))


ROUTES = (
    shown("/runs/{run}/evaluations", evaluations),
    shown("/evaluations/compare", compare),
)
