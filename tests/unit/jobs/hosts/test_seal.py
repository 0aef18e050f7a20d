"""`seal` marks any trainer's checkpoint as complete, so that it is copied."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.hosts import seal as module
from groupwise.jobs.hosts.seal import seal
from tests.runner_machine import Machine

FILE = Path(module.__file__)


def checkpoint(folder: Path) -> Path:
    (folder / "global_step4").mkdir(parents=True)
    (folder / "latest").write_text("global_step4")
    (folder / "global_step4" / "shard.pt").write_bytes(b"weights" * 1000)
    return folder


def seen(here: Machine) -> list[dict[str, Any]]:
    return here.ask("manifest", job="job", epoch=1, what="checkpoints")["checkpoints"]


def test_only_sealed_folders_are_checkpoints(either: Machine) -> None:
    """By the file alone, in the Python of the machine, which has no Groupwise."""
    python, file = either.python, str(FILE)
    either.sh(
        "mkdir -p outputs/checkpoint-4/deep outputs/checkpoint-8; echo w > outputs/checkpoint-4/deep/w; echo w > outputs/checkpoint-8/w; "
        f"{python} {file} outputs/checkpoint-4 4"
    )
    ended = either.comes_to("exited")
    assert ended["exit"]["code"] == 0, ended["exit"]["tail"]
    [found] = seen(either)
    assert (found["path"], found["step"]) == ("outputs/checkpoint-4", 4)
    assert sorted(found["files"]) == [
        "outputs/checkpoint-4/deep/w",
        "outputs/checkpoint-4/manifest.json",
    ]


def test_every_file_is_named_and_one_that_is_written_over_is_sealed_again(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-4")
    assert seal(folder, 4) == folder / "manifest.json"
    said = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(b"weights" * 1000).hexdigest()
    assert said["step"] == 4
    assert said["files"]["global_step4/shard.pt"] == {"size": 7000, "sha256": digest}
    (folder / "latest").write_text("global_step10")
    seal(str(folder), 10)
    said = json.loads((folder / "manifest.json").read_text())
    assert (said["step"], said["files"]["latest"]["size"]) == (10, 13)
    assert set(said["files"]) == {"latest", "global_step4/shard.pt"}


def test_a_checkpoint_with_links_or_without_files_is_not_sealed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-4")
    (folder / "best").symlink_to("global_step4")
    with pytest.raises(ValueError, match="best is a link"):
        seal(folder, 4)
    assert not (folder / "manifest.json").exists()
    with pytest.raises(ValueError, match="holds no file"):
        seal(tmp_path / "nothing", 4)
