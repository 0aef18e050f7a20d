"""The outcome of a job, as one document for users and programs, next to the fetched files."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from groupwise.jobs.clouds.backend import FetchedResults, Handle, Status
from groupwise.jobs.clouds.folder import set_aside as set_files_aside
from groupwise.runs.schema import RECORD

RESULT = "launch-result.json"
FOLDER = "launches"
"""Folder of the project that contains a results folder for each job."""
MARKER = ".groupwise-launches"
"""The file that marks the folder `launches`."""

NOTHING_IN_IT = ("link", "pipe", "socket", "device")
"""Kinds of left-out files that have no content of their own."""


def prepare(folder: Path) -> None:
    """Create the folder of a job's results; its markers exclude it from git and from the files of the next job."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.parent.name == FOLDER:
        (folder.parent / MARKER).touch()
        ignore = folder.parent / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", "utf-8")


def set_aside(folder: Path) -> Path | None:
    """Move an earlier job's results aside before another job of this name starts: they contain no checkpoint for it, and do not prove that
    its results are here. Returns their new folder; None: there were none. Raises CloudError."""
    aside = set_files_aside(folder)
    if aside is not None and (folder / RESULT).exists():
        (folder / RESULT).replace(aside / RESULT)
    return aside


def result(handle: Handle, place: str, status: Status, fetched: FetchedResults) -> dict[str, Any]:
    """The document of a job's outcome; its cost is filled in later."""
    from groupwise.runs.folder import read_summary

    ending = status.ending
    runs: list[dict[str, Any]] = []
    for path in map(PurePosixPath, fetched.files):
        # Checkpoints contain copies of a run's record.
        if path.name != RECORD or "checkpoints" in path.parts:
            continue
        run, summary, problem = path.parent, None, None
        try:  # a run that ended by itself has a summary: state, steps, metrics, hub repository
            summary = read_summary(fetched.folder / run)
        except StoreError as error:
            problem = error.message
        entry = {"folder": run.as_posix(), "summary": summary, "problem": problem}
        runs.append({"run": run.name, **entry})
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
    """True if the folder contains all results of this attempt: it had ended, and no file was left out."""
    try:
        document: dict[str, Any] = json.loads((folder / RESULT).read_bytes())
        is_same_attempt = (document["name"], document["attempt"]) == (handle.name, handle.attempt)
        missing = set(document["left_out"].values()) - set(NOTHING_IN_IT)
        return is_same_attempt and document["exit_known"] and not missing
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write(folder: Path, document: dict[str, Any]) -> Path:
    """Write the document durably, replacing an earlier one; returns its path."""
    path = folder / RESULT
    atomic_files.write_json(path, document)
    return path
