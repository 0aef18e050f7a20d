"""Each checkpoint carries parts of its run's folder, so that one checkpoint alone is enough to go on somewhere else.

    checkpoints/step-N/run/config.json     the resolved configuration
    checkpoints/step-N/run/records/        all pieces of the record before its own (`groupwise.runs.record_segments`)
    checkpoints/step-N/run/start/          the weights that the run was started from, where those of another run were given

All of it is written once and never changed, so it is linked, not copied, where the disk knows second names: it costs nothing here. A
program that copies checkpoints elsewhere by the hashes in their manifests sends each of these files once, and with each checkpoint only
the rows since the one before.

`carry` fills that folder while a checkpoint is written. `unpack` makes a run's folder of checkpoints that came without one; the record is
then put together as after any loss of it (`groupwise.runs.recovery`).
"""

from __future__ import annotations

import os
from pathlib import Path

from groupwise.core import atomic_files
from groupwise.core.errors import RunNotFoundError
from groupwise.runs import checkpoints, record_segments
from groupwise.runs.folder import CHECKPOINTS, CONFIG, START
from groupwise.runs.lock import RunLock

CARRIED = "run"
"""The folder within a checkpoint."""


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
