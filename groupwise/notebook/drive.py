"""Checkpoints on Google Drive, so a run survives the loss of a notebook's machine.

The run itself is recorded on the local disk, because a database must not live on a synchronised folder. Each checkpoint includes
the record up to it (`groupwise.runs.recovery`), so another machine can resume from a copy of the newest one.
"""

from __future__ import annotations

import importlib
import logging
import shutil
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import CheckpointError, UsageError
from groupwise.notebook.config import DRIVE, TrainingConfig
from groupwise.notebook.core import KEPT, run_folder
from groupwise.notebook.identity import COLLECTED_FILE
from groupwise.notebook.previous_runs import number_of, sibling
from groupwise.runs import checkpoints, recovery
from groupwise.runs.folder import CHECKPOINTS, FINAL, RECORD
from groupwise.runs.store import Store
from groupwise.training.callbacks.base import Callback, RunEnd, RunHandle

MOUNT = "/content/drive"
MARK = "run.txt"
"""File in a mirror with the start time of its run, which distinguishes runs with the same name."""

logger = logging.getLogger(__name__)


def mount(config: TrainingConfig) -> list[tuple[str, str]]:
    """Mount Drive if requested, and restore an experiment that another machine started. Returns rows for the session's table."""
    if not config.save_to_drive:
        return []
    ensure(config)
    mirror_folder = mirror(config)
    if mirror_folder is None:
        return [("drive", f"there is none here; checkpoints stay in {run_folder(config)}")]
    restored = bring_back(mirror_folder, run_folder(config))
    restored_text = f"; {', '.join(restored)} came from there" if restored else ""
    return [
        (
            "drive",
            f"checkpoints are copied to {mirror_folder.parent}, to a folder of the run's name{restored_text}",
        )
    ]


def ensure(config: TrainingConfig) -> None:
    """Mount Drive if requested; does nothing outside of Colab. Raises UsageError if Colab refuses."""
    if not config.save_to_drive or DRIVE.exists():
        return
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


def mirror(config: TrainingConfig) -> Path | None:
    """Folder to which checkpoints are copied; None if they are not copied."""
    if not config.save_to_drive:
        return None
    folder = Path(config.checkpoint_dir)
    return folder if DRIVE.exists() or not folder.is_relative_to(DRIVE) else None


def mirror_of(config: TrainingConfig, run: str) -> Mirror | None:
    """The callback that copies a run's checkpoints; each run of an experiment has its own folder, as on this machine."""
    folder = mirror(config)
    if folder is None:
        return None
    number = number_of(run, run_folder(config).name)
    assert number is not None, "it is a run of this experiment"
    return Mirror(sibling(folder, number))


def run_names(config: TrainingConfig) -> set[str]:
    """Names of the experiment's runs that are on Drive."""
    folder = mirror(config)
    first = run_folder(config)
    return (
        set()
        if folder is None
        else {sibling(first, number).name for number in _run_numbers(folder)}
    )


def bring_back(mirror_folder: Path, run: Path) -> list[str]:
    """Restore the runs of an experiment that are mirrored but missing here, each from its newest checkpoint. Returns `run@step` of each."""
    restored: list[str] = []
    for number in _run_numbers(mirror_folder):
        own_folder = sibling(run, number)
        if (own_folder / RECORD).is_file():
            continue
        # The newest complete checkpoint. Only the copied one is read, because Drive is slow.
        for checkpoint in reversed(
            checkpoints.complete(sibling(mirror_folder, number) / CHECKPOINTS)
        ):
            copy = own_folder / CHECKPOINTS / checkpoint.path.name
            _copy_folder(checkpoint.path, copy)
            try:
                checkpoints.read(copy).verify(carried=True)
            except CheckpointError:
                atomic_files.remove_folder(copy)
                continue
            recovery.unpack(own_folder)
            recovery.recover(own_folder)
            _copy_file(sibling(mirror_folder, number) / COLLECTED_FILE, own_folder / COLLECTED_FILE)
            restored.append(f"{own_folder.name}@{checkpoint.step}")
            break
    return restored


def _run_numbers(mirror_folder: Path) -> list[int]:
    """Numbers of the experiment's runs in the mirror."""
    numbers = (
        number_of(path.parent.name, mirror_folder.name)
        for path in mirror_folder.parent.glob(f"*/{CHECKPOINTS}")
    )
    return sorted(number for number in numbers if number is not None)


class Mirror(Callback):
    """Copies each checkpoint, and at the end the final weights, atomically.

    If the folder holds another run of this name (for example because a run was removed here), it is not changed, and a warning is
    logged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """See `Callback`."""
        self._copy_checkpoint(run.folder, checkpoint)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """See `Callback`."""
        if end.state == "finished" and self.folder_of(run.folder):
            _copy_folder(run.folder / FINAL, self._folder / FINAL)
            _copy_file(run.folder / COLLECTED_FILE, self._folder / COLLECTED_FILE)

    def keep_finished(self, run: Path) -> None:
        """Copy the missing files of a run that was already finished to Drive."""
        newest = checkpoints.newest(run / CHECKPOINTS)
        if newest is not None:
            self._copy_checkpoint(run, newest.path)
        if self.folder_of(run) and not (self._folder / FINAL).exists():
            _copy_folder(run / FINAL, self._folder / FINAL)

    def _copy_checkpoint(self, run: Path, checkpoint: Path) -> None:
        if self.folder_of(run) is None:
            return
        copy = self._folder / CHECKPOINTS / checkpoint.name
        if not copy.exists():
            _copy_folder(checkpoint, copy)
        _copy_file(run / COLLECTED_FILE, self._folder / COLLECTED_FILE)
        checkpoints.prune(self._folder / CHECKPOINTS, KEPT)

    def folder_of(self, run: Path) -> Path | None:
        """The folder, if it belongs to this run; an empty one is claimed for it. None, with a warning, if it belongs to another run."""
        created_at, mark = str(Store.facts(run / RECORD).get("created_at")), self._folder / MARK
        if not mark.is_file() and not (self._folder / CHECKPOINTS).exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_files.write_file(mark, created_at.encode())
        if mark.is_file() and mark.read_text() == created_at:
            return self._folder
        logger.warning(
            "%s holds another run of this name, so %s is not copied there. Move that folder away, or choose "
            "another experiment_name.",
            self._folder,
            run,
        )
        return None


def _copy_file(file: Path, to: Path) -> None:
    """Copies a file if it exists."""
    if file.is_file():
        atomic_files.write_file(to, file.read_bytes())


def _copy_folder(folder: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.sweep(to.parent)

    def fill(building: Path) -> None:
        shutil.copytree(folder, building, dirs_exist_ok=True)

    atomic_files.make_folder(to, fill, replace=True)
