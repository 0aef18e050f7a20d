"""What jobs left on the control machine: artefacts in folders, which their records list, and mirrored checkpoints, as blobs that rows name.

Nothing that is not listed can be read: a path leads to a file only where the record of its folder has it, a hash to a blob only where a
checkpoint of that very job names it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.fleet.files.artefacts import artefact_folder, record_of
from groupwise.fleet.store.tables import Checkpoint
from groupwise.fleet.verbs import find
from groupwise.fleet.verbs.actor import Actor
from groupwise.fleet.verbs.documents import Document, checkpoint_document
from groupwise.wire.problems import Refusal


def job_that_left(session: Session, actor: Actor, job_id: str) -> Document:
    """Its status, for who is about to look at the folder. Raises `unknown_job`."""
    return {"job_id": job_id, "status": find.job(session, actor, job_id).status}


def artefacts(folder: Path, job: Document, epoch: int | None = None, rank: int = 0) -> Document:
    """What an attempt left: path, sha256, mode and bytes of each file, and what was left out; without `epoch` the newest one.

    `folder`: where the artefacts of all jobs lie. Raises `unknown_file`.
    """
    wanted = _newest(folder, job["job_id"]) if epoch is None else epoch
    record = (
        None if wanted is None else record_of(artefact_folder(folder, job["job_id"], wanted, rank))
    )
    try:
        text = None if record is None else record.read_text()
    except FileNotFoundError:
        text = None
    if text is None:
        raise Refusal("unknown_file", _nothing_here(job, epoch, rank))
    return {"job_id": job["job_id"], "epoch": wanted, "rank": rank, **_record(text)}


def artefact(folder: Path, job: Document, path: str, epoch: int | None, rank: int = 0) -> Path:
    """Where one of these files lies. Raises `unknown_file`."""
    found = artefacts(folder, job, epoch, rank)
    if path not in found["files"]:
        raise Refusal(
            "unknown_file",
            f"{job['job_id']} left no file {path!r}; GET /jobs/{job['job_id']}/artefacts lists them.",
        )
    place = artefact_folder(folder, job["job_id"], found["epoch"], rank) / path
    if not place.is_file():
        raise Refusal(
            "unknown_file", f"{path!r} of {job['job_id']} is not on the fleet's disk any more."
        )
    return place


def _newest(folder: Path, job_id: str) -> int | None:
    try:
        return int(os.readlink(artefact_folder(folder, job_id, 0).with_name("current")))
    except (OSError, ValueError):
        return None


def _record(text: str) -> dict[str, Any]:
    """It was written before the folder got its name."""
    found = json.loads(text)
    return {"files": found["files"], "left_out": found.get("left_out", [])}


def _nothing_here(job: Document, epoch: int | None, rank: int) -> str:
    whose = "" if epoch is None else f" by its attempt {epoch}"
    whose += f" of rank {rank}" if rank else ""
    return f"{job['job_id']} is {job['status']} and has left nothing here{whose}."


def checkpoints(session: Session, actor: Actor, job_id: str) -> list[Document]:
    """Those that are mirrored, the newest first. Raises `unknown_job`."""
    find.job(session, actor, job_id)
    rows = session.scalars(
        select(Checkpoint)
        .where(Checkpoint.job_id == job_id)
        .order_by(Checkpoint.generation.desc(), Checkpoint.epoch.desc(), Checkpoint.step.desc())
    )
    return [checkpoint_document(row) for row in rows]


def checkpoint_file(session: Session, actor: Actor, job_id: str, sha256: str) -> str:
    """The hash, if it is of a file of one of these. Raises `unknown_file`."""
    for each in checkpoints(session, actor, job_id):
        if any(entry[0] == sha256 for entry in each["files"].values()):
            return sha256
    raise Refusal(
        "unknown_file",
        f"no mirrored checkpoint of {job_id} has a file {sha256!r}, or none any more: only the newest are kept.",
    )
