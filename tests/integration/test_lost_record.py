"""A run whose `run.db` is lost goes on from its checkpoints, with the record that it would have had."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.errors import StoreError
from groupwise.review.replay import replay
from groupwise.runs.store import Store
from tests.integration.running import TOY, config, what_must_be_equal

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
    assert "the record was missing and was put together again from the checkpoints: 5 steps" in said
    assert what_must_be_equal(copy) == what_must_be_equal(whole)
    assert replay("toy", step=3, runs_dir=tmp_path).exact, "with every token"


@pytest.mark.parametrize("where", [0, 3000])
def test_a_damaged_record_comes_back_and_is_kept(whole, copy, tmp_path, where):
    content = bytearray((copy / "run.db").read_bytes())
    content[where : where + 8000] = bytes(8000)
    (copy / "run.db").write_bytes(content)
    resumed(tmp_path, **({} if where == 0 else {"resume_from": "toy@5"}))
    assert what_must_be_equal(copy) == what_must_be_equal(whole)
    assert (copy / "run.db.damaged").read_bytes() == content


def test_what_no_checkpoint_holds_is_said_and_the_run_goes_on(whole, copy, tmp_path, capsys):
    lose(copy)
    shutil.rmtree(copy / "records")
    resumed(tmp_path)
    assert "lost are the steps 0 to 1, of which no piece is left" in capsys.readouterr().err
    with (
        Store.open(copy / "run.db", readonly=True) as store,
        Store.open(whole / "run.db", readonly=True) as before,
    ):
        assert [record.step for record in store.steps()] == [2, 3, 4]
        assert store.groups(2) == before.groups(2)


def test_a_run_without_a_checkpoint_is_refused(copy, tmp_path):
    lose(copy)
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").mkdir()
    with pytest.raises(StoreError, match="was missing, and the run has no complete checkpoint"):
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
