"""A run's record of its warm-up, and the warm-up's curve: its steps count down to 0, where the run's begin."""

from __future__ import annotations

from pathlib import Path

from groupwise.core.errors import StoreError
from groupwise.runs.folder import RECORD
from groupwise.runs.store import Store

WARM_UP = "warm_up"
"""The fact in a run's record that names its warm-up, a run in the same folder."""
WARM_UP_SUMMARY = "warm_up_summary"
"""The fact that keeps what the run's summary says of the warm-up."""


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
