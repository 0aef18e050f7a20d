"""What became of a job, as one document for people and programs, beside the files that came back."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from groupwise.jobs.clouds.backend import Fetched, Handle, Status
from groupwise.jobs.clouds.folder import set_aside as set_files_aside
from groupwise.runs.folder import RECORD, read_summary

RESULT = "launch-result.json"
FOLDER = "launches"
"""Folder of the project with a folder for each job."""
MARKER = ".groupwise-launches"
"""The file that says that it is this folder."""

NOTHING_IN_IT = ("link", "pipe", "socket", "device")
"""Kinds of what is left out that hold nothing of their own."""


def prepare(folder: Path) -> None:
    """Make the folder of a job's results; neither git nor the next job takes it for files of the project."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.parent.name == FOLDER:
        (folder.parent / MARKER).touch()
        ignore = folder.parent / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", "utf-8")


def set_aside(folder: Path) -> Path | None:
    """Before another job of this name begins: what an earlier one brought back is no part of what this one makes, no checkpoint for it to
    go on from, nor proof that its results are here. Where it is now; None: there was nothing. Raises CloudError."""
    aside = set_files_aside(folder)
    if aside is not None and (folder / RESULT).exists():
        (folder / RESULT).replace(aside / RESULT)
    return aside


def result(handle: Handle, place: str, status: Status, fetched: Fetched) -> dict[str, Any]:
    """The document; what the job has cost is not known yet."""
    ending = status.ending
    runs = [_run(fetched.folder, path) for path in fetched.files if _is_record(path)]
    return {
        "format": 1,
        "name": handle.name,
        "place": place,
        "attempt": handle.attempt,
        "state": status.phase if ending is None else ending.outcome,
        "reason": None if ending is None else ending.reason,
        "exit_known": ending is not None,
        "failure": None if ending is None else ending.failure,
        "exit_code": None if ending is None else ending.code,
        "seconds": None if ending is None else ending.seconds,
        "cost": None,
        "cost_counts": None,
        "runs": runs,
        "files": list(fetched.files),
        "left_out": dict(fetched.left_out),
    }


def is_all_of(folder: Path, handle: Handle) -> bool:
    """True if everything this attempt made is there: it had ended, and no file was left out."""
    try:
        found: dict[str, Any] = json.loads((folder / RESULT).read_bytes())
        same = (found["name"], found["attempt"]) == (handle.name, handle.attempt)
        lost = set(found["left_out"].values()) - set(NOTHING_IN_IT)
        return same and found["exit_known"] and not lost
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write(folder: Path, document: dict[str, Any]) -> Path:
    """Durable, in place of that of before."""
    path = folder / RESULT
    atomic_files.write_json(path, document)
    return path


def _is_record(path: str) -> bool:
    """True for the record of a run, not the copy in one of its checkpoints."""
    return PurePosixPath(path).name == RECORD and "checkpoints" not in PurePosixPath(path).parts


def _run(folder: Path, record: str) -> dict[str, Any]:
    """Its name and, once it has ended by itself, what its summary says: state, steps, metrics, where it is on the hub.

    `problem`: why a summary that came cannot be read.
    """
    run = PurePosixPath(record).parent
    summary = problem = None
    try:
        summary = read_summary(folder / run)
    except StoreError as error:
        problem = error.message
    return {"run": run.name, "folder": run.as_posix(), "summary": summary, "problem": problem}
