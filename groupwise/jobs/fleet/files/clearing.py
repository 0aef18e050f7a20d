"""Clearing away what nothing names any more on the control machine: blobs, and what pruned jobs have left of logs and artefacts; and rows
of which only the last week is of use.

Whoever wants something gone takes it out of the database, and that is committed. Then its files go: here, by whoever comes first of
`prune` and the dispatchers, which look now and then. A crash in between leaves files without a row, which the next look finds; there is
never a row without its files.

Whoever writes does it the other way round: first the blob, then the row that names it. Between the two nothing names the blob, and what
spares it is its age (`jobs/hosts/files.py`): which blobs are named is asked after the time was looked at, so one that was put, or asked
for, within a day of that stays, whatever was asked and however long it takes. Blobs that came by the mirror of checkpoints alone are spared
for minutes, and while a mirror needs them: that is asked before it is asked what is named, so that it is the one or the other.

Logs and artefacts go only of jobs of which the events say that they were pruned. Those of a job that no table knows may belong to a
database that was set back, or to one that somebody has named by mistake; and a database that never had a job names no blob, so that it
is not believed either.
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

from groupwise.jobs.fleet.files.folders import folder_name
from groupwise.jobs.fleet.states import AttemptState
from groupwise.jobs.fleet.store import events, rights
from groupwise.jobs.fleet.store.database import Database, clock, seconds
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
"""Seconds between two looks of dispatchers."""
SILENT = 7 * 86_400.0
"""Seconds after which nobody asks any more about a process of the control plane that was killed."""
HISTORY_MINUTES = 7 * 24 * 60
"""Of what was seen of each GPU."""
GPUS_AT_ONCE = 20
"""In one transaction: a week of one is ten thousand rows."""
CLEARING = ".clearing"


def clear_away(
    database: Database, store: BlobStore, folders: Sequence[Path], *, after: float = 0.0
) -> int:
    """Remove what nothing names any more; bytes of the blobs among it. `folders`: those of logs and artefacts.

    Does nothing while another process of this store is at it, or where that was less than `after` seconds ago. Any step may be the last one
    of this process.
    """
    with _alone(store, after) as alone:
        if not alone:
            return 0
        for job_id in database.read(lambda s: pruned(s, _names(folders))):
            remove_files(folders, job_id)
        database.run(forget_processes)
        forget_history(database)
        now, needed = store.now(), store.all_needed()
        named = database.read(named_blobs)
        if named is None:
            return 0
        freed = store.collect(named | needed, now=now)
        forget_rights(database, store)
        return freed


@contextmanager
def _alone(store: BlobStore, after: float) -> Generator[bool]:
    """Whether it is time, and no other process collects in this store meanwhile."""
    with (store.root / CLEARING).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        due = os.fstat(lock.fileno()).st_mtime + after <= store.now()
        yield due
        if due:
            os.utime(lock.fileno())


def forget_processes(session: Session) -> None:
    """Rows of processes that were killed; whoever ends in order takes its own away."""
    session.execute(delete(ControlProcess).where(ControlProcess.seen_at < clock() - SILENT))


def forget_history(database: Database) -> None:
    """What was seen of GPUs more than a week ago, of those too whose machines have left; the key of the table finds it."""
    gpus = database.read(lambda s: list(s.scalars(select(GPU.gpu_id))))
    for start in range(0, len(gpus), GPUS_AT_ONCE):
        database.run(partial(_forget_minutes, gpus[start : start + GPUS_AT_ONCE]))


def _forget_minutes(gpus: Sequence[int], session: Session) -> None:
    first = int(seconds(session) // 60) - HISTORY_MINUTES
    old = GPUHistory.gpu_id.in_(gpus) & (GPUHistory.minute < first)
    session.execute(delete(GPUHistory).where(old).execution_options(synchronize_session=False))


# --- blobs ----------------------------------------------------------------------------------------


def named_blobs(session: Session) -> set[str] | None:
    """Blobs that something in the database names: files of jobs, checkpoints, and what attempts that are not over began with.

    None: there never was a job, so that nobody knows. To be called within `Database.read`, which shows one moment.
    """
    if not _has_had_jobs(session):
        return None
    live = Attempt.state != AttemptState.ENDED
    queries = (
        select(Job.spec["files"]),
        select(Job.request["files"]).where(Job.spec.is_(None)),
        select(Checkpoint.manifest),
        select(Attempt.spec["files"]).where(live),
        select(Attempt.resume_from["manifest"]).where(live),
    )
    return {name for query in queries for name in _names_in(session, query)}


def _has_had_jobs(session: Session) -> bool:
    gone = select(Event.event_id).where(Event.kind == events.JOB_PRUNED)
    return any(session.scalar(query.limit(1)) is not None for query in (select(Job.job_id), gone))


def _names_in(session: Session, query: Any) -> Iterator[str]:
    """Of manifests, a few at a time: there may be very many. A row that somebody wrote by hand may hold anything."""
    for manifest in session.scalars(query.execution_options(yield_per=READ_AT_ONCE)):
        if isinstance(manifest, dict):
            for entry in cast("dict[str, Any]", manifest).values():
                if isinstance(entry, list) and entry:
                    yield str(cast("list[Any]", entry)[0])


def forget_rights(database: Database, store: BlobStore) -> None:
    """Those to blobs that are gone. One that was sent again meanwhile has its right of then, which is young and stays."""
    known = database.read(partial(rights.old, age=SPARED))
    gone = [sha256 for sha256 in known if sha256 not in store]
    for start in range(0, len(gone), READ_AT_ONCE):
        some = gone[start : start + READ_AT_ONCE]
        database.run(partial(rights.forget, hashes=some, age=SPARED))


# --- logs and artefacts ---------------------------------------------------------------------------


def pruned(session: Session, jobs: Iterable[str]) -> list[str]:
    """Of these, those that were cleared away and that nobody has submitted again under the same id."""
    found: list[str] = []
    waiting = sorted(jobs)
    for start in range(0, len(waiting), READ_AT_ONCE):
        some = waiting[start : start + READ_AT_ONCE]
        query = (
            select(Event.job_id)
            .where(
                Event.job_id.in_(some),
                Event.kind == events.JOB_PRUNED,
                ~exists().where(Job.job_id == Event.job_id),
            )
            .distinct()
        )
        found += [job for job in session.scalars(query) if job is not None]
    return found


def _names(folders: Iterable[Path]) -> set[str]:
    """What could be ids of jobs."""
    found: set[str] = set()
    for folder in folders:
        with suppress(FileNotFoundError):
            found.update(path.name.removesuffix(".log") for path in folder.iterdir())
    return {name for name in found if JOB_ID.fullmatch(name)}


def remove_files(folders: Iterable[Path], job_id: str) -> None:
    """Remove what a job has left in the folders of logs and artefacts."""
    for path in _paths(folders, job_id):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def size_of_files(folders: Iterable[Path], job_id: str) -> int:
    """Bytes of all that."""
    return sum(_size(path) for path in _paths(folders, job_id))


def _paths(folders: Iterable[Path], job_id: str) -> Iterator[Path]:
    own = folder_name(job_id)
    for folder in folders:
        for name in (own, f"{own}.log"):
            path = folder / name
            if path.is_symlink() or path.exists():
                yield path


def _size(path: Path) -> int:
    found = 0
    for each in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
        with suppress(OSError):
            status = each.lstat()
            found += status.st_blocks * 512 if each.is_file() else 0
    return found
