"""Saved states of models, as folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.core.atomic_files import BUILDING
from groupwise.core.errors import UsageError
from groupwise.server.engine.saved_adapters import NOTE, CheckpointNote, Saved, SavedFolders
from groupwise.server.engine.tinker_protocol import ModelSpec, Stored
from tests.meanwhile import right_before

MODEL = "s-1:train:0"
SPEC = ModelSpec("tiny", 4, 1)


def saved(folders: SavedFolders, name: str, call: int = 1) -> Stored:
    stored = Stored(MODEL, "weights", name)
    folders.path_of(stored).mkdir(parents=True)
    folders.describe(folders.path_of(stored), Saved(SPEC, "f00d", call))
    return stored


def test_the_last_two_automatic_states_are_kept(tmp_path: Path) -> None:
    folders = SavedFolders(tmp_path)
    for call in (3, 6, 9, 12):
        folders.automatic_path(MODEL, call).mkdir(parents=True)
    folders.forget_automatic(MODEL, before=12)
    assert sorted(path.name for path in folders.automatic_path(MODEL, 12).parent.iterdir()) == [
        "000000009",
        "000000012",
    ]
    folders.forget_automatic(MODEL)
    assert not folders.automatic_path(MODEL, 12).exists()


def test_a_saved_adapter_can_be_read_and_deleted_and_its_name_is_taken(tmp_path: Path) -> None:
    folders = SavedFolders(tmp_path)
    stored = saved(folders, "one", call=5)
    assert folders.read(stored) == Saved(SPEC, "f00d", 5)
    folders.check_free(stored, 5)  # for the call that took it
    with pytest.raises(UsageError, match="one"):
        folders.check_free(stored, 6)
    folders.forget(stored)
    folders.forget(stored)
    saved(folders, "two")
    with pytest.raises(UsageError, match="two"):
        folders.read(stored)


def test_a_note_that_is_written_meanwhile_does_not_hide_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = SavedFolders(tmp_path)
    stored = saved(folders, "one")
    size = folders.size_of(stored)
    building = folders.path_of(stored) / f"{BUILDING}{NOTE}-1-1"
    building.touch()
    right_before(monkeypatch, Path, "stat", building.unlink, lambda path: path == building)
    assert folders.size_of(stored) == size
    assert not building.exists()


def test_a_note_of_weights_that_are_removed_meanwhile_is_refused(tmp_path: Path) -> None:
    folders = SavedFolders(tmp_path)
    stored = saved(folders, "one")
    folders.forget(stored)
    with pytest.raises(UsageError, match="nothing saved"):
        folders.write_note(stored, CheckpointNote(expires_at=1.0))
