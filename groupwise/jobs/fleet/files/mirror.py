"""Checkpoints travel: while a job runs, its newest complete checkpoint is brought to the control machine's blob store.

A job that is tried again, on whatever machine, begins with it. A checkpoint is a folder whose `manifest.json` was written last and names
step, files, sizes and hashes. Only blobs that are not in the store come; each is hashed here. One that is torn, or was removed by its job
as it was read, is skipped: the one before is still there, and a later one will come. The row in the table is written when all of its
blobs are on the disk, so that a checkpoint which stands there is whole. Where none comes, the operator is told (`records.not_mirrored`):
nobody else would notice before the machine is lost, and its job begins anew.

Jobs of a sweep save the same tokenizer at the same moment. A blob comes once for all of a project: whoever finds that another is fetching
it waits for as long as more of it comes. One that stands still, because whoever holds it was stopped, comes beside it under another name.

What the manifest says, the job has written. So a blob that is in the store, and that its project may not name (`store/rights.py`), comes
too, or it would get the file of another project by its hash; what has come, the project may name from then on.

Its blobs are marked in the store: they are many, nobody but rows of checkpoints and attempts is to name them, and those that none names
any more go within minutes. So while one is brought here, the store is told that its blobs are needed.

Of a gang, what rank 0 wrote is the checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.controller import Part
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.attempts.records import guarded, mirrored, not_mirrored
from groupwise.jobs.fleet.disk_full import no_room
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.fleet.store.database import seconds
from groupwise.jobs.fleet.store.tables import NEWEST_FIRST, Checkpoint, Job
from groupwise.jobs.hosts.answers import CheckpointTree
from groupwise.jobs.hosts.files import SLOWEST_DISK, BlobBusy, BlobError, BlobStore, Incoming
from groupwise.jobs.hosts.port import RunnerRefused
from groupwise.jobs.hosts.spec import FileEntry

log = logging.getLogger(__name__)

KEPT = 2
"""Checkpoints of a job that are kept unless told otherwise: one may turn out to be damaged on the disk."""
LOOK_AGAIN = 1.0
"""Seconds between two looks at a blob that somebody else receives."""
STANDS_STILL = 60.0
"""Seconds without more of it, after which it is not waited for any longer: a call to a machine that answers takes less."""


class _Torn(Exception):
    """A checkpoint is not what its manifest says, or not there any more."""


class CheckpointMirror:
    """Brings checkpoints to this machine's store, for the attempts of one dispatcher."""

    def __init__(
        self,
        store: BlobStore,
        gateway: Gateway,
        *,
        keep: int = KEPT,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep`: how many of a job stay, at least one; the rows of older ones go, and with them what holds their blobs."""
        self._store = store
        self._gateway = gateway
        self._keep = keep
        self._sleep, self._clock = sleep, clock

    async def mirror(self, part: Part) -> None:
        """Fetch the newest complete one, unless it is here. Safe to repeat, and to cancel. Raises HostError, OSError, Stale."""
        if part.rank != 0:
            return
        tree = await part.runner.manifest(part.job_id, part.epoch, "checkpoints")
        if not tree.checkpoints:
            return
        here = await self._gateway.look(lambda session: _newest_step(session, part))
        missed: tuple[CheckpointTree, _Torn] | None = None
        for checkpoint in sorted(tree.checkpoints, key=lambda c: c.step, reverse=True):
            if here is not None and checkpoint.step <= here:
                break
            with self._store.needed(entry.sha256 for entry in checkpoint.files.values()):
                try:
                    await self._fetch(part, checkpoint)
                except _Torn as torn:
                    missed = missed or (checkpoint, torn)
                    continue
                await self._gateway.commit(
                    "checkpoint.row",
                    partial(_record, part=part, checkpoint=checkpoint, keep=self._keep),
                )
            return
        if missed:
            await self._tell(part, *missed)

    async def _tell(self, part: Part, newest: CheckpointTree, torn: _Torn) -> None:
        """That it did not come. One that still stands there as it did never will; else its job was faster than the line."""
        tree = await part.runner.manifest(part.job_id, part.epoch, "checkpoints")
        gone = newest not in tree.checkpoints
        because = (
            "it was changed or removed before it had come, as those before it" if gone else torn
        )
        why = f"{newest.path} is not mirrored: {because}"
        log.info("%s.%s: %s", part.job_id, part.epoch, why)
        await self._gateway.commit(
            "checkpoint.missed",
            lambda session: not_mirrored(
                session, part.epoch, part.owner, part.rank, why, gone=gone
            ),
        )

    async def _fetch(self, part: Part, checkpoint: CheckpointTree) -> None:
        """All its blobs are in the store. Raises _Torn; for one that is too large before any other has come."""
        largest_first = sorted(checkpoint.files.items(), key=lambda file: -file[1].size)
        entries = {entry.sha256: (path, entry) for path, entry in largest_first}
        project = await self._gateway.look(lambda session: _project_of(session, part))
        wanted = await self._wanted(entries, project)
        size = sum(entries[sha256][1].size for sha256 in wanted)
        if (problem := await asyncio.to_thread(no_room, self._store.root, size)) is not None:
            raise _Torn(problem)
        for sha256 in wanted:
            path, entry = entries[sha256]
            try:
                await self._bring(part, path, entry, project)
            except RunnerRefused as error:
                raise _Torn(str(error)) from error
            except BlobError as error:
                raise _Torn(f"{path}: {error}") from error

    async def _wanted(self, hashes: Iterable[str], project: str) -> list[str]:
        """Those that are not in the store, or that the project may not name."""
        every = list(hashes)
        lacking = await self._gateway.look(
            lambda session: rights.lacking(session, [project], every)
        )
        known = [sha256 for sha256 in every if sha256 not in lacking]
        missing = await self._gateway.write(
            "checkpoint.missing", lambda: self._store.missing(known, marked=True)
        )
        return [sha256 for sha256 in every if sha256 in lacking or sha256 in missing]

    async def _bring(self, part: Part, path: str, entry: FileEntry, project: str) -> None:
        """Have one blob in the store, whoever fetches it. Raises RunnerRefused, BlobError."""
        sender = rights.sender([project])
        patience = STANDS_STILL + entry.size / SLOWEST_DISK
        here, since = -1, self._clock()
        while True:
            try:
                await self._blob(part, path, entry, project, sender)
                return
            except BlobBusy:
                await self._sleep(LOOK_AGAIN)
            if not await self._wanted([entry.sha256], project):
                return
            now = self._store.received(entry.sha256, sender)
            if now != here:
                here, since = now, self._clock()
            elif self._clock() - since >= patience:
                sender = uuid.uuid4().hex

    async def _blob(
        self, part: Part, path: str, entry: FileEntry, project: str, sender: str
    ) -> None:
        with self._store.incoming(entry.sha256, entry.size, sender, marked=True) as incoming:
            try:
                await self._rest(part, path, incoming)
            except (RunnerRefused, BlobError):
                incoming.restart()  # that file is gone, and what has come of it is of no use
                raise
            await self._gateway.write("checkpoint.blob", incoming.finish)
        sent = [(entry.sha256, project)]
        await self._gateway.commit("checkpoint.right", partial(rights.record, rights=sent))

    async def _rest(self, part: Part, path: str, incoming: Incoming) -> None:
        while incoming.received < incoming.size:
            data = await part.runner.read(part.job_id, part.epoch, path, offset=incoming.received)
            if not data:
                raise BlobError(f"only {incoming.received} of {incoming.size} bytes are there")
            await self._gateway.write("checkpoint.piece", partial(incoming.add, data))


def _project_of(session: Session, part: Part) -> str:
    return session.scalars(select(Job.project).where(Job.job_id == part.job_id)).one()


def _newest_step(session: Session, part: Part) -> int | None:
    """Of this attempt's mirrored ones."""
    return session.scalar(
        select(Checkpoint.step)
        .where(Checkpoint.job_id == part.job_id, Checkpoint.epoch == part.epoch)
        .order_by(Checkpoint.step.desc())
        .limit(1)
    )


def _record(session: Session, part: Part, checkpoint: CheckpointTree, keep: int) -> None:
    """It can be gone on with from here on; older ones (`NEWEST_FIRST`) need not be kept, and damaged ones first of all."""
    guarded(session, part.epoch, part.owner)
    mirrored(session, part.epoch, part.rank)
    session.merge(
        Checkpoint(
            job_id=part.job_id,
            generation=part.generation,
            epoch=part.epoch,
            path=checkpoint.path,
            step=checkpoint.step,
            manifest={path: [e.sha256, e.mode, e.size] for path, e in checkpoint.files.items()},
            mirrored_at=seconds(session),
        )
    )
    session.flush()
    old = session.scalars(
        select(Checkpoint)
        .where(Checkpoint.job_id == part.job_id)
        .order_by(Checkpoint.damaged_at.is_not(None), *NEWEST_FIRST)
        .offset(keep)
    ).all()
    for each in old:
        session.delete(each)
