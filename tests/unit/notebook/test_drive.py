"""Checkpoints on Drive: copied whole, the newest few, and enough to go on elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.notebook import drive
from groupwise.notebook.config import TrainingConfig
from groupwise.runs import checkpoints
from groupwise.runs.folder import CHECKPOINTS
from groupwise.training.callbacks.base import RunEnd


@pytest.fixture
def content(tmp_path, monkeypatch):
    """Colab's folder, with Drive mounted."""
    place = tmp_path / "drive" / "MyDrive"
    place.mkdir(parents=True)
    monkeypatch.setattr(drive, "DRIVE", place)
    monkeypatch.setattr("groupwise.notebook.config.DRIVE", place)
    monkeypatch.chdir(tmp_path)
    return place


def checkpoint(folder, step):
    def fill(at: Path) -> None:
        (at / "weights").write_text(str(step))

    return checkpoints.save(folder, step, fill)


def test_without_a_drive_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "DRIVE", tmp_path / "none")
    monkeypatch.setattr("groupwise.notebook.config.DRIVE", tmp_path / "none")
    config = TrainingConfig(save_to_drive=True, experiment_name="e")
    [(name, told)] = drive.mount(config)
    assert name == "drive"
    assert "stay in checkpoints/e" in told
    assert drive.mirror(config) is None
    assert (drive.mount(TrainingConfig()), drive.mirror(TrainingConfig())) == ([], None)
    own = TrainingConfig(save_to_drive=True, checkpoint_dir=str(tmp_path / "synchronised"))
    assert drive.mirror(own) == tmp_path / "synchronised"


def test_checkpoints_are_copied_and_the_newest_kept(content, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(drive.Store, "facts", lambda path: {"created_at": path.parent.name})
    mirror = drive.Mirror(content / "e")
    run: Any = SimpleNamespace(folder=tmp_path / "run")
    for step in (80, 90, 100, 110):
        checkpoint(run.folder / CHECKPOINTS, step)
        mirror.on_save(run, run.folder / CHECKPOINTS / f"step-{step}")
    kept = checkpoints.complete(content / "e" / CHECKPOINTS, verify=True)
    assert [each.step for each in kept] == [90, 100, 110]
    mirror.on_save(run, run.folder / CHECKPOINTS / "step-110")  # told again after a resume
    (run.folder / "final").mkdir()
    (run.folder / "final" / "adapter_model.safetensors").write_text("w")
    mirror.on_run_end(run, RunEnd("interrupted", {}))
    assert not (content / "e" / "final").exists()
    mirror.on_run_end(run, RunEnd("finished", {}))
    assert (content / "e" / "final" / "adapter_model.safetensors").read_text() == "w"
    other: Any = SimpleNamespace(folder=tmp_path / "another run of this name")
    checkpoint(other.folder / CHECKPOINTS, 120)
    mirror.on_save(other, other.folder / CHECKPOINTS / "step-120")
    mirror.on_run_end(other, RunEnd("finished", {}))
    assert "holds another run" in caplog.text
    kept = checkpoints.complete(content / "e" / CHECKPOINTS, verify=True)
    assert [each.step for each in kept] == [90, 100, 110]


def test_a_torn_copy_is_passed_over_and_what_was_cut_off_is_removed(content, tmp_path, monkeypatch):
    monkeypatch.setattr(drive.recovery, "unpack", lambda run: None)
    monkeypatch.setattr(drive.recovery, "recover", lambda run: None)
    for step in (10, 20):
        checkpoint(content / "e" / CHECKPOINTS, step)
    (content / "e" / CHECKPOINTS / "step-20" / "weights").write_text("00")
    (tmp_path / "e" / CHECKPOINTS / ".building-step-20-1-1").mkdir(parents=True)
    assert drive.bring_back(content / "e", tmp_path / "e") == ["e@10"]
    assert [each.name for each in (tmp_path / "e" / CHECKPOINTS).iterdir()] == ["step-10"]
