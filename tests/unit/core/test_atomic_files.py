from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from tests.meanwhile import right_before


class Died(BaseException):
    pass


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(atomic_files, "on_write", seen.append)
    return seen


def die_at(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    def die(name: str) -> None:
        if name == point:
            raise Died

    monkeypatch.setattr(atomic_files, "on_write", die)


@dataclass
class Flushed:
    """The paths that were flushed, as they were called then, and those before something was shown."""

    paths: list[Path] = field(default_factory=list[Path])
    before: list[Path] = field(default_factory=list[Path])


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> Flushed:
    seen = Flushed()
    real: Callable[[Path], None] = atomic_files._flush  # pyright: ignore[reportPrivateUsage]

    def note(path: Path) -> None:
        seen.paths.append(path)
        real(path)

    def note_file(path: Path, data: bytes) -> None:
        path.write_bytes(data)
        seen.paths.append(path)

    def shown(name: str) -> None:
        seen.before.extend(seen.paths if name.endswith("before") else ())

    for name, value in (("_flush", note), ("_write_flushed", note_file), ("on_write", shown)):
        monkeypatch.setattr(atomic_files, name, value)
    return seen


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


class TestFiles:
    def test_hold_what_was_written(self, tmp_path: Path, points: list[str]) -> None:
        atomic_files.write_file(tmp_path / "a.bin", b"one")
        atomic_files.write_file(tmp_path / "a.bin", b"two")
        assert (tmp_path / "a.bin").read_bytes() == b"two"
        assert names(tmp_path) == ["a.bin"]
        assert points == ["file:a.bin:before", "file:a.bin:after"] * 2

    @pytest.mark.parametrize(("moment", "content"), [("before", b"old"), ("after", b"new")])
    def test_are_old_or_new(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, content: bytes
    ) -> None:
        path = tmp_path / "a.bin"
        path.write_bytes(b"old")
        die_at(monkeypatch, f"file:a.bin:{moment}")
        with pytest.raises(Died):
            atomic_files.write_file(path, b"new")
        assert path.read_bytes() == content

    def test_are_not_replaced_unless_asked(self, tmp_path: Path) -> None:
        atomic_files.write_file(tmp_path / "a.bin", b"old", replace=False)
        with pytest.raises(FileExistsError):
            atomic_files.write_file(tmp_path / "a.bin", b"new", replace=False)
        assert (tmp_path / "a.bin").read_bytes() == b"old"
        assert names(tmp_path) == ["a.bin"]

    def test_a_full_disk_is_explained(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"No space left .*--resume") as caught:
            atomic_files.write_file(tmp_path / "a.bin", b"x")
        assert str(tmp_path / "a.bin") in str(caught.value)
        assert names(tmp_path) == []

    def test_are_flushed_before_they_are_shown(self, tmp_path: Path, flushed: Flushed) -> None:
        atomic_files.write_file(tmp_path / "a.bin", b"x")
        assert flushed.before == [atomic_files.building_path(tmp_path / "a.bin")]
        assert flushed.paths[-1] == tmp_path


class TestEnds:
    def test_are_added_and_cut_off(self, tmp_path: Path, points: list[str]) -> None:
        path = tmp_path / "a.jsonl"
        for line in (b"one\n", b"tw"):
            atomic_files.append(path, line)
        assert path.read_bytes() == b"one\ntw"
        atomic_files.cut(path, 4)
        assert path.read_bytes() == b"one\n"
        added = ["append:a.jsonl:before", "append:a.jsonl:after"]
        assert points == [*added, *added, "cut:a.jsonl:before", "cut:a.jsonl:after"]

    def test_are_on_the_disk_afterwards(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.jsonl"
        path.touch()
        monkeypatch.setattr(os, "fsync", full)
        for change in (lambda: atomic_files.append(path, b"x"), lambda: atomic_files.cut(path, 0)):
            with pytest.raises(StoreError, match="No space left on device"):
                change()


class TestFolders:
    def build(self, tmp_path: Path) -> Path:
        building = atomic_files.building_path(tmp_path / "done")
        (building / "inner").mkdir(parents=True)
        (building / "a").write_text("a")
        (building / "inner" / "b").write_text("b")
        return building

    def test_appear_whole_and_flushed(self, tmp_path: Path, flushed: Flushed) -> None:
        building = self.build(tmp_path)
        atomic_files.publish_folder(building, tmp_path / "done")
        everything = {building, building / "a", building / "inner", building / "inner" / "b"}
        assert set(flushed.before) == everything
        assert (tmp_path / "done" / "inner" / "b").read_text() == "b"
        assert names(tmp_path) == ["done"]

    @pytest.mark.parametrize(("moment", "there"), [("before", False), ("after", True)])
    def test_a_folder_is_published_as_a_whole_or_not_at_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, there: bool
    ) -> None:
        building = self.build(tmp_path)
        die_at(monkeypatch, f"folder:done:{moment}")
        with pytest.raises(Died):
            atomic_files.publish_folder(building, tmp_path / "done")
        assert (tmp_path / "done").exists() == there
        assert building.exists() != there

    def test_do_not_replace_another(self, tmp_path: Path) -> None:
        building = self.build(tmp_path)
        (tmp_path / "done").mkdir()
        (tmp_path / "done" / "mine").touch()
        with pytest.raises(FileExistsError, match="is there already"):
            atomic_files.publish_folder(building, tmp_path / "done")
        assert names(tmp_path / "done") == ["mine"]

    def test_folders_replace_an_earlier_one_as_a_whole(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            atomic_files.make_folder(
                tmp_path / "new" / "done",
                lambda folder, name=name: (folder / name).touch(),
                replace=True,
            )
        assert names(tmp_path / "new" / "done") == ["b"]
        assert names(tmp_path / "new") == ["done"]

    def test_stay_where_no_other_could_be_made(self, tmp_path: Path) -> None:
        def fail(folder: Path) -> None:
            (folder / "half").touch()
            raise Died

        (tmp_path / "done").mkdir()
        (tmp_path / "done" / "mine").touch()
        with pytest.raises(Died):
            atomic_files.make_folder(tmp_path / "done", fail, replace=True)
        with pytest.raises(FileExistsError):
            atomic_files.make_folder(tmp_path / "done", lambda folder: None, replace=False)
        assert names(tmp_path / "done") == ["mine"]
        assert names(tmp_path) == ["done"]

    def test_go_out_of_sight_in_one_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "old"
        folder.mkdir()
        (folder / "a").touch()
        die_at(monkeypatch, "remove:old:before")
        with pytest.raises(Died):
            atomic_files.remove_folder(folder)
        assert names(folder) == ["a"]
        die_at(monkeypatch, "remove:old:moved")
        with pytest.raises(Died):
            atomic_files.remove_folder(folder)
        assert not folder.exists()
        assert len(atomic_files.sweep(tmp_path)) == 1
        assert names(tmp_path) == []


def test_sweep_takes_only_what_is_under_construction(tmp_path: Path) -> None:
    (tmp_path / ".building-step-3-17").mkdir()
    (tmp_path / ".building-config.json-17").touch()
    (tmp_path / ".removing-step-1-17").mkdir()
    (tmp_path / "step-2").mkdir()
    (tmp_path / ".hidden").touch()
    assert len(atomic_files.sweep(tmp_path)) == 3
    assert names(tmp_path) == [".hidden", "step-2"]


def test_files_that_are_removed_while_they_are_listed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a/b/inner", "a/outer", "kept", "z/kept")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("z")
    assert atomic_files.files_below(tmp_path) == [tmp_path / name for name in names]
    assert atomic_files.files_below(tmp_path / "missing") == []
    inner = tmp_path / "a" / "b"

    def remove() -> None:
        (inner / "inner").unlink()
        inner.rmdir()

    outer = tmp_path / "a" / "outer"
    right_before(monkeypatch, os, "scandir", remove, lambda path: str(path) == str(inner))
    right_before(monkeypatch, Path, "is_file", outer.unlink, lambda path: path == outer)
    assert atomic_files.files_below(tmp_path) == [tmp_path / "kept", tmp_path / "z" / "kept"]


def test_a_folder_that_another_process_has_removed_is_no_error(
    tmp_path: Path, points: list[str]
) -> None:
    atomic_files.remove_folder(tmp_path / "gone")
    assert points == ["remove:gone:before"]
