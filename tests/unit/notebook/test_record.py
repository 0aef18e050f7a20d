"""What the record of a run answers, and what it refuses to be asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.errors import UsageError
from groupwise.notebook.record import Record
from groupwise.runs.folder import RECORD
from groupwise.runs.records import StepRecord
from groupwise.runs.store import Store


def record(folder: Path, steps: int, **metrics: float) -> Record:
    """Of a run that has done so many steps."""
    with Store.create(folder / RECORD) as store:
        for step in range(steps):
            store.commit_step(StepRecord(step, step, step, "f", (), 0.1, 0.0), [], metrics)
    return Record(folder)


def test_a_metric_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    run = record(tmp_path, 2, reward=0.5, kl=0.0)
    said = r"no metric 'rewrd'. Did you mean reward\? It has: kl, reward\."
    with pytest.raises(UsageError, match=said):
        run.metrics("kl", "rewrd")
    with pytest.raises(UsageError, match=said):
        run.plot("rewrd")
    assert run.metrics("reward") == {"reward": [(0, 0.5), (1, 0.5)]}


@pytest.mark.parametrize("step", [2, -1, "1", True])
def test_a_step_that_is_not_there_is_told_with_those_that_are(tmp_path: Path, step: Any) -> None:
    run = record(tmp_path, 2)
    with pytest.raises(UsageError, match=f"step is {step!r}, but there are 0 to 1"):
        run.table(step=step)
    assert run.table(step=np.int64(1)).rows == []  # pyright: ignore[reportArgumentType]


def test_before_the_first_step_there_is_nothing(tmp_path: Path) -> None:
    run = record(tmp_path, 0)
    assert run.metrics("reward") == {}
    assert "<img" in run.plot().as_html()
    assert run.table(step=0).rows == run.table().rows == []
    with pytest.raises(UsageError, match="step is 99, but no step is done yet"):
        run.table(step=99)
