"""Turns evaluations of a run into metrics, under the names by which curves and sinks know them.

eval/METRIC         of an evaluation that the training made itself: before it, after some steps, after it
eval/LABEL/METRIC   of one that a callback made, a benchmark of each checkpoint say
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

from groupwise.runs.records import EvaluationRecord

EVAL = "eval"
"""How the names begin."""
OF_TRAINING = re.compile(r"before|after|step-\d+")
"""Names of the evaluations that a training makes itself; those that callbacks record have others."""

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
            if (known := _as_float(value)) is not None:
                curves.setdefault(f"{prefix_of(record)}/{name}", {})[record.step] = known
    return curves


def _as_float(value: object) -> float | None:
    """None for what is no number: callbacks record what they like."""
    with suppress(OverflowError):
        return float(value) if isinstance(value, int | float) else None
    return math.inf
