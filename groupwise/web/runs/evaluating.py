"""Evaluations of a run: their metrics, pass@k as curves over k, and two of them compared prompt by prompt with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import Field

from groupwise.errors import UsageError
from groupwise.review.compare import Comparison, Side, compare_sides, side_of, what_is_meant
from groupwise.runs.folder import RECORD
from groupwise.runs.store import Store
from groupwise.web.pages import Page, Query, Visit, live_of, shown
from groupwise.web.runs.evaluated import PASS, Evaluated, evaluations_of
from groupwise.web.runs.overview import head_of

CHANGED = 50
"""Prompts of a comparison that a page lists."""
MOST_CURVES = 12
"""Of pass@k in one picture, the newest."""


def evaluations(visit: Visit) -> Page:
    """All of a run."""
    path = visit.place.run(visit.named("run"))
    with Store.open(path / RECORD, readonly=True) as store:
        found = evaluations_of(path, store, intervals=True)
    names = sorted({name for each in found for name in each.metrics})
    data = {
        **head_of(visit, path),
        "evaluations": [asdict(each) for each in found],
        "names": names,
        "pass_at": pass_curves(found),
    }
    return Page("evaluations.html", data, live=live_of(path.name))


def pass_curves(found: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """pass@k over k of the newest evaluations that have measured it for several, with its interval where that is known."""
    curves: list[dict[str, Any]] = []
    for each in found:
        ks = sorted(int(match[1]) for name in each.metrics if (match := PASS.fullmatch(name)))
        if len(ks) < 2:
            continue
        bounds = [each.intervals.get(f"pass@{k}", (None, None)) for k in ks]
        curves.append(
            {
                "label": _label(each),
                "k": ks,
                "y": [each.metrics[f"pass@{k}"] for k in ks],
                "low": [low for low, _ in bounds],
                "high": [high for _, high in bounds],
            }
        )
    return curves[-MOST_CURVES:]


def _label(each: Evaluated) -> str:
    name = each.name if each.file is None else f"{each.name} ({each.file})"
    return name if each.step is None else f"{name} after {each.step} steps"


class Asked(Query):
    """Which two: `RUN@STEP:NAME`, `RUN:FILE.json` of its results, `RUN@STEP`, or `RUN` for its newest evaluation."""

    a: str = ""
    b: str = ""
    page: int = Field(1, ge=1)


def compare(visit: Visit) -> Page:
    """Two policies on the same held-out prompts."""
    asked = visit.query(Asked)
    if not asked.a or not asked.b:
        raise UsageError("Choose two evaluations to compare: ?a=RUN@STEP&b=RUN@STEP.")
    found: Comparison = compare_sides(_side(visit, asked.a), _side(visit, asked.b))
    here = found.changed[(asked.page - 1) * CHANGED : asked.page * CHANGED]
    data = {
        "asked": asked.model_dump(),
        "a": found.a.label,
        "b": found.b.label,
        "prompts": found.prompts,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "metrics": [asdict(each) for each in found.metrics],
        "notes": list(found.notes),
        "changed": [asdict(each) for each in here],
        "all_changed": len(found.changed),
        "pages": max(1, -(-len(found.changed) // CHANGED)),
        "config": {key: list(change) for key, change in found.config.items()},
    }
    return Page("evaluations_compare.html", data)


def _side(visit: Visit, reference: str) -> Side:
    """An evaluation of a run of this dashboard; a path elsewhere is none."""
    return side_of(*what_is_meant(reference, visit.place.run_and_step))


ROUTES = (
    shown("/runs/{run}/evaluations", evaluations),
    shown("/evaluations/compare", compare),
)
