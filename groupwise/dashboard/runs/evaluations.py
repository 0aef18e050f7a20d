"""Evaluations of one run and of all: their metrics, pass@k as curves over k, a comparison of two prompt by prompt with intervals,
and the answers of one prompt by prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field

from groupwise.core.atomic_files import without_nan
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.dashboard.pages import Page, Query, Visit, live_url, page_route, paginate
from groupwise.dashboard.runs.curves import title_of
from groupwise.dashboard.runs.overview import run_header
from groupwise.dashboard.runs.run_list import contains_words, matches_words
from groupwise.dashboard.sources.evaluations import (
    EvaluationResult,
    evaluations_of,
    evaluations_outside_runs,
    pass_at_k_names,
    side_outside_runs,
)
from groupwise.dashboard.templates import line
from groupwise.runs.folder import RECORD
from groupwise.runs.store import Store
from groupwise.training.evaluation.measures import Row, by_prompt
from groupwise.training.review.compare import (
    UNDIRECTED_METRICS,
    Comparison,
    Side,
    compare_sides,
    side_of,
    split_reference,
)

PER_PAGE = 50
"""Prompts per page."""
MAX_CURVES = 12
"""Most pass@k curves in one plot, the newest."""
WITH_INTERVALS, WITH_INTERVALS_IN_ALL = 20, 2
"""Number of the newest evaluations of a run that get intervals, on the run's own page and in the list of all; each interval needs
all answers to be read.
"""
LONGEST = 1000
"""Most characters of an evaluation's reference."""
RUNS = 50
"""Runs per page in the list of all evaluations."""
MAX_OF_EACH = 20
"""Most evaluations of a run in the list of all, the newest."""
MAX_METRICS = 8
"""Most columns of that list: the most common metrics."""
LEADING_METRICS = ("reward", "pass@1")
"""Metrics that come first."""
MAX_SAMPLES = 32
"""Most answers to one prompt that a page shows."""
FILTERS = {
    "all": "all",
    "never": "no answer succeeds",
    "sometimes": "some answers do",
    "always": "all answers do",
}
"""Prompts by how many of their answers succeed, as counted by pass@k; if success is not known, by how many earn the highest reward
of all.
"""


def evaluations(visit: Visit) -> Page:
    """All of a run."""
    path = visit.context.run(visit.path_part("run"))
    with Store.open(path / RECORD, readonly=True) as store:
        results = evaluations_of(path, store, intervals=WITH_INTERVALS)
    names = _order_metrics(name for evaluation in results for name in evaluation.metrics)
    # pass@k over k, with its interval if known, for the newest evaluations that have several k.
    curves: list[dict[str, Any]] = []
    for evaluation in results:
        metrics_by_k = pass_at_k_names(evaluation.metrics)
        if len(metrics_by_k) < 2:
            continue
        label = (
            evaluation.name if evaluation.file is None else f"{evaluation.name} ({evaluation.file})"
        )
        if evaluation.step is not None:
            label += f" after {evaluation.step} steps"
        bounds = [evaluation.intervals.get(name, (None, None)) for name in metrics_by_k.values()]
        curves.append(
            {
                "label": line(label),
                "k": list(metrics_by_k),
                "y": [evaluation.metrics[name] for name in metrics_by_k.values()],
                "low": [low for low, _ in bounds],
                "high": [high for _, high in bounds],
            }
        )
    data = {
        **run_header(visit, path),
        "evaluations": [asdict(evaluation) for evaluation in results],
        "titles": {name: title_of(name) for name in names},
        "pass_at": without_nan(curves[-MAX_CURVES:]),
    }
    return Page("evaluations.html", data, live=live_url(path.name))


class EvaluationsQuery(Query):
    """Parameters of the list of all evaluations."""

    q: str = ""
    """Words that occur in their name, model or task; for results outside runs, in policy, task or file."""
    page: int = Field(1, ge=1)


def all_evaluations(visit: Visit) -> Page:
    """Evaluations of all runs, newest run first, and on the first page also those outside runs: to compare any two."""
    query, all_runs = visit.query(EvaluationsQuery), visit.context.runs.all_runs()
    runs = [
        run.info.path
        for run in all_runs.runs
        if not run.info.broken and matches_words(run, query.q)
    ]
    list_page = paginate(runs, query.page, RUNS)
    results: list[tuple[str, EvaluationResult]] = []
    for path in list_page.rows:
        # A run that cannot be read is skipped; the list of runs shows it.
        with suppress(GroupwiseError), Store.open(path / RECORD, readonly=True) as store:
            of_run = evaluations_of(path, store, intervals=WITH_INTERVALS_IN_ALL)
            # newest first, those without a step last
            of_run.sort(
                key=lambda evaluation: (
                    evaluation.step is not None,
                    evaluation.step or 0,
                    evaluation.at,
                ),
                reverse=True,
            )
            results += [(path.name, evaluation) for evaluation in of_run[:MAX_OF_EACH]]
    if list_page.page == 1:
        outside_runs = evaluations_outside_runs(visit.context.runs.folder)
        results += [
            ("", evaluation)
            for evaluation in outside_runs
            if contains_words(query.q, (evaluation.policy, evaluation.name, evaluation.file))
        ]
    names = _order_metrics(name for _, evaluation in results for name in evaluation.metrics)
    data = {
        "asked": query.model_dump(),
        "folder": str(visit.context.runs.folder),
        "page": list_page.page,
        "pages": list_page.pages,
        "unread": all_runs.unread,
        "evaluations": [{"run": run, **asdict(evaluation)} for run, evaluation in results],
        "titles": {name: title_of(name) for name in names[:MAX_METRICS]},
    }
    return Page("evaluations_all.html", data, live="/live")


def _order_metrics(names: Iterable[str]) -> list[str]:
    """The metrics in order: reward and pass@1, then the most common ones; metrics that do not measure success come last."""
    counts = Counter(names)

    def place(name: str) -> tuple[int, int, str]:
        rank = (
            LEADING_METRICS.index(name)
            if name in LEADING_METRICS
            else len(LEADING_METRICS) + (name in UNDIRECTED_METRICS)
        )
        return rank, -counts[name], name

    return sorted(counts, key=place)


class EvaluationQuery(Query):
    """Parameters of a comparison.

    Both are named `RUN@STEP:NAME`, `RUN:FILE.json` of its results, `RUN@STEP`, or `RUN` for its newest evaluation; of no run are
    `:FILE.json`, among the runs, and `:results/FILE.json`, next to them.
    """

    a: str = Field("", max_length=LONGEST)
    b: str = Field("", max_length=LONGEST)
    page: int = Field(1, ge=1)


def compare(visit: Visit) -> Page:
    """Two policies on the same held-out prompts."""
    query = visit.query(EvaluationQuery)
    if not query.a or not query.b:
        raise UsageError("Choose two evaluations to compare: ?a=RUN@STEP&b=RUN@STEP.")
    comparison: Comparison = compare_sides(find_side(visit, query.a), find_side(visit, query.b))
    # pass@k over k of both, if both measured several k
    metrics = {metric.name: metric for metric in comparison.metrics}
    metrics_by_k = pass_at_k_names(metrics)
    curve_metrics = (
        [metrics[name] for name in metrics_by_k.values()] if len(metrics_by_k) >= 2 else []
    )
    unknown = [None] * len(curve_metrics)
    pass_at = [
        {"label": side, "k": list(metrics_by_k), "y": values, "low": unknown, "high": unknown}
        for side, values in (
            ("A", [metric.a for metric in curve_metrics]),
            ("B", [metric.b for metric in curve_metrics]),
        )
        if curve_metrics
    ]
    list_page = paginate(comparison.changed, query.page, PER_PAGE)
    data = {
        "asked": query.model_dump(),
        "a": comparison.a.label,
        "b": comparison.b.label,
        "supervised": comparison.a.supervised,
        "prompts": comparison.prompts,
        "only_a": comparison.only_a,
        "only_b": comparison.only_b,
        "metrics": [asdict(metric) for metric in comparison.metrics],
        "pass_at": without_nan(pass_at),
        "notes": list(comparison.notes),
        "changed": [asdict(row) for row in list_page.rows],
        "all_changed": len(comparison.changed),
        "page": list_page.page,
        "pages": list_page.pages,
        "config": {key: list(change) for key, change in comparison.config.items()},
    }
    return Page("evaluations_compare.html", data)


def find_side(visit: Visit, reference: str) -> Side:
    """An evaluation of this dashboard; a path outside of it is not accepted."""
    if reference.startswith(":"):
        return side_outside_runs(visit.context.runs.folder, reference)
    return side_of(*split_reference(reference, visit.context.run_and_step))


class AnswersQuery(Query):
    """Parameters of the answers of an evaluation."""

    of: str = Field("", max_length=LONGEST)
    """The evaluation, named as in a comparison."""
    show: Literal["all", "never", "sometimes", "always"] = "all"
    page: int = Field(1, ge=1)


def answers(visit: Visit) -> Page:
    """The prompts with the lowest rewards come first."""
    query = visit.query(AnswersQuery)
    if not query.of:
        raise UsageError("Say of which evaluation: ?of=RUN@STEP.")
    evaluation = find_side(visit, query.of)
    if evaluation.supervised or not evaluation.rows:
        raise UsageError(
            f"{evaluation.label} has no answers: it was evaluated by the loss on given ones."
        )
    best = None
    if all(row.get("success") is None for row in evaluation.rows):
        # Success is not recorded, so answers with the highest reward of all count as successful.
        best = max(_finite_rewards(evaluation.rows), default=math.inf)
    prompts = [_prompt_with_answers(rows, best) for rows in by_prompt(evaluation.rows).values()]
    counts = Counter(prompt["solved"] for prompt in prompts)
    matching = [prompt for prompt in prompts if query.show in ("all", prompt["solved"])]
    matching.sort(key=lambda prompt: (prompt["mean"] is not None, prompt["mean"] or 0.0))
    list_page = paginate(matching, query.page, PER_PAGE)
    data = {
        "asked": query.model_dump(),
        "label": evaluation.label,
        "metrics": dict(evaluation.metrics),
        "all": len(prompts),
        "counts": {name: counts[name] for name in FILTERS if name != "all"},
        "shows": FILTERS,
        "prompts": list_page.rows,
        "page": list_page.page,
        "pages": list_page.pages,
    }
    return Page("evaluation_answers.html", data)


def _finite_rewards(rows: Sequence[Row]) -> list[float]:
    rewards = (row["reward"] for row in rows if row["reward"] is not None)
    return [reward for reward in rewards if math.isfinite(reward)]


def _prompt_with_answers(rows: Sequence[Row], best: float | None) -> dict[str, Any]:
    """A prompt with its answers. `best`: the reward at which an answer counts as successful; None if `success` is recorded."""
    rewards = _finite_rewards(rows)
    judged = [row.get("success") if best is None else row["reward"] == best for row in rows]
    verdicts = [bool(verdict) for verdict in judged if verdict is not None]
    solved = "never" if not any(verdicts) else "always" if all(verdicts) else "sometimes"
    return {
        "prompt": rows[0]["prompt"],
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "solved": solved,
        "answers": [
            {
                "reward": row["reward"],
                "outcome": row["outcome"],
                "completion": row["completion"],
                "tokens": row.get("written", row["tokens"]),
                "truncated": bool(row.get("truncated")),
                "parts": row["parts"],
            }
            for row in rows[:MAX_SAMPLES]
        ],
        "more": max(0, len(rows) - MAX_SAMPLES),
    }


ROUTES = (
    page_route("/runs/{run}/evaluations", evaluations),
    page_route("/evaluations", all_evaluations),
    page_route("/evaluations/compare", compare),
    page_route("/evaluations/answers", answers),
)
