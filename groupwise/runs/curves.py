"""Curves of a run in addition to the metrics of its steps: those of its evaluations, and that of its warm-up, whose steps end at 0.

Evaluation metrics have these names in curves and sinks:

eval/METRIC         of an evaluation that the training itself ran: before it, after some steps, after it
eval/LABEL/METRIC   of an evaluation that a callback ran, e.g. a benchmark of each checkpoint
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from groupwise.core.errors import StoreError
from groupwise.core.terminal.plot import svg_curve, with_mean
from groupwise.runs.folder import RECORD
from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store

EVAL = "eval"
"""The prefix of the names."""
OF_TRAINING = re.compile(r"before|after|step-\d+")
"""Names of the evaluations that a training runs itself; callbacks use other names."""

WARM_UP = "warm_up"
"""Key of the fact, in a run's record, that names its warm-up: a run in the same folder."""
WARM_UP_SUMMARY = "warm_up_summary"
"""Key of the fact that holds the summary of the warm-up, which the run's own summary repeats."""

Curve = dict[int, float]
"""Value by number of steps done."""


def prefix_of(record: EvaluationRecord) -> str:
    """The prefix of its metrics' names, without the final slash."""
    return EVAL if OF_TRAINING.fullmatch(record.name) else f"{EVAL}/{record.name}"


def metrics_of(record: EvaluationRecord) -> Mapping[str, float]:
    """Its metrics under their plain names, without the `eval_` that some commands add."""
    return {name.removeprefix(f"{EVAL}_"): value for name, value in record.metrics.items()}


def curves_of(records: Iterable[EvaluationRecord]) -> dict[str, Curve]:
    """The curve of each metric, by its full name; if several evaluations have the same number of steps, the last one counts."""
    curves: dict[str, Curve] = {}
    for record in sorted(records, key=lambda entry: entry.step):
        for name, value in metrics_of(record).items():
            if not isinstance(cast("object", value), int | float):
                continue  # callbacks may record any value
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            curves.setdefault(f"{prefix_of(record)}/{name}", {})[record.step] = number
    return curves


def svg_of(store: Store, metric: str, title: str) -> str:
    """The curve of a metric over all steps as SVG, after that of the warm-up; empty if there are no values."""
    points = store.metrics([metric]).get(metric, [])
    warm_up = warm_up_curve(store.path.parent, metric)
    return svg_curve(with_mean(metric, points, warm_up), title=title) if points else ""


def warm_up_curve(run: Path, metric: str) -> list[tuple[float, float]]:
    """Points (step, value) of a metric during the warm-up, with steps counted so that the warm-up ends at 0.

    Empty if the run had no warm-up, or if the warm-up's folder was deleted. Values come from its steps; a metric that its steps lack, such
    as `reward`, comes from its evaluations, if these draw completions (`eval.completions`).
    """
    name = Store.facts(run / RECORD).get(WARM_UP)
    record = run.parent / name / RECORD if name else None
    if record is None or not record.is_file():
        return []
    try:
        with Store.open(record, readonly=True) as store:
            done = store.step_count()
            step_points = store.metrics([metric]).get(metric, [])
            evaluation_points = [
                (e.step, e.metrics.get(metric)) for e in store.evaluations(rows=False)
            ]
    except StoreError:
        return []
    points = step_points or [
        (step, value) for step, value in evaluation_points if value is not None
    ]
    return [(step - done, value) for step, value in points]
