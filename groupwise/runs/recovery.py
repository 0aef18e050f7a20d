"""Runs that lost their record, found and mended before they are resumed.

A run is found by its record; so one whose `run.db` is missing or damaged is looked for by the name of its folder. If it has a
checkpoint, its record is put together again from the pieces that came with the checkpoints (`groupwise.runs.record_segments`). Where
nothing came but checkpoints, the rest of its folder is made of what they carry (`groupwise.runs.checkpoint_bundle`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from groupwise.core.errors import StoreError
from groupwise.runs import checkpoint_bundle, checkpoints
from groupwise.runs.folder import CHECKPOINTS, CONFIG, RECORD
from groupwise.runs.lock import RunLock
from groupwise.runs.record_segments import MadeAnew, make_anew, trouble_with


def recover_by_name(reference: str, runs_dir: Path) -> dict[Path, MadeAnew]:
    """Mend the records of all runs that a reference may mean, as far as opening them shows that they are broken.

    RunNotFoundError if one of them is nothing but checkpoints that no run can be made from.
    """
    found = {
        path.resolve(): recover(path, thorough=False)
        for path in _folders_named(reference, runs_dir)
    }
    return {path: made for path, made in found.items() if made is not None}


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


def _folders_named(reference: str, runs_dir: Path) -> Iterator[Path]:
    """Run folders of that name or with a number behind it, or at that path; that of a checkpoint's path."""
    name = reference.partition("@")[0]
    numbered = re.compile(re.escape(name) + r"(-\d+)?")
    places = [Path(name), Path(name).resolve().parent.parent]
    if runs_dir.is_dir():
        places += [path for path in runs_dir.iterdir() if numbered.fullmatch(path.name)]
    for path in dict.fromkeys(place.resolve() for place in places):
        checkpoint_bundle.unpack(path)
        if (path / CONFIG).is_file() and (path / CHECKPOINTS).is_dir():
            yield path
