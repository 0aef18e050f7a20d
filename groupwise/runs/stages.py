"""A run and the warm-up that it began from, as one curve: the warm-up's steps count down to 0, where the run's own begin."""

from __future__ import annotations

from pathlib import Path

from groupwise.errors import StoreError
from groupwise.runs.folder import RECORD
from groupwise.runs.store import Store

WARM_UP = "warm_up"
"""The fact about a run that names the run, in the same folder of runs, which it was warmed up by."""


def warm_up_curve(run: Path, metric: str) -> list[tuple[float, float]]:
    """Points of a metric over the steps of the warm-up, the last of them at 0; none where there was no warm-up, or it is gone.

    Of `reward` and its parts they are what the warm-up's evaluations found in the completions that it drew.
    """
    name = Store.facts(run / RECORD).get(WARM_UP)
    record = run.parent / name / RECORD if name else None
    if record is None or not record.is_file():
        return []
    try:
        with Store.open(record, readonly=True) as store:
            last = (store.last_step() or 0) + 1
            of_steps = store.metrics([metric]).get(metric, [])
            of_evaluations = [
                (e.step, e.metrics.get(metric)) for e in store.evaluations(rows=False)
            ]
    except StoreError:
        return []
    points = of_steps or [(step, value) for step, value in of_evaluations if value is not None]
    return [(step - last, value) for step, value in points]
