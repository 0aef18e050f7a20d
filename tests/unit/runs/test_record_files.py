"""The record as files: the same rows in each format, up to a step. tests/unit/training/review/test_export.py has the command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from groupwise.core import atomic_files
from groupwise.core.types import Example, Group, RewardPart, Rollout, Segment
from groupwise.runs import record_files
from groupwise.runs.record_files import (
    KINDS,
    RecordFormat,
    write_record,
)
from groupwise.runs.records import EvaluationRecord, StepRecord, WarningRecord
from groupwise.runs.store import Store


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
    assert store.step_count() == 3
    write_record(store, to, tmp_path, 2)
    rollouts = rows(tmp_path, to, "rollouts")
    assert [(row["step"], row["completion"]) for row in rollouts] == [(1, "é\n"), (2, "é\n")]
    assert rollouts[0]["parts"][0]["value"] == 0.5
    metrics = rows(tmp_path, to, "metrics")
    assert [(row["step"], row["reward"]) for row in metrics] == [(1, 0.0), (2, 0.25)]
    assert str(metrics[0]["kl"]) == ("nan" if to == "parquet" else "None")
    assert rows(tmp_path, to, "evaluations") == [
        {"step": 1, "name": "after", "policy": "r@1", "metric": "reward", "value": 1.0}
    ]


@pytest.fixture
def rich(tmp_path) -> Iterator[Store]:
    """A step that has everything: columns, messages, notes, a replayed group, a warning, a metric called step, an evaluation's rows."""
    columns = {"answer": "42", "near": [1, math.inf]}
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "\udc80é"})
    with Store.create(tmp_path / "rich.db") as made:
        parts = (RewardPart("right", math.nan, 1.0, 2),)
        segments = (Segment("policy", (5, 6)),)
        members = tuple(
            Rollout(
                7, number, 0, (1,), segments, "half \udc80", "scored", None, math.nan if number else 1.0, parts,
                notes={"won": math.nan} if number else {}, messages=messages,
            )
            for number in range(3)
        )  # fmt: skip
        group = Group(7, Example(3, "p", columns), members, origin="replay", again=4)
        warning = WarningRecord(1, "length", "begins", "grows", {"slope": 0.5, "low": -math.inf})
        metrics = {"reward": 1.0, "step": 9.0, "metric/step": 8.0}
        made.commit_step(StepRecord(0, 0, 1, "f", (7,), 0.1, 1.0), [group], metrics, [warning])
        for policy in ("r@1", "base"):
            asked = [{"example": 1, "completion": policy}, {"example": 2, "reward": math.nan}]
            made.add_evaluation(EvaluationRecord(1, "after", policy, {"reward": 1.0}, asked))
        yield made


def without_nan(value: Any) -> Any:
    return json.loads(json.dumps(atomic_files.without_nan(value)))


@pytest.mark.parametrize("at_once", [1, 512])
def test_both_formats_have_the_same_rows(rich, tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(record_files, "ROWS_AT_ONCE", at_once)
    for to in ("jsonl", "parquet"):
        write_record(rich, to, tmp_path, 1)
    for kind in KINDS:
        lines = rows(tmp_path, "jsonl", kind)
        assert lines, kind
        assert without_nan(rows(tmp_path, "parquet", kind)) == lines, kind


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_exported_tables_hold_origin_messages_notes_and_metrics(rich, tmp_path, to):
    write_record(rich, to, tmp_path, 1)
    first, second, _ = rows(tmp_path, to, "rollouts")
    assert (first["origin"], first["again"], first["completion"]) == ("replay", 5, "half ?")
    assert json.loads(first["columns"]) == {"answer": "42", "near": [1, None]}
    assert json.loads(first["messages"])[0] == {"role": "user", "content": "hi"}
    assert (first["notes"], json.loads(second["notes"])) == ("{}", {"won": None})
    assert rows(tmp_path, to, "metrics") == [
        {"step": 1, "metric/step": 8.0, "reward": 1.0, "metrics/step": 9.0}
    ]
    found = rows(tmp_path, to, "evaluation_rows")
    places = [(row["policy"], row["position"]) for row in found]
    assert places == [(policy, place) for policy in ("r@1", "base") for place in (0, 1)]
    assert json.loads(found[2]["row"]) == {"example": 1, "completion": "base"}
    (warning,) = rows(tmp_path, to, "warnings")
    assert json.loads(warning.pop("values")) == {"slope": 0.5, "low": None}
    assert warning == {"step": 1, "name": "length", "kind": "begins", "message": "grows"}


def test_one_step_or_evaluation_is_read_at_a_time(store, tmp_path, monkeypatch):
    """A long run's record does not fit into memory."""
    monkeypatch.setattr(Store, "metrics", None)
    monkeypatch.setattr(record_files, "ROWS_AT_ONCE", 1)
    asked: list[int | None] = []
    plain = Store.every_rollout

    def every_rollout(self: Store, wanted: Any) -> Any:
        asked.append(wanted.step)
        return plain(self, wanted)

    monkeypatch.setattr(Store, "every_rollout", every_rollout)
    read = record_files._rows_of_kind(store, "rollouts", 3, {})
    next(read)
    assert asked == [1]
    assert len(list(read)) == 2
    assert asked == [1, 2, 3]
