"""Mirrors checkpoints: while a job runs, its newest complete checkpoint is fetched to the control machine's blob store.

A retried job starts from it, on any machine. A checkpoint is a folder whose `manifest.json` was written last and names step, files, sizes
and hashes. Only blobs that are not in the store are fetched; each is hashed here. A checkpoint that is torn, or that its job removed while
it was read, is skipped: the one before still exists, and a later one will come. The row in the table is written when all of the blobs are
on the disk, so a checkpoint with a row is complete. If none can be mirrored, the operator gets an alarm (`record_not_mirrored`): otherwise
it would go unnoticed until the machine is lost and its job starts over.

Jobs of a sweep save the same tokenizer at the same moment. A blob is fetched once for all jobs of a project: if another task is fetching
it, this one waits while it grows. If it stops growing, because its fetcher was stopped, it is fetched again under another name.

The manifest is written by the job, so it may claim any hash. A blob that is in the store, but that the project may not name
(`store/rights.py`), is fetched too; otherwise a project could get the file of another by its hash. Once fetched, the project may name it.

These blobs are marked in the store: they are many, only rows of checkpoints and attempts name them, and unnamed ones are deleted within
minutes. So while a checkpoint is fetched, its blobs are registered with the store as needed.

A gang's checkpoint is the one that rank 0 wrote.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.controller import MemberOutput
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.attempts.records import (
    locked_attempt,
    record_mirrored,
    record_not_mirrored,
)
from groupwise.jobs.fleet.disk_full import no_room
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import NEWEST_FIRST, Checkpoint, Job
from groupwise.jobs.hosts.answers import CheckpointTree
from groupwise.jobs.hosts.files import SLOWEST_DISK, BlobBusy, BlobError, BlobStore
from groupwise.jobs.hosts.host import RunnerRefused
from groupwise.jobs.hosts.spec import FileEntry

log = logging.getLogger(__name__)

KEPT = 2
"""Default number of checkpoints kept for each job: one may turn out to be damaged on the disk."""
LOOK_AGAIN = 1.0
"""Seconds between two checks of a blob that another task receives."""
STANDS_STILL = 60.0
"""Seconds without progress after which a blob is not waited for any longer: a call to a machine that answers takes less."""


class _NotMirrored(Exception):
    """A checkpoint does not match its manifest, or is gone."""


class CheckpointMirror:
    """Fetches checkpoints to this machine's store, for the attempts of one dispatcher."""

    def __init__(
        self,
        store: BlobStore,
        gateway: Gateway,
        *,
        keep: int = KEPT,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep`: checkpoints to keep for each job, at least one; the rows of older ones are deleted, and later their blobs."""
        self._store = store
        self._gateway = gateway
        self._keep = keep
        self._sleep, self._clock = sleep, clock

    async def mirror(self, output: MemberOutput) -> None:
        """Fetch the newest complete checkpoint, unless it is here. Safe to repeat and to cancel. Raises HostError, OSError, Stale."""
        if output.rank != 0:
            return
        tree = await output.runner.manifest(output.job_id, output.epoch, "checkpoints")
        if not tree.checkpoints:
            return
        newest_step = select(func.max(Checkpoint.step)).where(
            Checkpoint.job_id == output.job_id, Checkpoint.epoch == output.epoch
        )
        mirrored_step = await self._gateway.read(lambda session: session.scalar(newest_step))
        missed: tuple[CheckpointTree, _NotMirrored] | None = None
        for checkpoint in sorted(tree.checkpoints, key=lambda c: c.step, reverse=True):
            if mirrored_step is not None and checkpoint.step <= mirrored_step:
                break
            with self._store.needed(entry.sha256 for entry in checkpoint.files.values()):
                try:
                    await self._fetch_checkpoint(output, checkpoint)
                except _NotMirrored as torn:
                    missed = missed or (checkpoint, torn)
                    continue
                await self._gateway.commit(
                    "checkpoint.row",
                    partial(_write_row, output=output, checkpoint=checkpoint, keep=self._keep),
                )
            return
        if missed:
            await self._report_missed(output, *missed)

    async def _report_missed(
        self, output: MemberOutput, newest: CheckpointTree, torn: _NotMirrored
    ) -> None:
        """Record that it could not be fetched. If it still exists unchanged, it never can be; else the job replaced it too quickly."""
        tree = await output.runner.manifest(output.job_id, output.epoch, "checkpoints")
        is_gone = newest not in tree.checkpoints
        cause = (
            "it was changed or removed before it had come, as those before it" if is_gone else torn
        )
        reason = f"{newest.path} is not mirrored: {cause}"
        log.info("%s.%s: %s", output.job_id, output.epoch, reason)
        await self._gateway.commit(
            "checkpoint.missed",
            lambda session: record_not_mirrored(
                session, output.epoch, output.owner, output.rank, reason, gone=is_gone
            ),
        )

    async def _fetch_checkpoint(self, output: MemberOutput, checkpoint: CheckpointTree) -> None:
        """Fetch all its blobs into the store, the largest first: one that is too large then fails early. Raises _NotMirrored."""
        largest_first = sorted(checkpoint.files.items(), key=lambda file: -file[1].size)
        entries = {entry.sha256: (path, entry) for path, entry in largest_first}
        project_query = select(Job.project).where(Job.job_id == output.job_id)
        project = await self._gateway.read(lambda session: session.scalars(project_query).one())
        hashes = await self._missing_blobs(entries, project)
        size = sum(entries[sha256][1].size for sha256 in hashes)
        if (problem := await asyncio.to_thread(no_room, self._store.root, size)) is not None:
            raise _NotMirrored(problem)
        for sha256 in hashes:
            path, entry = entries[sha256]
            try:
                await self._ensure_blob(output, path, entry, project)
            except RunnerRefused as error:
                raise _NotMirrored(str(error)) from error
            except BlobError as error:
                raise _NotMirrored(f"{path}: {error}") from error

    async def _missing_blobs(self, hashes: Iterable[str], project: str) -> list[str]:
        """The blobs to fetch: those that are missing in the store, and those that the project may not name."""
        all_hashes = list(hashes)
        without_right = await self._gateway.read(
            lambda session: rights.lacking(session, [project], all_hashes)
        )
        permitted = [sha256 for sha256 in all_hashes if sha256 not in without_right]
        missing = await self._gateway.write(
            "checkpoint.missing", lambda: self._store.missing(permitted, marked=True)
        )
        return [sha256 for sha256 in all_hashes if sha256 in without_right or sha256 in missing]

    async def _ensure_blob(
        self, output: MemberOutput, path: str, entry: FileEntry, project: str
    ) -> None:
        """Return once a blob is in the store, fetched by this task or another. Raises RunnerRefused, BlobError."""
        sender = rights.sender([project])
        timeout = STANDS_STILL + entry.size / SLOWEST_DISK
        last_received, last_change = -1, self._clock()
        while True:
            try:
                await self._fetch_blob(output, path, entry, project, sender)
                return
            except BlobBusy:
                await self._sleep(LOOK_AGAIN)
            if not await self._missing_blobs([entry.sha256], project):
                return
            received = self._store.received(entry.sha256, sender)
            if received != last_received:
                last_received, last_change = received, self._clock()
            elif self._clock() - last_change >= timeout:
                sender = uuid.uuid4().hex

    async def _fetch_blob(
        self, output: MemberOutput, path: str, entry: FileEntry, project: str, sender: str
    ) -> None:
        with self._store.incoming(entry.sha256, entry.size, sender, marked=True) as incoming:
            try:
                while (offset := incoming.received) < incoming.size:
                    data = await output.runner.read(
                        output.job_id, output.epoch, path, offset=offset
                    )
                    if not data:
                        raise BlobError(f"only {offset} of {incoming.size} bytes are there")
                    await self._gateway.write("checkpoint.piece", partial(incoming.add, data))
            except (RunnerRefused, BlobError):
                incoming.restart()  # that file is gone, and the bytes received of it are useless
                raise
            await self._gateway.write("checkpoint.blob", incoming.finish)
        rights_given = [(entry.sha256, project)]
        await self._gateway.commit("checkpoint.right", partial(rights.record, rights=rights_given))


def _write_row(
    session: Session, output: MemberOutput, checkpoint: CheckpointTree, keep: int
) -> None:
    """Write the row, from which the job can now resume, and delete rows beyond `keep`: damaged ones first, then the oldest."""
    locked_attempt(session, output.epoch, output.owner)
    record_mirrored(session, output.epoch, output.rank)
    manifest = {path: [e.sha256, e.mode, e.size] for path, e in checkpoint.files.items()}
    # The one from which this attempt resumed is in its outputs, too: it keeps the time at which it was first mirrored.
    from_earlier = select(Checkpoint).where(
        Checkpoint.job_id == output.job_id,
        Checkpoint.epoch < output.epoch,
        Checkpoint.path == checkpoint.path,
    )
    same = [row.mirrored_at for row in session.scalars(from_earlier) if row.manifest == manifest]
    session.merge(
        Checkpoint(
            job_id=output.job_id,
            generation=output.generation,
            epoch=output.epoch,
            path=checkpoint.path,
            step=checkpoint.step,
            manifest=manifest,
            mirrored_at=min(same, default=database_time(session)),
        )
    )
    session.flush()
    surplus = session.scalars(
        select(Checkpoint)
        .where(Checkpoint.job_id == output.job_id)
        .order_by(Checkpoint.damaged_at.is_not(None), *NEWEST_FIRST)
        .offset(keep)
    ).all()
    for row in surplus:
        session.delete(row)
