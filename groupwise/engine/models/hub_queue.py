"""Queues a run's pending uploads: folders in `hub/` of the run's folder, each with its target, so that a crash loses none.

hub/someone%2Fmodel@main/step-000000120/files/        weights, tokenizer and model card, as they will be on the hub
hub/someone%2Fmodel@main/step-000000120/target.json   where to upload them; written last, so an entry with this file is complete

Each uploader has its own queue, a folder named after its target. An entry is removed after its upload; `target.json` is deleted first, so
that a partly removed entry does not count. Entries are uploaded in the order of their steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from groupwise.core import atomic_files
from groupwise.engine.models.artefact import keep_artefact
from groupwise.engine.models.hub_push import Pushed, Target, push

QUEUES = "hub"
"""Folder inside a run's folder that holds its queues."""
FILES = "files"
TARGET = "target.json"


@dataclass(frozen=True, slots=True)
class QueuedUpload:
    """One pending upload."""

    step: int
    folder: Path
    target: Target

    def push(self, *, overwrite: bool | None = None) -> Pushed:
        """Upload the entry and remove it; `overwrite` replaces the target's own setting. On an error of `hub_push.push` the entry stays."""
        target = self.target if overwrite is None else replace(self.target, overwrite=overwrite)
        run = self.folder.parents[2]
        pushed = push(self.folder / FILES, target, f"{run.name}@{self.step}", run)
        self.drop()
        return pushed

    def drop(self) -> None:
        """Remove the entry."""
        atomic_files.remove_file(self.folder / TARGET)
        _remove_folder(self.folder)

    @property
    def is_there(self) -> bool:
        """True until the entry has been removed."""
        return (self.folder / TARGET).is_file()


@dataclass(frozen=True, slots=True)
class Queue:
    """The pending uploads of one uploader."""

    folder: Path

    def add(self, step: int, target: Target, weights: Path, card: str, tokenizer: Any) -> None:
        """Queue the weights after step `step` for upload; they replace an earlier entry of that step."""
        folder = self.folder / f"step-{step:09d}"
        (folder / TARGET).unlink(missing_ok=True)
        keep_artefact(folder / FILES, weights, card, tokenizer)
        atomic_files.write_json(folder / TARGET, asdict(target))

    def waiting(self) -> list[QueuedUpload]:
        """All entries, in the order of their steps."""
        return _read_entries(self.folder.glob(f"step-*/{TARGET}"))

    def drop_after(self, step: int) -> None:
        """Remove entries of later steps, which will be repeated, and incomplete entries of an ended process."""
        valid = {entry.folder for entry in self.waiting() if entry.step <= step}
        for folder in self.folder.glob("step-*"):
            if folder not in valid:
                _remove_folder(folder)


def queue(run: Path, name: str) -> Queue:
    """The run's queue with this name; it may be empty."""
    return Queue(run / QUEUES / quote(name, safe="@"))


def waiting(run: Path) -> list[QueuedUpload]:
    """The entries of all queues of a run, in the order of their steps."""
    return _read_entries((run / QUEUES).glob(f"*/step-*/{TARGET}"))


def _read_entries(files: Iterable[Path]) -> list[QueuedUpload]:
    entries = []
    for file in sorted(files, key=lambda file: (_step_of(file.parent), file)):
        with suppress(FileNotFoundError):  # the uploading thread, or `runs push`, has removed it
            target = Target(**json.loads(file.read_bytes()))
            entries.append(QueuedUpload(_step_of(file.parent), file.parent, target))
    return entries


def _remove_folder(folder: Path) -> None:
    """Remove the folder of an entry. `runs push` and a resumed run may upload the same entry, so it may be gone already."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
