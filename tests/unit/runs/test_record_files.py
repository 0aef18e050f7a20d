"""The record as files: the same rows in each format, up to a step. tests/unit/review/test_export.py has the command."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from groupwise.errors import UsageError
from groupwise.runs.record_files import RecordFormat, check_can_write, steps_of, write_record
from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.runs.store import Store
from groupwise.types import Example, Group, RewardPart, Rollout, Segment


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:
    """Three steps with a rollout each, and an evaluation after the first and the third."""
    with Store.create(tmp_path / "run.db") as made:
        for step in range(3):
            parts = (RewardPart("right", 0.5, 1.0),)
            segments = (Segment("policy", (5, 6)),)
            member = Rollout(step, 0, 0, (1,), segments, "é\n", "scored", None, 0.5, parts)
            record = StepRecord(step, step, step + 1, "f", (step,), 0.1, 100.0)
            metrics = {"reward": step / 4, "kl": math.nan}
            made.commit_step(record, [Group(step, Example(step, "p", {}), (member,))], metrics)
        for steps in (1, 3):
            made.add_evaluation(EvaluationRecord(steps, "after", f"r@{steps}", {"reward": 1.0}))
        yield made


def rows(folder: Path, to: RecordFormat, kind: str) -> list[dict[str, Any]]:
    if to == "parquet":
        return parquet.read_table(folder / f"{kind}.parquet").to_pylist()
    lines = (folder / f"{kind}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_the_first_steps_are_written(store, tmp_path, to):
    assert steps_of(store) == 3
    write_record(store, to, tmp_path, 2)
    rollouts = rows(tmp_path, to, "rollouts")
    assert [(row["step"], row["completion"]) for row in rollouts] == [(0, "é\n"), (1, "é\n")]
    assert rollouts[0]["parts"][0]["value"] == 0.5
    metrics = rows(tmp_path, to, "metrics")
    assert [(row["step"], row["reward"]) for row in metrics] == [(0, 0.0), (1, 0.25)]
    assert str(metrics[0]["kl"]) == ("nan" if to == "parquet" else "None")
    assert rows(tmp_path, to, "evaluations") == [
        {"step": 1, "name": "after", "policy": "r@1", "metric": "reward", "value": 1.0}
    ]


def test_parquet_needs_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_can_write("jsonl")
    with pytest.raises(UsageError, match=r"pip install 'groupwise\[train\]'"):
        check_can_write("parquet")
