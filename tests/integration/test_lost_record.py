"""A run whose `run.db` is lost goes on from its checkpoints, with the record that it would have had."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.core.errors import StoreError
from groupwise.training.review.replay import replay
from tests.integration.toy_run import TOY, config, what_must_be_equal

SFT = str(Path(__file__).with_name("sft_task.py"))

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def whole(whole_toy) -> Path:
    return whole_toy.runs / "toy"


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "toy"))


def lose(folder: Path) -> None:
    for file in folder.glob("run.db*"):
        file.unlink()


def resumed(runs: Path, **how: Any) -> None:
    assert groupwise.rl(config(runs), TOY, **(how or {"resume": True})).exit_code == 0


def test_a_lost_record_comes_back(whole, copy, tmp_path, capsys):
    lose(copy)
    resumed(tmp_path)
    said = capsys.readouterr().err
    assert "from the checkpoints: 5 steps" in said
    assert what_must_be_equal(copy) == what_must_be_equal(whole)
    assert replay("toy", step=4, runs_dir=tmp_path).exact, "with every token"


def test_a_checkpoint_with_a_damaged_segment_is_not_resumed_from(whole, copy, tmp_path, capsys):
    pieces = sorted((copy / "checkpoints/step-5/run/records").iterdir())
    pieces[0].write_bytes(bytes(pieces[0].stat().st_size))
    lose(copy)
    resumed(tmp_path)
    assert "resumed after 4 steps" in capsys.readouterr().err
    assert what_must_be_equal(copy) == what_must_be_equal(whole)


def test_a_run_without_a_checkpoint_is_refused(copy, tmp_path):
    lose(copy)
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").mkdir()
    with pytest.raises(StoreError, match="no complete checkpoint"):
        resumed(tmp_path)


def test_a_supervised_run_comes_back_too(tmp_path):
    settings = {
        "model": {"name": "tiny"},
        "training": {"max_steps": 4, "examples_per_step": 2},
        "run": {"name": "toy", "dir": str(tmp_path), "threads": 1, "save_steps": 2},
    }
    folder = groupwise.sft(settings, SFT).folder
    before = what_must_be_equal(folder)
    lose(folder)
    assert groupwise.sft(settings, SFT, resume=True).exit_code == 0
    assert what_must_be_equal(folder) == before
