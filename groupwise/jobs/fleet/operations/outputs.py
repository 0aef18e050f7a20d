"""The outputs of jobs on the control machine: artefacts in folders, listed in their records, and mirrored checkpoints, whose blobs are
named by rows.

Only listed files can be read: a path leads to a file only if the record of its folder has it, a hash to a blob only if a checkpoint of the
same job names it. A client that fetches a job requests each of its files, of which there may be a hundred thousand, so the names in the
record, or in the checkpoints, of a job are read once, and cached until they change.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.files.artefacts import artefact_folder, record_of
from groupwise.jobs.fleet.operations import find
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import Document, checkpoint_document
from groupwise.jobs.fleet.store.tables import NEWEST_FIRST, Checkpoint, Job

REMEMBERED = 4
"""Records, and as many jobs with checkpoints, whose names are cached: the names of 100,000 files take some 20 MB of memory."""


class _NameCache:
    """Caches the most recently computed sets of names; the key changes with everything that they depend on."""

    def __init__(self) -> None:
        self._cached: OrderedDict[Hashable, frozenset[str]] = OrderedDict()
        self._lock = Lock()

    def of(self, key: Hashable, compute: Callable[[], frozenset[str]]) -> frozenset[str]:
        """The cached set. Two concurrent callers may both compute it."""
        with self._lock:
            names = self._cached.get(key)
        if names is None:
            names = compute()
        with self._lock:
            self._cached[key] = names
            self._cached.move_to_end(key)
            while len(self._cached) > REMEMBERED:
                self._cached.popitem(last=False)
        return names


_PATHS = _NameCache()
_HASHES = _NameCache()


def job_that_left(session: Session, actor: Actor, job_id: str) -> Document:
    """The id and status of a job whose files are requested. Raises `unknown_job`."""
    row = session.execute(select(Job.status, Job.project).where(Job.job_id == job_id)).first()
    if row is None or not actor.may_see(row.project):
        raise find.no_job(session, actor, job_id)
    return {"job_id": job_id, "status": row.status}


# Artefacts


def artefacts(folder: Path, job: Document, epoch: int | None = None, rank: int = 0) -> Document:
    """An attempt's artefacts: path, sha256, mode and bytes of each file, and the files left out. Without `epoch`: of the newest attempt.

    `folder`: the folder of all jobs' artefacts. Raises `unknown_file`.
    """
    epoch_found, record = _open_record(folder, job, epoch, rank)
    with record:
        document = json.load(record)
    return {
        "job_id": job["job_id"],
        "epoch": epoch_found,
        "rank": rank,
        "files": document["files"],
        "left_out": document.get("left_out", []),
    }


def artefact(folder: Path, job: Document, path: str, epoch: int | None, rank: int = 0) -> Path:
    """The path of a file among an attempt's artefacts. Raises `unknown_file`."""
    epoch_found, record = _open_record(folder, job, epoch, rank)
    with record:
        status = os.fstat(record.fileno())
        cache_key = (record.name, status.st_ino, status.st_mtime_ns, status.st_size)
        paths = _PATHS.of(cache_key, lambda: frozenset(json.load(record)["files"]))
    if path not in paths:
        raise Refusal(
            "unknown_file",
            f"{job['job_id']} left no file {path!r}; GET /jobs/{job['job_id']}/artefacts lists them.",
        )
    file = artefact_folder(folder, job["job_id"], epoch_found, rank) / path
    if not file.is_file():
        raise Refusal(
            "unknown_file", f"{path!r} of {job['job_id']} is not on the fleet's disk any more."
        )
    return file


def _open_record(folder: Path, job: Document, epoch: int | None, rank: int) -> tuple[int, IO[str]]:
    """The attempt's epoch, and its opened record, which was written before the folder got its name. Raises `unknown_file`."""
    job_id, epoch_found = job["job_id"], epoch
    if epoch_found is None:
        with suppress(OSError, ValueError):
            epoch_found = int(os.readlink(artefact_folder(folder, job_id, 0).with_name("current")))
    if epoch_found is not None:
        with suppress(FileNotFoundError):
            return epoch_found, record_of(artefact_folder(folder, job_id, epoch_found, rank)).open()
    whose = "" if epoch is None else f" by its attempt {epoch}"
    whose += f" of rank {rank}" if rank else ""
    raise Refusal("unknown_file", f"{job_id} is {job['status']} and has left nothing here{whose}.")


# Checkpoints


def checkpoints(session: Session, actor: Actor, job_id: str) -> list[Document]:
    """The mirrored checkpoints of a job, the newest first. Raises `unknown_job`."""
    job_that_left(session, actor, job_id)
    rows = session.scalars(
        select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(*NEWEST_FIRST)
    )
    return [checkpoint_document(row) for row in rows]


def checkpoint_file(session: Session, actor: Actor, job_id: str, sha256: str) -> str:
    """Return the hash if a mirrored checkpoint of the job has such a file. Raises `unknown_file`."""
    job_that_left(session, actor, job_id)
    # The key differs for any other job, moment or database; it omits the manifests, which are long.
    columns = (Checkpoint.generation, Checkpoint.epoch, Checkpoint.path, Checkpoint.mirrored_at)
    rows = session.execute(select(*columns).where(Checkpoint.job_id == job_id).order_by(*columns))
    key = (session.get_bind().engine.url, job_id, tuple(map(tuple, rows)))

    def hashes() -> frozenset[str]:
        manifests = session.scalars(select(Checkpoint.manifest).where(Checkpoint.job_id == job_id))
        return frozenset(entry[0] for manifest in manifests for entry in manifest.values())

    if sha256 not in _HASHES.of(key, hashes):
        raise Refusal(
            "unknown_file",
            f"no mirrored checkpoint of {job_id} has a file {sha256!r}, or none any more: only the newest are kept.",
        )
    return sha256
