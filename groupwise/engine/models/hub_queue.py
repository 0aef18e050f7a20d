"""Queues what a run has still to upload: folders in `hub/` of the run's own, each with its target, so that a crash loses none.

hub/someone%2Fmodel@main/step-000000120/files/        weights, tokenizer and model card, as they are to stand on the hub
hub/someone%2Fmodel@main/step-000000120/target.json   where they go; written last, so that an entry is whole or none

Each uploader has a queue, a folder of its own, named after where it uploads to. An entry is removed when it has been uploaded,
`target.json`, the mark of its wholeness, first. Entries are uploaded in the order of their steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from groupwise.core import atomic_files
from groupwise.engine.models.artefact import keep_artefact
from groupwise.engine.models.hub_push import Pushed, Target, push

QUEUES = "hub"
"""Folder of a run."""
FILES = "files"
TARGET = "target.json"


@dataclass(frozen=True, slots=True)
class Waiting:
    """One entry."""

    step: int
    folder: Path
    target: Target

    def push(self, *, overwrite: bool | None = None) -> Pushed:
        """Upload the entry and remove it; `overwrite` replaces the target's own setting. Raises as `hub_push.push`, and then it stays."""
        target = self.target if overwrite is None else replace(self.target, overwrite=overwrite)
        run = self.folder.parents[2]
        pushed = push(self.folder / FILES, target, f"{run.name}@{self.step}", run)
        self.drop()
        return pushed

    def drop(self) -> None:
        """Remove the entry."""
        atomic_files.remove_file(self.folder / TARGET)
        shutil.rmtree(self.folder)

    @property
    def is_there(self) -> bool:
        """True until the entry has been removed."""
        return (self.folder / TARGET).is_file()


@dataclass(frozen=True, slots=True)
class Queue:
    """The entries of one uploader."""

    folder: Path

    def add(self, step: int, target: Target, weights: Path, card: str, tokenizer: Any) -> None:
        """Queue the weights after so many steps for upload, in place of an earlier entry of that step."""
        folder = self.folder / f"step-{step:09d}"
        (folder / TARGET).unlink(missing_ok=True)
        keep_artefact(folder / FILES, weights, card, tokenizer)
        atomic_files.write_json(folder / TARGET, asdict(target))

    def waiting(self) -> list[Waiting]:
        """All entries, by their steps."""
        return _entries(self.folder.glob(f"step-*/{TARGET}"))

    def drop_after(self, step: int) -> None:
        """Remove the entries of later steps, which are done again, and entries that a dead process left unfinished."""
        there = {entry.folder for entry in self.waiting() if entry.step <= step}
        for folder in self.folder.glob("step-*"):
            if folder not in there:
                shutil.rmtree(folder)


def queue(run: Path, name: str) -> Queue:
    """The run's queue with this name; it may be empty."""
    return Queue(run / QUEUES / quote(name, safe="@"))


def waiting(run: Path) -> list[Waiting]:
    """The entries of all queues of a run, by their steps."""
    return _entries((run / QUEUES).glob(f"*/step-*/{TARGET}"))


def _entries(files: Iterable[Path]) -> list[Waiting]:
    found = sorted(files, key=lambda file: (_step_of(file.parent), file))
    return [
        Waiting(_step_of(file.parent), file.parent, Target(**json.loads(file.read_bytes())))
        for file in found
    ]


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
