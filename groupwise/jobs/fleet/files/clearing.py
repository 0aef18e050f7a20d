"""Clears the control machine: blobs that the database does not name any more, logs and artefacts of pruned jobs, and rows older than a week
that are no longer needed.

To remove something, its row is deleted and that is committed; then its files are deleted, here, called by `prune` or by the dispatchers,
which check now and then. A crash in between leaves files without a row, which the next check finds; there is never a row without its files.

Writers work in the opposite order: first the blob, then the row that names it. Between the two no row names the blob, and its age spares it
(`jobs/hosts/files.py`): the time is read before the named blobs are, so a blob that was stored, or asked for, within a day of that time
stays, no matter how long the query takes. Blobs that only the mirror of checkpoints has stored are spared for minutes, and while a mirror
needs them. Needed blobs are read before named ones, so each blob is in one of the two sets.

Logs and artefacts are removed only if the events record that their job was pruned. If no table knows a job, the database may have been
restored from a backup, or be the wrong one. For the same reason, a database that never had a job, and so names no blob, is not trusted.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from sqlalchemy import delete, exists, select
from sqlalchemy.orm import Session

from groupwise.core.atomic_files import files_below
from groupwise.jobs.fleet.files.logs import folder_name
from groupwise.jobs.fleet.states import AttemptState
from groupwise.jobs.fleet.store import events, rights
from groupwise.jobs.fleet.store.database import Database, clock, database_time
from groupwise.jobs.fleet.store.tables import (
    GPU,
    Attempt,
    Checkpoint,
    ControlProcess,
    Event,
    GPUHistory,
    Job,
)
from groupwise.jobs.hosts.files import SPARED, SPARED_MARKED, BlobStore
from groupwise.jobs.hosts.spec import JOB_ID

READ_AT_ONCE = 1000
EVERY = SPARED_MARKED
"""Seconds between two checks by dispatchers."""
SILENT = 7 * 86_400.0
"""Seconds after which the row of a killed process of the control plane is deleted."""
HISTORY_MINUTES = 7 * 24 * 60
"""Minutes for which observations of each GPU are kept."""
GPUS_AT_ONCE = 20
"""GPUs whose history is cleared in one transaction: a week of one is ten thousand rows."""
CLEARING = ".clearing"


def clear_away(
    database: Database, store: BlobStore, folders: Sequence[Path], *, after: float = 0.0
) -> int:
    """Remove unnamed files and old rows. Returns the bytes of the removed blobs. `folders`: those of logs and artefacts.

    Does nothing while another process clears this store, or if one did less than `after` seconds ago. The process may die after any step.
    """
    with _clearing_lock(store, after) as has_lock:
        if not has_lock:
            return 0
        names: set[str] = set()
        for folder in folders:
            with suppress(FileNotFoundError):
                names.update(path.name.removesuffix(".log") for path in folder.iterdir())
        jobs = {name for name in names if JOB_ID.fullmatch(name)}
        for job_id in database.read(lambda s: pruned_jobs(s, jobs)):
            remove_files(folders, job_id)
        # A process that ends normally deletes its row.
        is_silent = ControlProcess.seen_at < clock() - SILENT
        database.run(lambda s: s.execute(delete(ControlProcess).where(is_silent)) and None)
        forget_history(database)
        now, needed_hashes = store.now(), store.all_needed()
        blobs = database.read(named_blobs)
        if blobs is None:
            return 0
        freed = store.collect(blobs | needed_hashes, now=now)
        # Rights to blobs that are gone go too. A blob that was sent again meanwhile has a new right, which is too young to be
        # deleted.
        hashes = database.read(partial(rights.old, age=SPARED))
        missing = [sha256 for sha256 in hashes if sha256 not in store]
        for start in range(0, len(missing), READ_AT_ONCE):
            portion = missing[start : start + READ_AT_ONCE]
            database.run(partial(rights.forget, hashes=portion, age=SPARED))
        return freed


@contextmanager
def _clearing_lock(store: BlobStore, after: float) -> Generator[bool]:
    """Yields True if it is time to clear and no other process clears this store meanwhile."""
    with (store.root / CLEARING).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        is_due = os.fstat(lock.fileno()).st_mtime + after <= store.now()
        yield is_due
        if is_due:
            os.utime(lock.fileno())


def forget_history(database: Database) -> None:
    """Delete observations of GPUs that are more than a week old, also of machines that have left, by the table's primary key."""

    def forget(gpus: Sequence[int], session: Session) -> None:
        first_minute = int(database_time(session) // 60) - HISTORY_MINUTES
        is_old = GPUHistory.gpu_id.in_(gpus) & (GPUHistory.minute < first_minute)
        session.execute(
            delete(GPUHistory).where(is_old).execution_options(synchronize_session=False)
        )

    gpus = database.read(lambda s: list(s.scalars(select(GPU.gpu_id))))
    for start in range(0, len(gpus), GPUS_AT_ONCE):
        database.run(partial(forget, gpus[start : start + GPUS_AT_ONCE]))


# --- blobs ----------------------------------------------------------------------------------------


def named_blobs(session: Session) -> set[str] | None:
    """Blobs that the database names: files of jobs, checkpoints, and the files that unfinished attempts started with.

    None: there never was a job, so the answer is not known. Call it within `Database.read`, which shows one moment.
    """
    pruning = select(Event.event_id).where(Event.kind == events.JOB_PRUNED)
    traces = (session.scalar(query.limit(1)) for query in (select(Job.job_id), pruning))
    had_jobs = any(trace is not None for trace in traces)
    if not had_jobs:
        return None
    live = Attempt.state != AttemptState.ENDED
    queries = (
        select(Job.spec["files"]),
        select(Job.request["files"]).where(Job.spec.is_(None)),
        select(Checkpoint.manifest),
        select(Attempt.spec["files"]).where(live),
        select(Attempt.resume_from["manifest"]).where(live),
    )
    return {name for query in queries for name in _hashes_in(session, query)}


def _hashes_in(session: Session, query: Any) -> Iterator[str]:
    """Hashes in the manifests of a query, read in batches: there may be very many. A row written by hand may hold anything."""
    for manifest in session.scalars(query.execution_options(yield_per=READ_AT_ONCE)):
        if isinstance(manifest, dict):
            for entry in cast("dict[str, Any]", manifest).values():
                if isinstance(entry, list) and entry:
                    yield str(cast("list[Any]", entry)[0])


# --- logs and artefacts ---------------------------------------------------------------------------


def pruned_jobs(session: Session, jobs: Iterable[str]) -> list[str]:
    """The jobs among these that were pruned and not submitted again under the same id."""
    pruned: list[str] = []
    job_ids = sorted(jobs)
    for start in range(0, len(job_ids), READ_AT_ONCE):
        portion = job_ids[start : start + READ_AT_ONCE]
        query = (
            select(Event.job_id)
            .where(
                Event.job_id.in_(portion),
                Event.kind == events.JOB_PRUNED,
                ~exists().where(Job.job_id == Event.job_id),
            )
            .distinct()
        )
        pruned += [job for job in session.scalars(query) if job is not None]
    return pruned


def remove_files(folders: Iterable[Path], job_id: str) -> None:
    """Remove the files of a job from the folders of logs and artefacts."""
    for path in _job_paths(folders, job_id):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def size_of_files(folders: Iterable[Path], job_id: str) -> int:
    """Disk usage in bytes of a job's files in these folders."""
    size = 0
    for path in _job_paths(folders, job_id):
        children = files_below(path) if not path.is_symlink() else ()
        for child in (path, *children):
            with suppress(OSError):
                blocks = child.lstat().st_blocks
                size += blocks * 512 if child.is_file() else 0
    return size


def _job_paths(folders: Iterable[Path], job_id: str) -> Iterator[Path]:
    base_name = folder_name(job_id)
    for folder in folders:
        for name in (base_name, f"{base_name}.log"):
            path = folder / name
            if path.is_symlink() or path.exists():
                yield path
