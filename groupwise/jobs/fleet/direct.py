"""A fleet of this machine, straight on its database and its folder: the methods of `FleetClient`, without a server.

So a command is written once, and works on a fleet here and on one behind an address; both give the same documents, and refuse in the
same words. Each call is one short transaction; what may let a job begin rings the doorbell, which only makes it begin sooner. For
programs without an event loop.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy.orm import Session

from groupwise.api.schemas.fleet import LogPart, expect_few, portions
from groupwise.api.schemas.idempotency import new_idempotency_key
from groupwise.api.schemas.keys import LOCAL
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.client import named_files
from groupwise.jobs.fleet.download import DownloadRequest, Sum, Tell, fetch, tell_nobody
from groupwise.jobs.fleet.files.logs import LOOK_AGAIN, follower_at
from groupwise.jobs.fleet.notify.composite import doorbell_of, ring_and_leave
from groupwise.jobs.fleet.queue.request import from_document
from groupwise.jobs.fleet.retry import Patience
from groupwise.jobs.fleet.settings import FleetPlace
from groupwise.jobs.fleet.states import FINAL
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.text_validation import require_passable
from groupwise.jobs.fleet.verbs import (
    jobs,
    keys,
    machines,
    outputs,
    projects,
    prune,
    status,
    submission,
)
from groupwise.jobs.fleet.verbs.actor import Actor
from groupwise.jobs.fleet.verbs.documents import Document, event_document
from groupwise.jobs.hosts.files import PIECE, BlobStore

P = ParamSpec("P")
T = TypeVar("T")


class DirectFleet:
    """One fleet that this machine can reach itself."""

    def __init__(
        self,
        place: FleetPlace,
        database: Database,
        actor: Actor,
        patience: Patience | None = None,
    ) -> None:
        """The caller that opened the database closes it. `patience`: how long to retry a lost database while a job is followed."""
        self.place = place
        self.database = database
        self.actor = actor
        self.patience = Patience() if patience is None else patience

    def on_behalf_of(self, who: str) -> Self:
        """The same fleet, acting for the holder of another server's key; the local user acts as themselves."""
        if who == LOCAL.key_id:
            return self
        named = copy.copy(self)
        named.actor = Actor(f"web:{who}", self.actor.projects)
        return named

    def read(
        self, verb: Callable[Concatenate[Session, Actor, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a verb that changes nothing, and return its result."""
        _require_passable(args, kwargs)
        return self.database.read(lambda session: verb(session, self.actor, *args, **kwargs))

    def change(
        self, verb: Callable[Concatenate[Session, Actor, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a verb that changes something, commit, and return its result."""
        _require_passable(args, kwargs)
        return self.database.run(lambda session: verb(session, self.actor, *args, **kwargs))

    def ring(self, *job_ids: str) -> None:
        """Wake a dispatcher for these jobs. Nothing depends on it: it looks every few seconds anyway."""
        # NATS is for programs: to connect to it would take longer than what is told by the others.
        ring_and_leave(doorbell_of(self.place.folder, self.database, None, os.environ), job_ids)

    # Jobs

    def submit(
        self,
        request: Mapping[str, Any],
        *,
        project: str | None = None,
        files: Sequence[str | Path] | Mapping[str, str | Path] = (),
        idempotency_key: str | None = None,
    ) -> Document:
        """Submit a job; `files`: what it takes along. Submitted again with the same key it is the same job."""
        document = dict(request)
        if files:
            document["files"] = {**document.get("files", {}), **self.upload(files)}
        return self.submit_all([document], project=project, idempotency_key=idempotency_key)[0]

    def submit_all(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        project: str | None = None,
        idempotency_key: str | None = None,
    ) -> list[Document]:
        """Submit several jobs, all of them or none."""
        expect_few(len(requests))
        named = new_idempotency_key() if idempotency_key is None else idempotency_key

        def submitted(session: Session) -> list[Document]:
            return submission.submit_all(
                session,
                self.actor,
                [from_document(each) for each in requests],
                project=project,
                key=named,
                allowed=self.place.secrets,
            )

        accepted = self.patience.ask(lambda: self._as_asked(submitted))
        self.ring(*(each["job_id"] for each in accepted))
        return accepted

    def plan(self, request: Mapping[str, Any], *, project: str | None = None) -> Document:
        """Describe the job and where it could run now, without submitting it."""
        return self._as_asked(
            lambda session: submission.plan(
                session,
                self.actor,
                from_document(request),
                project=project,
                allowed=self.place.secrets,
            )
        )

    def _as_asked(self, fn: Callable[[Session], T]) -> T:
        """Report what admission finds wrong as the caller's mistake: Raises Refusal `invalid_request`."""
        try:
            return self.database.run(fn)
        except UsageError as error:
            raise Refusal("invalid_request", error.message) from error

    def jobs(self, **wanted: Any) -> list[Document]:
        """Jobs, the newest first. `wanted`: as `FleetClient.jobs` has it."""
        told = {name: value for name, value in wanted.items() if value is not None}
        require_passable(**told)
        return self.read(jobs.listing, jobs.filter_of(**told))

    def show(self, job_id: str) -> Document:
        """All about one job."""
        return self.read(jobs.show, job_id)

    def progress(self, job_id: str) -> Document:
        """Its status, exit code, reason, and the epochs of its attempts."""
        return self.read(jobs.progress, job_id)

    def cancel(self, job_id: str, reason: str | None = None) -> Document:
        """Have it end; its status is `cancelled` once nothing of it is left."""
        return self._rung(job_id, self.change(jobs.cancel, job_id, reason))

    def hold(self, job_id: str) -> Document:
        """Have a waiting job wait until it is released."""
        return self.change(jobs.hold, job_id)

    def release(self, job_id: str) -> Document:
        """Let a held job go on."""
        return self._rung(job_id, self.change(jobs.release, job_id))

    def retry(self, job_id: str) -> Document:
        """Start a failed or cancelled job again."""
        return self._rung(job_id, self.change(jobs.retry, job_id, allowed=self.place.secrets))

    def cancel_all(self, ids: Sequence[str], reason: str | None = None) -> list[Document]:
        """`cancel` for many: the document of each, or `job_id` and `error` (`code`, `message`) where it was refused."""
        return self._changed_all(ids, jobs.cancelling(reason), reason)

    def hold_all(self, ids: Sequence[str]) -> list[Document]:
        """`hold` for many, answered as `cancel_all`."""
        return self._changed_all(ids, jobs.holding)

    def release_all(self, ids: Sequence[str]) -> list[Document]:
        """`release` for many, answered as `cancel_all`."""
        return self._changed_all(ids, jobs.releasing)

    def retry_all(self, ids: Sequence[str]) -> list[Document]:
        """`retry` for many, answered as `cancel_all`."""
        return self._changed_all(ids, jobs.retrying(self.place.secrets))

    def _changed_all(
        self, ids: Sequence[str], change: jobs.Change, reason: str | None = None
    ) -> list[Document]:
        require_passable(ids=list(ids), reason=reason)
        found: list[Document] = []
        for some in portions(ids):
            done = self.change(jobs.together, some, change)
            self.ring(*jobs.changed_ids(done))
            found += done
        return found

    def _rung(self, job_id: str, found: Document) -> Document:
        self.ring(job_id)
        return found

    def prune(
        self,
        older_than: float,
        *,
        project: str | None = None,
        status: Sequence[str] | None = None,
        dry_run: bool = False,
    ) -> Document:
        """Remove jobs that ended more than so many seconds ago, with logs and artefacts: their ids, and the bytes that they had."""
        return prune.clear_away(
            self.database,
            BlobStore(self.place.blobs),
            (self.place.logs, self.place.artefacts),
            self.actor,
            older_than,
            project=project,
            status=jobs.ended_statuses(status),
            dry_run=dry_run,
        )

    # Bytes

    def log(
        self,
        job_id: str,
        *,
        epoch: int | None = None,
        offset: int = 0,
        rank: int = 0,
        tail: int | None = None,
        wait: float = 0.0,
    ) -> LogPart:
        """The next piece of a log; without `epoch` of the newest, from its beginning, or `tail` lines before its present end."""
        found = self.progress(job_id)
        follower = follower_at(
            self.place.logs, job_id, epoch=epoch, offset=offset, rank=rank, tail=tail
        )
        ends = time.monotonic() + wait
        while True:
            over = found["status"] in FINAL  # before reading: what was written until then is read
            piece = follower.read()
            if piece is not None or over or time.monotonic() >= ends:
                break
            time.sleep(LOOK_AGAIN)
            found = self.progress(job_id)
        at = follower.position
        return LogPart(
            data=b"" if piece is None else piece.data,
            epoch=None if at is None else at.epoch,
            offset=0 if at is None else at.offset,
            ended=over and piece is None,
        )

    def upload(
        self,
        files: Sequence[str | Path] | Mapping[str, str | Path],
        *,
        tell: Tell = tell_nobody,
    ) -> dict[str, list[Any]]:
        """Keep files and folders of this machine for jobs; the manifest under which a job takes them along. `tell`: how far it is."""
        store, found = BlobStore(self.place.blobs), named_files(files)
        total = Sum(tell, sum(path.stat().st_size for path in found.values()))
        entries = store.put_files(found, lambda name, count: total.more(f"copying {name}", count))
        return {path: [entry.sha256, entry.mode, entry.size] for path, entry in entries.items()}

    def artefacts(self, job_id: str, *, epoch: int | None = None, rank: int = 0) -> Document:
        """An attempt's artefacts: `files`, by path, with sha256, mode and bytes; without `epoch` the newest attempt that left any."""
        return outputs.artefacts(
            self.place.artefacts, self.read(outputs.job_that_left, job_id), epoch, rank
        )

    def checkpoints(self, job_id: str) -> list[Document]:
        """Its mirrored checkpoints, the newest first."""
        return self.read(outputs.checkpoints, job_id)

    def fetch(
        self,
        job_id: str,
        folder: str | Path,
        *,
        paths: Sequence[str] = (),
        checkpoints: bool = False,
        epoch: int | None = None,
        rank: int = 0,
        force: bool = False,
        tell: Tell = tell_nobody,
    ) -> Document:
        """Bring what it left into another folder; each file appears whole, after its hash was found right."""
        wanted = DownloadRequest(paths, checkpoints, epoch, rank)
        return fetch(self, job_id, Path(folder), wanted, force=force, tell=tell)

    def artefact_pieces(
        self, job_id: str, path: str, *, epoch: int, rank: int = 0, offset: int = 0
    ) -> Iterator[bytes]:
        """The bytes of an artefact from an offset on."""
        job = self.patience.ask(lambda: self.read(outputs.job_that_left, job_id))
        return _pieces(outputs.artefact(self.place.artefacts, job, path, epoch, rank), offset)

    def checkpoint_pieces(self, job_id: str, sha256: str, *, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a file of a mirrored checkpoint, by its hash, from an offset on."""
        named = self.patience.ask(lambda: self.read(outputs.checkpoint_file, job_id, sha256))
        return _pieces(BlobStore(self.place.blobs).path(named), offset)

    # Machines, people, state

    def machines(self, *, removed: bool = False) -> list[Document]:
        """All machines, with their GPUs and who holds them."""
        return self.read(machines.listing, removed=removed)

    def machine(self, vm_id: str) -> Document:
        """One of them."""
        return self.read(machines.show, vm_id)

    def add_machine(self, machine: Mapping[str, Any]) -> Document:
        """Take one in: the fields of `groupwise.jobs.fleet.verbs.machines.NewMachine`."""
        return self.change(machines.add, machines.NewMachine(**machine))

    def change_machine(self, vm_id: str, **wanted: Any) -> Document:
        """Change ip_address, port, user, ssh_key_path, jump ({}: none), workdir, python, cpu_slots, projects ([]: any), labels (None takes
        one away), deadman (0: never), probe, idle_memory_mb, engine (of what stands behind it, these); None: as it was."""
        return self._changed(machines.change, vm_id, **wanted)

    def drain(self, vm_id: str) -> Document:
        """Place nothing new there; what runs goes on."""
        return self._changed(machines.drain, vm_id)

    def undrain(self, vm_id: str) -> Document:
        """Place work there again."""
        return self._changed(machines.undrain, vm_id)

    def cordon(self, vm_id: str, reason: str) -> Document:
        """Place nothing new there, and say why."""
        return self._changed(machines.cordon, vm_id, reason)

    def uncordon(self, vm_id: str) -> Document:
        """Place work there again; failed launches are forgotten."""
        return self._changed(machines.uncordon, vm_id)

    def lost(self, vm_id: str) -> Document:
        """It will not come back: its attempts end, and its jobs go elsewhere."""
        return self._changed(machines.lost, vm_id)

    def remove(self, vm_id: str) -> Document:
        """Take it out of the fleet."""
        return self._changed(machines.remove, vm_id)

    def trust(self, vm_id: str, fingerprint: str | None = None) -> Document:
        """Pin the host key that it showed last, which must have this fingerprint, if one is given."""
        return self._changed(machines.trust, vm_id, fingerprint)

    def clear_quarantine(self, vm_id: str, gpu: str) -> Document:
        """Let jobs have a GPU again; `gpu` is its index or UUID."""
        return self._changed(machines.clear_quarantine, vm_id, gpu)

    def projects(self) -> list[Document]:
        """Those that there are, with what of them waits and runs."""
        return self.read(projects.listing)

    def change_project(self, name: str, **wanted: float | None) -> Document:
        """Set weight, max_gpus, max_waiting; None takes a quota away."""
        return self._changed(projects.change, name, **wanted)

    def _changed(self, verb: Callable[..., Document], *args: Any, **kwargs: Any) -> Document:
        found = self.change(verb, *args, **kwargs)
        self.ring()
        return found

    def keys(self) -> list[Document]:
        """List all keys, without their secret texts."""
        return self.read(keys.listing)

    def make_key(
        self,
        role: str,
        *,
        projects: Sequence[str] | None = None,
        seconds: float | None = None,
        note: str | None = None,
    ) -> Document:
        """A key with the role read, act or admin."""
        return self.change(keys.make, role, projects=projects, lasts=seconds, note=note)

    def revoke_key(self, key_id: str) -> Document:
        """Revoke a key: it is refused from the next request on."""
        return self.change(keys.revoke, key_id)

    def status(self) -> Document:
        """Jobs by status, machines, the control plane, alarms."""
        return self.read(status.overview, self.place.growing)

    def events(self, *, after: int = 0, limit: int = 100) -> list[Document]:
        """Events after that one, the oldest first."""

        def found(session: Session, actor: Actor) -> list[Document]:
            actor.require_all_projects("read the events of all projects")
            return [event_document(event) for event in events.after(session, after, limit)]

        return self.change(
            found
        )  # nothing; but one who looks at one moment only would miss those who commit late


def _require_passable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse strings that are no valid text: a terminal may pass such input."""
    require_passable(*(each for each in args if isinstance(each, str)), **kwargs)


def _pieces(path: Path, offset: int) -> Iterator[bytes]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise Refusal("unknown_file", f"{path.name} is not on the fleet's disk any more.") from None
    with file:
        file.seek(offset)
        while piece := file.read(PIECE):
            yield piece
