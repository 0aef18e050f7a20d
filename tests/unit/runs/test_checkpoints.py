from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import ModelError, ResumeMismatchError, RunNotFoundError
from groupwise.runs import checkpoints
from groupwise.runs.checkpoints import MANIFEST
from tests.meanwhile import right_after, right_before

POINTS = [
    "file:manifest.json:before", "file:manifest.json:after", "folder:step-20:before", "folder:step-20:after",
]  # fmt: skip

DieAt = Callable[[str, Callable[[], object]], None]


def fill(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "weights.safetensors").write_bytes(b"weights" * 100)
    (folder / "optimiser.json").write_text("{}")


def steps(folder: Path) -> list[int]:
    return [found.step for found in checkpoints.complete(folder, verify=True)]


def test_holds_what_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert (checkpoints.complete(folder), checkpoints.newest(folder)) == ([], None)
    assert checkpoints.sweep(folder) == ()
    saved = checkpoints.save(folder, 10, fill, {"fingerprint": "abc"})
    assert saved.path == folder / "step-10"
    assert set(saved.files) == {WEIGHTS, "optimiser.json"}
    assert saved.files[WEIGHTS].size == 700
    assert saved.extra == {"fingerprint": "abc"}
    assert set(saved.versions) == {"groupwise", "python"}
    saved.verify()
    assert checkpoints.read(saved.path) == saved == checkpoints.newest(folder)
    assert checkpoints.save(folder, 10, fill, {"time": 2}).extra == {"time": 2}
    assert [path.name for path in folder.iterdir()] == ["step-10"], "it is replaced"


def test_are_sorted_by_number(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        checkpoints.save(tmp_path, step, fill)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").touch()
    assert steps(tmp_path) == [9, 20, 100]


def change_manifest(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**content, **changes}))


def no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


WEIGHTS = "adapter/weights.safetensors"


@pytest.mark.parametrize(("damage", "reason"), [
    (no_manifest, "manifest.json is missing, it was not finished"),
    (lambda at: (at / WEIGHTS).write_bytes(b"weights"), f"{WEIGHTS} has 7 bytes"),
    (lambda at: (at / WEIGHTS).write_bytes(b"WEIGHTS" * 100), f"{WEIGHTS} was changed"),
    (lambda at: (at / "optimiser.json").unlink(), "optimiser.json is missing"),
    (lambda at: (at / MANIFEST).write_text('{"format": 1, "st'), "cannot be read"),
    (lambda at: (at / MANIFEST).write_text('{"format": 1}'), "manifest.json lacks"),
    (lambda at: (at / MANIFEST).write_text("[]"), "manifest.json is not a manifest"),
    (lambda at: change_manifest(at, step=21), "manifest.json is of step 21"),
    (lambda at: change_manifest(at, format=None), "does not say which format"),
])  # fmt: skip
def test_a_damaged_one_is_skipped_and_named(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    good = checkpoints.save(tmp_path, 10, fill)
    bad = checkpoints.save(tmp_path, 20, fill)
    damage(bad.path)
    found = checkpoints.complete(tmp_path, verify=True)
    assert found == [good]
    (skipped,) = found.skipped
    assert str(skipped).startswith("step-20: ")
    assert reason in skipped.reason
    assert checkpoints.newest(tmp_path) == good


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    change_manifest(checkpoints.save(tmp_path, 10, fill).path, format=checkpoints.FORMAT + 1)
    with pytest.raises(ResumeMismatchError, match="upgrade Groupwise"):
        checkpoints.complete(tmp_path)


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_while_saving_leaves_the_last_checkpoint(
    tmp_path: Path, point: str, die_at: DieAt
) -> None:
    checkpoints.save(tmp_path, 10, fill)
    die_at(point, lambda: checkpoints.save(tmp_path, 20, fill))
    assert steps(tmp_path) == ([10, 20] if point == "folder:step-20:after" else [10])
    assert checkpoints.complete(tmp_path).skipped == ()
    checkpoints.sweep(tmp_path)
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())
    checkpoints.save(tmp_path, 20, fill)
    assert steps(tmp_path) == [10, 20]


@pytest.mark.parametrize("moment", ["before", "moved", "after"])
def test_a_crash_while_pruning_leaves_complete_checkpoints(
    tmp_path: Path, moment: str, die_at: DieAt
) -> None:
    for step in (10, 20, 30):
        checkpoints.save(tmp_path, step, fill)
    die_at(f"remove:step-10:{moment}", lambda: checkpoints.prune(tmp_path, keep=2))
    assert steps(tmp_path) == ([10, 20, 30] if moment == "before" else [20, 30])
    assert checkpoints.complete(tmp_path).skipped == ()


def test_prune_keeps_the_last_and_the_protected(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoints.save(tmp_path, step, fill)
    no_manifest(tmp_path / "step-4")
    assert checkpoints.prune(tmp_path, keep=1, protect={1}) == [2]
    assert steps(tmp_path) == [1, 3]
    assert (tmp_path / "step-4").exists()
    assert checkpoints.prune(tmp_path, keep=5) == []
    with pytest.raises(ValueError, match="at least one"):
        checkpoints.prune(tmp_path, keep=0)


def test_later_ones_are_dropped(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoints.save(tmp_path, step, fill)
    no_manifest(tmp_path / "step-30")
    assert checkpoints.drop_after(tmp_path, 10) == [20, 30]
    assert steps(tmp_path) == [10]


@pytest.mark.parametrize("verify", [False, True])
def test_one_that_is_pruned_while_it_is_looked_at_is_left_out(
    verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a page of the dashboard, or by a command; the run goes on meanwhile."""
    kept, pruned = (checkpoints.save(tmp_path, step, fill) for step in (1, 2))
    right_after(
        monkeypatch, Path, "stat", lambda: checkpoints.drop_after(tmp_path, 1),
        lambda path: path == pruned.path / WEIGHTS,
    )  # fmt: skip
    if verify:
        assert checkpoints.newest(tmp_path) == kept
    else:
        found = checkpoints.complete(tmp_path)
        assert (found, found.skipped) == ([kept], ())
    assert not pruned.path.exists()


def test_one_that_is_pruned_while_it_is_verified_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoints.save(tmp_path, 2, fill)
    right_before(
        monkeypatch, Path, "open", lambda: checkpoints.drop_after(tmp_path, 1),
        lambda path: path == saved.path / WEIGHTS,
    )  # fmt: skip
    with pytest.raises(RunNotFoundError, match=r"save_total_limit.*again"):
        saved.verify()


def test_one_that_is_pruned_while_its_weights_are_read_is_named(tmp_path: Path) -> None:
    def read(folder: Path, change: Callable[[], None]) -> None:
        with checkpoints.reading(folder):
            change()
            raise ModelError("it has no weights")

    step, adapter = tmp_path / "step-4", tmp_path / "adapter"
    for folder in (step, adapter):
        with pytest.raises(ModelError, match="no weights"):
            read(folder, folder.mkdir)
    with pytest.raises(RunNotFoundError, match=r"step-4 was deleted.*save_total_limit.*again"):
        read(step, step.rmdir)
    with pytest.raises(ModelError, match="no weights"):  # not a checkpoint
        read(adapter, adapter.rmdir)
