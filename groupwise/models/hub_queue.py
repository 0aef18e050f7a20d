"""What a run has still to upload: folders in `hub/` of the run's own, each with its target, so that a crash loses none.

    hub/step-000000120/files/        weights, tokenizer and model card, as they are to stand on the hub
    hub/step-000000120/target.json   where they go; written last, so that an entry is whole or none

An entry goes when it has been uploaded. Entries are uploaded in the order of their steps.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.models.artefact import keep_artefact
from groupwise.models.hub_push import Target, push
from groupwise.runs import durable

QUEUE = "hub"
"""Folder of a run."""
FILES = "files"
TARGET = "target.json"


@dataclass(frozen=True, slots=True)
class Waiting:
    """One entry."""

    step: int
    folder: Path
    target: Target

    def push(self, *, overwrite: bool = False) -> str:
        """Upload it, and let it go; returns where it is. Raises what `groupwise.models.hub_push.push` raises, and then it stays."""
        target = Target(
            **{**self.target.as_dict(), "overwrite": overwrite or self.target.overwrite}
        )
        url = push(self.folder / FILES, target, f"{self.folder.parents[1].name}@{self.step}")
        shutil.rmtree(self.folder)
        return url


def add(run: Path, step: int, target: Target, weights: Path, card: str, tokenizer: Any) -> None:
    """Have the weights after so many steps uploaded, in place of an earlier entry of that step."""
    folder = run / QUEUE / f"step-{step:09d}"
    (folder / TARGET).unlink(missing_ok=True)
    keep_artefact(folder / FILES, weights, card, tokenizer)
    durable.write_json(folder / TARGET, target.as_dict())


def waiting(run: Path) -> list[Waiting]:
    """All entries, by their steps."""
    found = sorted((run / QUEUE).glob(f"step-*/{TARGET}"))
    return [
        Waiting(
            int(file.parent.name.removeprefix("step-")),
            file.parent,
            Target(**json.loads(file.read_bytes())),
        )
        for file in found
    ]


def drop_after(run: Path, step: int) -> None:
    """Give up the entries of later steps, which are done again, and what a dead process left half made."""
    there = {entry.folder for entry in waiting(run) if entry.step <= step}
    for folder in (run / QUEUE).glob("step-*"):
        if folder not in there:
            shutil.rmtree(folder)
