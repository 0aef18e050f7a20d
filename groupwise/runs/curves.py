"""Curves of a run beside the metrics of its steps: those of its evaluations, and that of its warm-up, whose steps count down to 0.

Curves and sinks know the metrics of evaluations by these names:

eval/METRIC         of an evaluation that the training made itself: before it, after some steps, after it
eval/LABEL/METRIC   of one that a callback made, a benchmark of each checkpoint say
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from groupwise.core.errors import StoreError
from groupwise.runs.folder import RECORD
from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store

EVAL = "eval"
"""How the names begin."""
OF_TRAINING = re.compile(r"before|after|step-\d+")
"""Names of the evaluations that a training makes itself; those that callbacks record have others."""

WARM_UP = "warm_up"
"""The fact in a run's record that names its warm-up, a run in the same folder."""
WARM_UP_SUMMARY = "warm_up_summary"
"""The fact that keeps what the run's summary says of the warm-up."""

Curve = dict[int, float]
"""Value by steps done."""


def prefix_of(record: EvaluationRecord) -> str:
    """The prefix of its metrics' names, with a slash."""
    return EVAL if OF_TRAINING.fullmatch(record.name) else f"{EVAL}/{record.name}"


def metrics_of(record: EvaluationRecord) -> Mapping[str, float]:
    """Its metrics under their plain names, whatever the command that trains calls them."""
    return {name.removeprefix(f"{EVAL}_"): value for name, value in record.metrics.items()}


def curves_of(records: Iterable[EvaluationRecord]) -> dict[str, Curve]:
    """The curve of each metric, by its whole name; of several evaluations after as many steps the last one counts."""
    curves: dict[str, Curve] = {}
    for record in sorted(records, key=lambda each: each.step):
        for name, value in metrics_of(record).items():
            if not isinstance(cast("object", value), int | float):
                continue  # callbacks record what they like
            try:
                known = float(value)
            except OverflowError:
                known = math.inf
            curves.setdefault(f"{prefix_of(record)}/{name}", {})[record.step] = known
    return curves


def warm_up_curve(run: Path, metric: str) -> list[tuple[float, float]]:
    """Points (step, value) of a metric during the warm-up, with steps counted so that the warm-up ends at 0.

    Empty if the run had no warm-up, or if its folder was deleted. `reward` and its parts come from the warm-up's evaluations, which draw
    completions (`eval.completions`).
    """
    name = Store.facts(run / RECORD).get(WARM_UP)
    record = run.parent / name / RECORD if name else None
    if record is None or not record.is_file():
        return []
    try:
        with Store.open(record, readonly=True) as store:
            last = store.last_step()
            done = 0 if last is None else last + 1
            of_steps = store.metrics([metric]).get(metric, [])
            of_evaluations = [
                (e.step, e.metrics.get(metric)) for e in store.evaluations(rows=False)
            ]
    except StoreError:
        return []
    points = of_steps or [(step, value) for step, value in of_evaluations if value is not None]
    return [(step - done, value) for step, value in points]
