"""Recovers runs that lost their record or more, before they are resumed: any one checkpoint is enough to continue elsewhere.

For that, each checkpoint contains parts of its run's folder (`add_run_files`):

    checkpoints/step-N/run/config.json     the resolved configuration
    checkpoints/step-N/run/records/        all segments of the record before its own (`groupwise.runs.record_segments`)
    checkpoints/step-N/run/start/          the weights that the run was started from, if they are another run's

All of these files are written once and never changed, so they are hard-linked if the file system can, which costs no space. A
program that copies checkpoints elsewhere by the hashes in their manifests sends each of these files once, and with each checkpoint only
the rows since the previous one.

A run is recognised by its record; one whose `run.db` is missing or damaged is searched for by the name of its folder. If it has a
checkpoint, its record is rebuilt from the segments in the checkpoints (`recover`). If only checkpoints are
left, the rest of its folder is first restored from the newest one (`unpack`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from groupwise.core import atomic_files
from groupwise.core.errors import RunNotFoundError, StoreError
from groupwise.runs import checkpoints, record_segments
from groupwise.runs.checkpoints import RUN_FILES
from groupwise.runs.folder import CHECKPOINTS, CONFIG, RECORD, START
from groupwise.runs.lock import RunLock
from groupwise.runs.record_segments import RebuiltRecord, find_damage, rebuild_record


def add_run_files(run: Path, checkpoint: Path, step: int) -> None:
    """Link the run's files into the unfinished checkpoint after `step` steps."""
    carried = {CONFIG: run / CONFIG}
    for name, file in record_segments.earlier_record_segments(run, step).items():
        carried[f"{record_segments.KEPT}/{name}"] = file
    for file in sorted(path for path in (run / START).rglob("*") if path.is_file()):
        carried[file.relative_to(run).as_posix()] = file
    for name, file in carried.items():
        into = checkpoint / RUN_FILES / name
        into.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.link(file, into)


def unpack(run: Path) -> bool:
    """Restore a run's folder from its newest checkpoint, if only checkpoints are left.

    False if there is nothing to do. RunNotFoundError if that checkpoint has no such files, RunInUseError if a live process holds the run.
    """
    if (run / CONFIG).exists() or not (run / CHECKPOINTS).is_dir():
        return False
    newest = checkpoints.newest(run / CHECKPOINTS, carried=True)
    if newest is None:
        return False
    source = newest.path / RUN_FILES
    if not (source / CONFIG).is_file():
        raise RunNotFoundError(
            f"{newest.path} is a checkpoint, but {run} is not a run: it has no {CONFIG}, and the checkpoint carries none, because an "
            "earlier version wrote it. Copy the whole folder of the run here."
        )
    lock = RunLock.acquire(run)
    try:
        for folder, _, names in os.walk(source):
            for name in names:
                file = Path(folder, name)
                target = run / file.relative_to(source)
                # Skip config.json here: it comes last.
                if target.name != CONFIG or target.parent != run:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    atomic_files.keep_file(file, target)
        atomic_files.keep_file(source / CONFIG, run / CONFIG)  # last: it makes the folder a run
    finally:
        lock.release()
    return True


def recover_by_name(reference: str, runs_dir: Path) -> dict[Path, RebuiltRecord]:
    """Rebuild the records of all runs that a reference may mean, if they cannot be opened.

    RunNotFoundError if one of them has only checkpoints from which no run can be restored.
    """
    # Candidates: run folders of that name, or with a number appended; a folder at that path; the run of a checkpoint's path.
    name = reference.partition("@")[0]
    numbered = re.compile(re.escape(name) + r"(-\d+)?")
    candidates = [Path(name), Path(name).resolve().parent.parent]
    if runs_dir.is_dir():
        candidates += [path for path in runs_dir.iterdir() if numbered.fullmatch(path.name)]
    recovered: dict[Path, RebuiltRecord] = {}
    for path in dict.fromkeys(candidate.resolve() for candidate in candidates):
        unpack(path)
        if (path / CONFIG).is_file() and (path / CHECKPOINTS).is_dir():
            rebuilt = recover(path, thorough=False)
            recovered |= {} if rebuilt is None else {path: rebuilt}
    return recovered


def recover(path: Path, *, thorough: bool = True) -> RebuiltRecord | None:
    """Rebuild the record of a run if it is missing or damaged; None if it is intact.

    RunInUseError if a live process holds the run, StoreError if there is nothing to rebuild it from.
    """
    record = path / RECORD
    trouble = find_damage(record, thorough=thorough)
    if trouble is None:
        return None
    newest = checkpoints.newest(path / CHECKPOINTS, carried=True)
    if newest is None:
        raise StoreError(
            f"{record} {trouble}, and the run has no complete checkpoint: nothing is left to go on from. "
            "Restore the file from a copy, or delete the folder and start anew."
        )
    lock = RunLock.acquire(path)
    try:
        return rebuild_record(path, record, newest.step, trouble)
    finally:
        lock.release()
