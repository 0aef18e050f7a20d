"""Checkpoints on Google Drive, so that a run outlives the machine of a notebook.

The run itself is recorded on the local disk, because a database must not live on a synchronised folder. Each checkpoint carries the record
up to it (`groupwise.runs.carried`), so a copy of the newest one is all that another machine needs to go on.
"""

from __future__ import annotations

import importlib
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from groupwise.callbacks.base import Callback, RunEnd, RunHandle
from groupwise.errors import UsageError
from groupwise.notebook.config import DRIVE, TrainingConfig
from groupwise.notebook.core import KEPT, run_folder
from groupwise.runs import carried, checkpoints, durable, recovery
from groupwise.runs.folder import CHECKPOINTS, FINAL, RECORD

MOUNT = "/content/drive"


def mount(config: TrainingConfig) -> list[tuple[str, str]]:
    """Mount Drive if that is asked for, and bring back an experiment that another machine began. Returns what to say about it."""
    if not config.save_to_drive:
        return []
    ensure(config)
    place = mirror(config)
    if place is None:
        return [("drive", f"there is none here; checkpoints stay in {run_folder(config)}")]
    brought = bring_back(place, run_folder(config))
    came = f"; {', '.join(brought)} came from there" if brought else ""
    return [("drive", f"checkpoints are copied to {place}{came}")]


def ensure(config: TrainingConfig) -> None:
    """Mount Drive if that is asked for. Raises UsageError where Colab refuses."""
    if config.save_to_drive and not DRIVE.exists():
        _mount()


def mirror(config: TrainingConfig) -> Path | None:
    """Where checkpoints are copied; None where they are not."""
    if not config.save_to_drive:
        return None
    place = Path(config.checkpoint_dir)
    return place if DRIVE.exists() or not place.is_relative_to(DRIVE) else None


def mirror_of(config: TrainingConfig, run: str) -> Mirror | None:
    """What copies the checkpoints of a run; each run of an experiment has a folder of its own, as here."""
    place = mirror(config)
    if place is None:
        return None
    return Mirror(_beside(place, run.removeprefix(run_folder(config).name)))


def bring_back(place: Path, run: Path) -> list[str]:
    """Make the runs of an experiment that are mirrored and not here, each of its newest checkpoint. Returns `run@step` of each."""
    brought: list[str] = []
    afters = ("" if number == 1 else f"-{number}" for number in count(1))
    while newest := checkpoints.newest(_beside(place, after := next(afters)) / CHECKPOINTS):
        own = _beside(run, after)
        if not (own / RECORD).is_file():
            _copy(newest.path, own / CHECKPOINTS / newest.path.name)
            carried.unpack(own)
            recovery.recover(own)
            brought.append(f"{own.name}@{newest.step}")
    return brought


def _beside(folder: Path, after: str) -> Path:
    return folder.with_name(f"{folder.name}{after}")


class Mirror(Callback):
    """Copies each checkpoint, and at the end the final weights, whole or not at all."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """See `Callback`."""
        copy = self._place / CHECKPOINTS / checkpoint.name
        if not copy.exists():
            _copy(checkpoint, copy)
        checkpoints.prune(self._place / CHECKPOINTS, KEPT)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """See `Callback`."""
        if end.state == "finished":
            _copy(run.folder / FINAL, self._place / FINAL)


def _mount() -> None:
    try:
        drive: Any = importlib.import_module("google.colab.drive")
    except ImportError:
        return
    try:
        drive.mount(MOUNT)
    except Exception as error:
        raise UsageError(
            f"Google Drive could not be mounted: {error}. Allow it when Colab asks, or set save_to_drive=False."
        ) from error


def _copy(folder: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)

    def fill(building: Path) -> None:
        shutil.copytree(folder, building, dirs_exist_ok=True)

    durable.make_folder(to, fill, replace=True)
