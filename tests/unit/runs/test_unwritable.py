"""Places that cannot be written to: each gives one message that names the path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from groupwise.core import atomic_files
from groupwise.core.errors import CheckpointError, StoreError, UsageError
from groupwise.runs import checkpoints, lock
from groupwise.runs.config import RunSection
from groupwise.runs.folder import RunFolder, add_result, result_file
from groupwise.runs.store import Store
from tests.disks import read_only, small_disk


def closed(runs: Path) -> Path:
    with RunFolder.create(runs, "sort", {}) as run:
        return run.path


def test_a_file_is_no_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    for place in (tmp_path / "runs", tmp_path / "runs" / "deeper"):
        with pytest.raises(UsageError, match=r"run\.dir: .*runs"):
            RunFolder.create(place, "sort", {})


def test_names_that_no_run_can_have(tmp_path: Path) -> None:
    for name, said in (("x" * 300, "too long"), ("base", "names the model itself")):
        with pytest.raises(UsageError, match=said):
            RunFolder.create(tmp_path, name, {})
    with pytest.raises(ValidationError, match="names the model itself"):
        RunSection(name="base")


def test_a_read_only_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        path = closed(disk)
        with read_only(disk):
            with Store.open(path / "run.db", readonly=True) as store:
                assert store.last_step() is None
            with pytest.raises(UsageError, match="Read-only"):
                RunFolder.create(disk, "other", {})
            with pytest.raises(UsageError, match=r"sort cannot .*Read-only"):
                RunFolder.open(path)
            with pytest.raises(StoreError, match="Read-only"):
                add_result(path, "held_out", {})
            with pytest.raises(UsageError, match=r"held_out\.json.*Read-only"):
                atomic_files.check_can_write(result_file(path, "held_out"))
            with pytest.raises(CheckpointError, match="Read-only"):
                checkpoints.save(path / "checkpoints", 1, lambda folder: None)
            assert not lock.is_held(path)
        with RunFolder.open(path) as run:
            assert run.state == "running", "nothing was lost"


def test_a_folder_in_the_place_of_the_log_gives_the_lock_back(tmp_path: Path) -> None:
    path = closed(tmp_path)
    (path / "log.txt").unlink()
    (path / "log.txt").mkdir()
    with pytest.raises(StoreError, match="directory"):
        RunFolder.open(path)
    assert not lock.is_held(path)


def test_a_result_that_can_be_written_is_not_refused(tmp_path: Path) -> None:
    atomic_files.check_can_write(tmp_path / "not" / "there" / "yet.json")
    assert list(tmp_path.iterdir()) == [], "and nothing is left behind"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"):
        atomic_files.check_can_write(tmp_path / "file" / "x.json")


def test_json_has_no_nan(tmp_path: Path) -> None:
    nan, infinity = float("nan"), float("inf")
    atomic_files.write_json(tmp_path / "x", {"a": nan, "b": [1.5, (-infinity,)], "c": {"d": nan}})
    text = (tmp_path / "x").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.5, [None]],
        "c": {"d": None},
    }
