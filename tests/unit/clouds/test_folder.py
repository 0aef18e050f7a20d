"""The folder that results are fetched to: what appears in it, and which checkpoints are removed from it."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from groupwise.clouds import folder as folders
from groupwise.clouds.folder import INCOMING, alone_in, lacking, mirror_checkpoints, put_in_place
from groupwise.clouds.port import CloudError
from groupwise.hosts.spec import FileEntry


def entry(data: bytes) -> FileEntry:
    return FileEntry(hashlib.sha256(data).hexdigest(), 0o644, len(data))


def checkpoint(folder: Path, step: int, name: str | None = None) -> list[str]:
    """The files of one, by their paths there."""
    path = f"runs/run/checkpoints/{name or f'step-{step}'}"
    (folder / path).mkdir(parents=True, exist_ok=True)
    (folder / path / "weights").write_bytes(b"w" * step)
    (folder / path / "manifest.json").write_text(json.dumps({"step": step, "files": {}}))
    return [f"{path}/weights", f"{path}/manifest.json"]


def steps(folder: Path) -> list[int]:
    found = folder.glob("runs/run/checkpoints/*/weights")
    return sorted(path.stat().st_size for path in found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    os.close(alone_in(tmp_path))
    return tmp_path


def test_only_one_fetches_into_a_folder(tmp_path: Path) -> None:
    lock = alone_in(tmp_path)
    with pytest.raises(CloudError, match="another process is fetching"):
        alone_in(tmp_path)
    os.close(lock)
    os.close(alone_in(tmp_path))


def test_what_is_here_is_not_lacking_and_what_differs_is(folder: Path) -> None:
    (folder / "same").write_bytes(b"one")
    (folder / "other").write_bytes(b"two")
    (folder / "longer").write_bytes(b"three!")
    files = {"same": entry(b"one"), "other": entry(b"owt"), "longer": entry(b"three")}
    assert set(lacking(folder, {**files, "none": entry(b"")})) == {"other", "longer", "none"}


def test_a_checkpoint_is_listed_after_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["c/manifest.json", "c/a", "c/z"]
    for name in names:
        (folder / INCOMING / name).parent.mkdir(exist_ok=True)
        (folder / INCOMING / name).write_bytes(b"")
    placed: list[str] = []
    replace = Path.replace

    def noted(path: Path, target: Path) -> Path:
        placed.append(target.name)
        return replace(path, target)

    monkeypatch.setattr(folders.Path, "replace", noted)
    put_in_place(folder, {name: entry(b"") for name in names})
    assert placed[-1] == "manifest.json"
    assert sorted(placed) == ["a", "manifest.json", "z"]


def test_of_checkpoints_the_folder_is_a_mirror(folder: Path) -> None:
    two = checkpoint(folder, 2)
    mirror_checkpoints(folder, two)
    four = checkpoint(folder, 4)
    mirror_checkpoints(folder, [*two, *four])
    assert steps(folder) == [2, 4]
    six = checkpoint(folder, 6)
    mirror_checkpoints(folder, [*four, *six])
    assert steps(folder) == [4, 6]
    assert not (folder / "runs/run/checkpoints/step-2").exists()


def test_the_last_one_stays_where_the_place_has_none_or_older_ones(folder: Path) -> None:
    mirror_checkpoints(folder, checkpoint(folder, 8))
    mirror_checkpoints(folder, [])
    mirror_checkpoints(folder, checkpoint(folder, 2))
    assert steps(folder) == [2, 8]


def test_checkpoints_of_somebody_else_stay(folder: Path) -> None:
    checkpoint(folder, 2)
    mirror_checkpoints(folder, checkpoint(folder, 4))
    mirror_checkpoints(folder, checkpoint(folder, 6))
    assert steps(folder) == [2, 6]


def test_one_that_was_half_removed_is_removed_the_next_time(folder: Path) -> None:
    mirror_checkpoints(folder, checkpoint(folder, 2))
    (folder / "runs/run/checkpoints/step-2/manifest.json").unlink()
    mirror_checkpoints(folder, checkpoint(folder, 4))
    assert steps(folder) == [4]


def test_a_manifest_that_is_no_checkpoints_is_left_alone(folder: Path) -> None:
    (folder / "export").mkdir()
    (folder / "export/manifest.json").write_text('{"files": {}}')
    mirror_checkpoints(folder, ["export/manifest.json"])
    mirror_checkpoints(folder, checkpoint(folder, 4))
    assert (folder / "export/manifest.json").exists()
