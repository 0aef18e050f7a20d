"""Runs that lost their record or more, found and mended before they are resumed: each checkpoint alone is enough to go on somewhere else.

For that, each checkpoint carries parts of its run's folder (`carry`):

    checkpoints/step-N/run/config.json     the resolved configuration
    checkpoints/step-N/run/records/        all pieces of the record before its own (`groupwise.runs.record_segments`)
    checkpoints/step-N/run/start/          the weights that the run was started from, where those of another run were given

All of it is written once and never changed, so it is linked, not copied, where the disk knows second names: it costs nothing here. A
program that copies checkpoints elsewhere by the hashes in their manifests sends each of these files once, and with each checkpoint only
the rows since the one before.

A run is found by its record; so one whose `run.db` is missing or damaged is looked for by the name of its folder. If it has a
checkpoint, its record is put together again from the pieces that came with the checkpoints (`recover`). If nothing but checkpoints is
left, the rest of its folder is first made of what they carry (`unpack`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from groupwise.core import atomic_files
from groupwise.core.errors import RunNotFoundError, StoreError
from groupwise.runs import checkpoints, record_segments
from groupwise.runs.folder import CHECKPOINTS, CONFIG, RECORD, START
from groupwise.runs.lock import RunLock
from groupwise.runs.record_segments import MadeAnew, make_anew, trouble_with

CARRIED = "run"
"""The folder within a checkpoint that holds these parts."""


def carry(run: Path, checkpoint: Path, step: int) -> None:
    """Put what belongs to the run into its checkpoint after `step` steps, which is under construction."""
    carried = {CONFIG: run / CONFIG}
    for name, file in record_segments.earlier(run, step).items():
        carried[f"{record_segments.KEPT}/{name}"] = file
    for file in sorted(path for path in (run / START).rglob("*") if path.is_file()):
        carried[file.relative_to(run).as_posix()] = file
    for name, file in carried.items():
        into = checkpoint / CARRIED / name
        into.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.link(file, into)


def unpack(run: Path) -> bool:
    """Rebuild a run's folder from what its newest checkpoint carries, if nothing but checkpoints is left.

    False where there is nothing to do. RunNotFoundError if the newest one carries nothing, RunInUseError if a live process is at it.
    """
    if (run / CONFIG).exists() or not (run / CHECKPOINTS).is_dir():
        return False
    newest = checkpoints.newest(run / CHECKPOINTS)
    if newest is None:
        return False
    carried = newest.path / CARRIED
    if not (carried / CONFIG).is_file():
        raise RunNotFoundError(
            f"{newest.path} is a checkpoint, but {run} is no run: it has no {CONFIG}, and the checkpoint carries none, because an "
            "earlier version wrote it. Copy the whole folder of the run here."
        )
    lock = RunLock.acquire(run)
    try:
        for folder, _, names in os.walk(carried):
            for name in names:
                file = Path(folder, name)
                place = run / file.relative_to(carried)
                if place.name != CONFIG or place.parent != run:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    atomic_files.keep_file(file, place)
        atomic_files.keep_file(carried / CONFIG, run / CONFIG)  # last: it makes the folder a run
    finally:
        lock.release()
    return True


def recover_by_name(reference: str, runs_dir: Path) -> dict[Path, MadeAnew]:
    """Mend the records of all runs that a reference may mean, as far as opening them shows that they are broken.

    RunNotFoundError if one of them is nothing but checkpoints that no run can be made from.
    """
    # Run folders of that name or with a number behind it, or at that path; that of a checkpoint's path.
    name = reference.partition("@")[0]
    numbered = re.compile(re.escape(name) + r"(-\d+)?")
    places = [Path(name), Path(name).resolve().parent.parent]
    if runs_dir.is_dir():
        places += [path for path in runs_dir.iterdir() if numbered.fullmatch(path.name)]
    recovered: dict[Path, MadeAnew] = {}
    for path in dict.fromkeys(place.resolve() for place in places):
        unpack(path)
        if (path / CONFIG).is_file() and (path / CHECKPOINTS).is_dir():
            made = recover(path, thorough=False)
            recovered |= {} if made is None else {path: made}
    return recovered


def recover(path: Path, *, thorough: bool = True) -> MadeAnew | None:
    """Put the record of a run together again if it is missing or damaged; None where it is well.

    RunInUseError if a live process holds the run, StoreError if nothing is left to mend it from.
    """
    record = path / RECORD
    trouble = trouble_with(record, thorough=thorough)
    if trouble is None:
        return None
    newest = checkpoints.newest(path / CHECKPOINTS)
    if newest is None:
        raise StoreError(
            f"{record} {trouble}, and the run has no complete checkpoint: nothing is left to go on from. "
            "Restore the file from a copy, or delete the folder and start anew."
        )
    lock = RunLock.acquire(path)
    try:
        return make_anew(path, record, newest.step, trouble)
    finally:
        lock.release()
