"""`report_to: parquet`: the record as `groupwise runs export` writes it, in the run's folder whenever the run ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow import parquet

from groupwise.callbacks.base import RunEnd, RunHandle
from groupwise.callbacks.parquet_record import ParquetRecord
from groupwise.review.export import export
from groupwise.runs.folder import RunFolder
from groupwise.runs.record_files import KINDS
from groupwise.runs.records import StepRecord
from groupwise.types import Example, Group, RewardPart, Rollout, Segment
from tests.unit.callbacks.observed import CONFIG


def step(folder: RunFolder, number: int) -> None:
    part = RewardPart("right", 0.5, 1.0)
    member = Rollout(
        number, 0, 0, (1,), (Segment("policy", (5,)),), "a", "scored", None, 0.5, (part,)
    )
    group = Group(number, Example(0, "p", {}), (member,))
    record = StepRecord(number, number, number + 1, "f", (number,), 0.1, 100.0)
    folder.store.commit_step(record, [group], {"reward": number / 4})


def end(folder: RunFolder, state: str) -> None:
    run = SimpleNamespace(
        config=SimpleNamespace(model_dump=lambda mode: CONFIG), folder=folder, step=0
    )
    handle = RunHandle(run, None, "parquet")  # type: ignore[arg-type]
    ParquetRecord().on_run_end(handle, RunEnd(state, {}))  # type: ignore[arg-type]


def steps(folder: RunFolder) -> list[int]:
    return parquet.read_table(folder.path / "parquet/metrics.parquet").column("step").to_pylist()


@pytest.mark.parametrize("state", ["finished", "interrupted", "failed"])
def test_it_is_what_the_command_exports(tmp_path, state):
    with RunFolder.create(tmp_path, "r", {}, {"kind": "rl"}) as folder:
        step(folder, 0)
        step(folder, 1)
        end(folder, state)
    export("r", "parquet", tmp_path / "out", runs_dir=tmp_path)
    for kind in KINDS:
        ours, exported = (
            parquet.read_table(Path(place) / f"{kind}.parquet")
            for place in (folder.path / "parquet", tmp_path / "out")
        )
        assert ours.equals(exported), kind
    assert steps(folder) == [0, 1]


def test_a_run_that_went_on_replaces_it(tmp_path):
    with RunFolder.create(tmp_path, "r", {}, {"kind": "rl"}) as folder:
        step(folder, 0)
        end(folder, "interrupted")
        step(folder, 1)
        end(folder, "finished")
        assert steps(folder) == [0, 1]
        assert [path.name for path in folder.path.glob("*parquet*")] == ["parquet"]
