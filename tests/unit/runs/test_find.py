from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import CheckpointError, RunNotFoundError, StoreError
from groupwise.runs import checkpoints, find
from groupwise.runs.find import (
    final_step,
    label_of,
    list_runs,
    newest_unfinished,
    resolve,
    reward_ends,
    run_around,
    saved_by_name,
)
from groupwise.runs.folder import RunFolder, State
from groupwise.runs.records import StepRecord
from tests.meanwhile import right_after


def make(runs: Path, name: str, state: State = "finished", steps: int = 0) -> Path:
    meta = {"model": "tiny", "task": "sort_words", "max_steps": 10}
    with RunFolder.create(runs, name, {}, meta) as run:
        for step in range(steps):
            record = StepRecord(step, step, step + 1, "f", (), 1e-5, 0.0)
            run.store.commit_step(record, [], {"reward": step / 10})
        run.finish(state)
    return run.path


def checkpoint(run: Path, step: int) -> None:
    def fill(folder: Path) -> None:
        (folder / "w").write_text("w")

    checkpoints.save(run / "checkpoints", step, fill)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    run = make(runs, "sort", steps=4)
    for step in (2, 4, 10):
        checkpoint(run, step)
    make(runs, "math")
    return runs


class TestFinal:
    def test_its_weights_need_not_be_the_last_ones(self, runs: Path) -> None:
        assert final_step(runs / "sort") == 4, "runs of earlier versions have noted nothing"
        with RunFolder.open(runs / "sort") as run:
            run.write_final(lambda folder: None, 2)
            assert label_of(run.path, run.final) == "sort@2"
            run.write_final(lambda folder: None)
            run.finish("finished")
        assert final_step(runs / "sort") == 4

    def test_weights_know_their_run(self, runs: Path) -> None:
        run = runs / "sort"
        (run / "final").mkdir()
        step = run / "checkpoints/step-10"
        assert (run_around(run / "final"), run_around(step)) == (run, run)
        assert label_of(run, step) == "sort@10"
        assert (run_around(runs), run_around(run / "results")) == (None, None)


class TestResolve:
    def test_a_name_and_a_step(self, runs: Path) -> None:
        found = resolve("sort", runs)
        assert (found.name, found.path, found.checkpoint) == ("sort", runs / "sort", None)
        found = resolve("sort@10", runs)
        assert (found.path, found.checkpoint and found.checkpoint.step) == (runs / "sort", 10)
        make(runs, "a@3")
        assert resolve("a@3", runs).name == "a@3"

    @pytest.mark.parametrize("suffix", ["", "/"])
    def test_a_path(self, runs: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
        elsewhere = runs.parent
        assert resolve(f"{runs}/sort{suffix}", elsewhere).path == runs / "sort"
        found = resolve(f"{runs}/sort@4", elsewhere)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 4
        found = resolve(f"{runs}/sort/checkpoints/step-2{suffix}", elsewhere)
        assert (found.name, found.checkpoint and found.checkpoint.step) == ("sort", 2)
        monkeypatch.chdir(runs / "sort")
        assert resolve(".", elsewhere).name == "sort"

    def test_a_checkpoint_that_was_saved_by_name(self, runs: Path) -> None:
        """On a training server: by its name beside the folder of runs, by its path; a run of the same name goes before it."""
        for name in ("good", "math"):
            saved = runs.parent / "checkpoints" / name
            shutil.copytree(runs / "sort/checkpoints/step-4", saved)
            (saved / "saved.json").write_text(json.dumps({"run": "sort", "step": 4}))
        saved = runs.parent / "checkpoints" / "good"
        for reference in ("good", str(saved)):
            found = resolve(reference, runs)
            assert (found.name, found.checkpoint and found.checkpoint.path) == ("sort", saved)
        assert resolve("math", runs).path == runs / "math"
        assert (run_around(saved), label_of(runs / "sort", saved)) == (runs / "sort", "sort@4")
        assert saved_by_name(runs / "sort") == {"good": 4, "math": 4}
        assert saved_by_name(runs / "math") == {}
        (saved / "saved.json").write_text("{")
        assert list(saved_by_name(runs / "sort")) == ["math"]
        shutil.rmtree(runs / "sort")
        with pytest.raises(RunNotFoundError, match="deleted"):
            resolve(str(runs.parent / "checkpoints/math"), runs)

    def test_an_unknown_run_names_the_nearest_and_all(self, runs: Path) -> None:
        with pytest.raises(RunNotFoundError) as caught:
            resolve("srot", runs)
        assert "'sort'" in str(caught.value)
        assert "math, sort" in str(caught.value)
        with pytest.raises(RunNotFoundError, match="no run 'srot'"):
            resolve("srot@4", runs)

    def test_no_runs_at_all(self, tmp_path: Path) -> None:
        for reference in ("x", "x@3", "", "@3", "../x", "x" * 300):
            with pytest.raises(RunNotFoundError, match="holds no runs"):
                resolve(reference, tmp_path / "runs")
        assert list_runs(tmp_path / "runs") == []

    def test_a_step_without_a_checkpoint_lists_those_there_are(self, runs: Path) -> None:
        (runs / "sort" / "checkpoints" / "step-4" / "w").unlink()
        with pytest.raises(RunNotFoundError, match=r"sort@2, sort@10.*step-4: w is"):
            resolve("sort@3", runs)
        with pytest.raises(RunNotFoundError, match="There are: none"):
            resolve("math@1", runs)

    def test_a_damaged_checkpoint_is_not_used(self, runs: Path) -> None:
        (runs / "sort" / "checkpoints" / "step-2" / "w").write_text("W")
        with pytest.raises(CheckpointError, match="was changed"):
            resolve("sort@2", runs)


class TestNewestUnfinished:
    def test_is_the_newest_of_the_name(self, tmp_path: Path) -> None:
        make(tmp_path, "sort")
        make(tmp_path, "sort")
        third = make(tmp_path, "sort", "interrupted")
        make(tmp_path, "sort-by-length", "failed")
        assert third.name == "sort-3"
        assert newest_unfinished("sort", tmp_path) == third
        assert newest_unfinished("sort-3", tmp_path) == third

    def test_says_when_there_are_none(self, runs: Path) -> None:
        with pytest.raises(RunNotFoundError, match=r"is finished \(sort\).*--resume"):
            newest_unfinished("sort", runs)
        with pytest.raises(RunNotFoundError, match="There are: math, sort"):
            newest_unfinished("other", runs)
        (runs / "sort" / "run.db").write_bytes(b"no database at all, but long enough to look at")
        with pytest.raises(StoreError, match=r"sort/run\.db"):
            newest_unfinished("sort", runs)


class TestList:
    def test_tells_about_every_run(self, runs: Path) -> None:
        sort, math = list_runs(runs)
        assert (sort.name, sort.state, sort.steps, sort.max_steps) == ("sort", "finished", 4, 10)
        assert sort.reward_first == pytest.approx(0.05)
        assert sort.reward_last == pytest.approx(0.25)
        assert (sort.model, sort.task) == ("tiny", "sort_words")
        assert (math.name, math.steps, math.reward_first) == ("math", 0, None)

    def test_bears_broken_folders(self, runs: Path) -> None:
        torn = b"not a database at all" * 100
        for name, record in (("empty", None), ("torn", torn), ("blank", b"")):
            (runs / name).mkdir()
            if record is not None:
                (runs / name / "run.db").write_bytes(record)
        shutil.copytree(runs / "sort", runs / "odd")
        with closing(sqlite3.connect(runs / "odd" / "run.db")) as record, record:
            record.execute("UPDATE meta SET value = '{\"a\": 1}' WHERE key = 'state'")
        (runs / "a file").touch()
        (runs / ".building-x-1").mkdir()
        listed = list_runs(runs)
        assert [info.name for info in listed] == ["sort", "math", "blank", "empty", "odd", "torn"]
        broken = {info.name: info.broken or "" for info in listed if info.broken}
        for name, said in (
            ("odd", "has the state"),
            ("blank", "is empty"),
            ("empty", "does not exist"),
            ("torn", "damaged"),
        ):
            assert said in broken[name]


@pytest.mark.parametrize(
    ("rewards", "ends"),
    [
        *(([float("nan")], (None, None)), ([1.0], (1.0, 1.0)), ([1.0, 9.0, 3.0], (1.0, 3.0))),
        ([float(step) for step in range(20)], (2.0, 17.0)),
        ([float("nan"), 1.0, 2.0, 4.0], (1.0, 3.0)),
    ],
)
def test_ends_of_the_rewards_never_overlap(rewards: list[float], ends: tuple[Any, Any]) -> None:
    assert reward_ends(rewards) == ends


def test_a_run_that_is_removed_while_runs_are_listed_is_left_out(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose start fails removes its folder."""
    right_after(monkeypatch, find, "run_folders", lambda: shutil.rmtree(runs / "math"))
    assert [info.name for info in list_runs(runs)] == ["sort"]


def test_a_checkpoint_that_is_pruned_while_it_is_resolved_is_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find.checkpoints.newest(runs / "sort" / "checkpoints")
    assert found is not None
    right_after(monkeypatch, find, "_is_checkpoint_folder", lambda: shutil.rmtree(found.path))
    with pytest.raises(RunNotFoundError, match=f"{found.path.name} was deleted"):
        resolve(str(found.path))
