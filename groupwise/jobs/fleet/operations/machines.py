"""The operations for the machines of a fleet: add one, show it, keep new work away, give one up.

    drain      nothing new is placed there, and running jobs continue. A reason may be given; the fleet itself drains a machine that fails
               every launch
    lost       an operator declares that it will not come back: its attempts end as `host_lost`, and their GPUs are free again. If it
               answers after all, a dispatcher ends the given-up attempts there, and then it takes work again by itself
    remove     it leaves the fleet, once nothing runs there; its row stays for the history. If it is added again while a given-up attempt
               may be left there, it counts as lost until a dispatcher has ended that
    trust      pins the host key that it shows

Nothing here connects to a machine. The poller observes a new one because its row exists, and the dispatchers see every flag before they
place or launch anything.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.api.schemas.fleet import (
    MAX_INTEGER,
    MAX_SECONDS,
    MAX_SLOTS,
    MIN_DEADMAN,
    NAME,
    EngineBody,
)
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.operations import find, visibility
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import (
    Document,
    event_document,
    gpu_document,
    machine_document,
    machine_state,
)
from groupwise.jobs.fleet.queue import elastic, requeue_pending, untracked_processes
from groupwise.jobs.fleet.queue.fair_share import WAITING
from groupwise.jobs.fleet.states import AttemptState, Cleanup, Contact, Observed
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.engine import upsert
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Event, Job, Member, Reservation
from groupwise.jobs.fleet.text_validation import text_problems

VM_ID = re.compile(NAME)
"""Names of machines; a trigger refuses others in rows that are written by hand."""
MAX_NAMED = 20
"""Maximum jobs named that wait for a removed machine."""
MAX_EVENTS = 20
"""Maximum events shown for one machine, the newest."""
LOCAL = "local"
"""The transport of the machine that the control plane runs on."""
WAY = ("ip_address", "port", "user", "ssh_key_path", "jump")
"""Columns with the address of a machine; they may change with the network, while something runs there."""
FOLDER = "groupwise-fleet"
"""A runner's folder for all its files; the same as the database's default."""
PLACE = ("user", "workdir")
"""Columns that locate a runner's files, so they must not change while something runs there; a trigger enforces this too."""


@dataclass(frozen=True, slots=True)
class NewMachine:
    """The description of a machine to add; None: the database's default."""

    vm_id: str
    ip_address: str = "127.0.0.1"
    port: int = 22
    user: str | None = None
    ssh_key_path: str | None = None
    transport: str = "ssh"
    jump: Mapping[str, Any] | None = None
    host_key: str | None = None
    """The pinned host key, as `type base64`."""
    seen_host_key: str | None = None
    """A host key that the machine has shown and that is not trusted yet."""
    workdir: str | None = None
    python: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    cpu_slots: int | None = None
    projects: Sequence[str] | None = None
    """Only jobs of these projects are placed there; None: jobs of any project."""
    deadman: float | None = None
    probe: Sequence[str] | None = None
    idle_memory_mb: int | None = None
    engine: Mapping[str, Any] | None = None
    """The engine that starts jobs for the machine (`groupwise.api.schemas.fleet.EngineBody`); None: the machine itself."""

    def problems(self) -> Iterable[str]:
        """The problems of the description, as messages."""
        fields = {name: getattr(self, name) for name in NewMachine.__slots__}
        yield from text_problems(fields, "")
        if self.jump is not None:
            yield from _problems_of_jump(self.jump)
        yield from self._problems_with_engine()
        if not VM_ID.fullmatch(self.vm_id):
            yield f"{self.vm_id!r} is not a name for a machine: letters, digits, `.`, `_` and `-`, at most 63, a letter or digit first"
        if not 1 <= self.port <= 65535:
            yield f"port {self.port}: ports are 1 to 65535"
        if self.transport == "ssh" and not self.user:
            yield "no user: say which user to log in as (--user)"
        if self.cpu_slots is not None and not 0 <= self.cpu_slots <= MAX_SLOTS:
            yield f"cpu_slots {self.cpu_slots}: 0 to {MAX_SLOTS} jobs without GPUs at once"
        if self.projects is not None and not all(self.projects):
            yield "projects: an empty name"
        if self.probe is not None and (not self.probe or not self.probe[0]):
            yield "probe is empty: a command that lists the GPUs is wanted, as nvidia-smi"
        if self.idle_memory_mb is not None and not 0 <= self.idle_memory_mb <= MAX_INTEGER:
            yield f"idle_memory_mb {self.idle_memory_mb}: 0 to {MAX_INTEGER} MB"
        if self.deadman is not None and not MIN_DEADMAN <= self.deadman <= MAX_SECONDS:
            yield f"deadman {self.deadman:g}: {MIN_DEADMAN:.0f} to {MAX_SECONDS:.0f} seconds; a shorter silence would end healthy jobs"

    def _problems_with_engine(self) -> Iterable[str]:
        if self.engine is None:
            return
        yield from elastic.problems(self.engine)
        for name in NOT_WITH_ENGINE:
            if getattr(self, name) is not None:
                yield f"{name} is for machines that begin jobs themselves: {NOT_WITH_ENGINE[name]}"


NOT_WITH_ENGINE = {
    "cpu_slots": "behind an engine all jobs have its slots",
    "deadman": "what an engine has begun ends by its time limit",
    "probe": "an engine's GPUs are not looked at",
    "idle_memory_mb": "an engine's GPUs are not looked at",
}


def _problems_of_jump(jump: Mapping[str, Any]) -> Iterable[str]:
    """Problems with the description of a jump host."""
    texts = ("host", "user", "ssh_key_path", "host_key")
    if unknown_keys := sorted(jump.keys() - {*texts, "port"}):
        yield f"jump has no {', '.join(unknown_keys)}: host, port, user, ssh_key_path and host_key are what there is"
    yield from (
        f"jump.{name} is a text"
        for name in texts
        if jump.get(name) is not None and not isinstance(jump[name], str)
    )
    if not jump.get("host"):
        yield "jump has no host"
    port = jump.get("port", 22)
    if not isinstance(port, int) or not 1 <= port <= 65535:
        yield f"jump.port {port}: ports are 1 to 65535"


def add(session: Session, actor: Actor, new: NewMachine) -> Document:
    """Add a machine to the fleet, or add it back. Raises `invalid_request` or `vm_exists`."""
    actor.require_all_projects("add a machine")
    if problems := list(new.problems()):
        raise Refusal("invalid_request", "; ".join(problems) + ".")
    is_new = _make_row(session, new.vm_id)
    vm = session.get_one(VM, new.vm_id, with_for_update=True, populate_existing=True)
    if vm.active:
        raise Refusal(
            "vm_exists",
            f"there is a machine {new.vm_id} already, {vm.user or ''}@{vm.ip_address}:{vm.port}. Choose another name; or "
            f"`groupwise fleet vm trust {new.vm_id}` lets it have jobs if its host key is not trusted yet, `vm set` changes how it is "
            f"reached, and `vm remove` removes it.",
        )
    before = None if is_new else {"active": False}
    _set_columns(vm, new)
    # An observation that started before saw the old machine.
    vm.observed_round = database_time(session)
    _require_own_folder(session, vm)
    # Rows of GPUs stay for the history, and would be counted.
    gpus = select(GPU.gpu_id).where(GPU.vm_id == new.vm_id).limit(1)
    if new.engine is not None and session.scalar(gpus) is not None:
        raise Refusal(
            "vm_exists",
            f"a machine with GPUs was called {new.vm_id} before, and its history stays. Choose another name for what is behind an "
            "engine.",
        )
    vm.lost_at = (
        (vm.lost_at or database_time(session)) if _may_still_run_there(session, new.vm_id) else None
    )
    session.flush()
    session.refresh(vm)
    after = {
        "ip_address": vm.ip_address,
        "port": vm.port,
        "user": vm.user,
        "trusted": bool(vm.host_key),
        "lost_at": vm.lost_at,
    }
    _append_event(session, actor, events.VM_ADDED, vm, before=before, after=after)
    return machine_document(vm)


def _require_own_folder(session: Session, vm: VM) -> None:
    """Refuse a folder of the same machine that another row uses: each would report the other's jobs.

    One machine under two addresses is not recognised. Then its GPUs belong to the first row (`observation._find_twins`), and an attempt is
    live whichever row reports it (`records.known_jobs`); only its slots for jobs without GPUs count twice.
    """
    location: dict[str, Any] = {"transport": vm.transport}
    if vm.transport != LOCAL:
        location |= {name: getattr(vm, name) for name in ("ip_address", "port", "user")}
    query = select(VM.vm_id, VM.workdir).where(VM.active, VM.vm_id != vm.vm_id)
    rows = session.execute(query.filter_by(**location).order_by(VM.vm_id))
    folder = _spelled_shortly(vm.workdir)
    other = next((vm_id for vm_id, path in rows if _spelled_shortly(path) == folder), None)
    if other is not None:
        raise Refusal(
            "invalid_request",
            f"{other} keeps everything in {vm.workdir} of the same machine, and both would take each other's jobs for their own. Give "
            f"{vm.vm_id} a --workdir of its own.",
        )


def _spelled_shortly(folder: str) -> str:
    """A folder of a machine in one spelling: `~/w/` is `w`, as both are in the home there."""
    return posixpath.normpath(folder.removeprefix("~/"))


def _make_row(session: Session, vm_id: str) -> bool:
    """Returns True if the row is new. If two callers add one machine at once, the second waits here for the first."""
    row = upsert(session, VM).values(vm_id=vm_id, active=False).on_conflict_do_nothing()
    return session.execute(row.returning(VM.vm_id)).scalar() is not None


def _may_still_run_there(session: Session, vm_id: str) -> bool:
    """True if an attempt that was given up may still run there."""
    given_up = (
        select(Member.epoch)
        .join(Attempt, Attempt.epoch == Member.epoch)
        .where(
            Member.vm_id == vm_id,
            Member.released.is_(False),
            Attempt.state == AttemptState.ENDED,
            Attempt.cleanup == Cleanup.CLEAN,
        )
    )
    return session.scalar(given_up.limit(1)) is not None


def _set_columns(vm: VM, new: NewMachine) -> None:
    """Set all columns that describe the machine, and reset the state of an earlier machine of this name."""
    for name in (
        "ip_address",
        "port",
        "user",
        "ssh_key_path",
        "transport",
        "host_key",
        "seen_host_key",
        "cpu_slots",
        "deadman",
    ):
        setattr(vm, name, getattr(new, name))
    vm.jump = None if new.jump is None else dict(new.jump)
    vm.labels = dict(new.labels)
    vm.probe = None if new.probe is None else list(new.probe)
    vm.projects = sorted(set(new.projects)) if new.projects else None
    vm.engine = None if new.engine is None else _without_defaults(new.engine)
    if new.workdir is not None:
        vm.workdir = new.workdir
    elif new.engine is not None:  # several rows may represent the parts of one cluster
        vm.workdir = f"{FOLDER}-{new.vm_id}"
    if new.python is not None:
        vm.python = new.python
    if new.idle_memory_mb is not None:
        vm.idle_memory_mb = new.idle_memory_mb
    vm.active, vm.draining, vm.drain_reason = True, False, None
    vm.contact, vm.unreachable_since, vm.misses = Contact.NEW, None, 0
    vm.problem, vm.launch_failures, vm.boot_id = None, 0, None


def _without_defaults(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The engine as it is stored in the row; it must be valid."""
    return EngineBody.model_validate(dict(engine)).model_dump(exclude_defaults=True)


# Showing


def listing(session: Session, actor: Actor, *, removed: bool = False) -> list[Document]:
    """All machines with their free capacity, by name; with `removed` also those that were removed."""
    query = select(VM).order_by(VM.vm_id)
    rows = session.scalars(query if removed else query.where(VM.active)).all()
    return [_with_gpus(session, actor, vm) for vm in rows]


def show(session: Session, actor: Actor, vm_id: str) -> Document:
    """One machine with its GPUs, the jobs there, and its newest events. Raises `unknown_vm`."""
    vm = find.machine(session, vm_id)
    # Events of the machine itself; those of its jobs are listed with the jobs.
    of_itself = select(Event).where(Event.vm_id == vm_id, Event.job_id.is_(None))
    newest = session.scalars(of_itself.order_by(Event.event_id.desc()).limit(MAX_EVENTS)).all()
    events_shown = [visibility.event(actor, event_document(event)) for event in reversed(newest)]
    return _with_gpus(session, actor, vm) | {"events": events_shown}


def _with_gpus(session: Session, actor: Actor, vm: VM) -> Document:
    gpus = session.scalars(select(GPU).where(GPU.vm_id == vm.vm_id).order_by(GPU.index)).all()
    jobs_by_gpu: dict[int, list[Document]] = {}
    slots: list[Document] = []
    for reservation, attempt, job in session.execute(
        select(Reservation, Attempt, Job)
        .join(Attempt, Attempt.epoch == Reservation.epoch)
        .join(Job, Job.job_id == Attempt.job_id)
        .where(Reservation.vm_id == vm.vm_id, Reservation.released_at.is_(None))
    ):
        # The reservation's holder; callers without access to its project learn only that there is one.
        if not actor.may_see(job.project):
            holder = {
                "job_id": None,
                "epoch": None,
                "share_mb": reservation.share_mb,
                "cleanup": None,
            }
        else:
            holder = {
                "job_id": job.job_id,
                "epoch": attempt.epoch,
                "share_mb": reservation.share_mb,
                "cleanup": attempt.cleanup if attempt.state == AttemptState.ENDED else None,
            }
        if reservation.gpu_id is None:
            slots.append(holder)
        else:
            jobs_by_gpu.setdefault(reservation.gpu_id, []).append(holder)
    documents = [
        visibility.gpu(actor, gpu_document(gpu, jobs_by_gpu.get(gpu.gpu_id, []))) for gpu in gpus
    ]
    strays = untracked_processes.holding(vm.facts)
    usable_gpus = [
        gpu
        for gpu in documents
        if gpu["observed"] == Observed.OK
        and gpu["quarantine_reason"] is None
        and gpu["uuid"] not in strays.whole | strays.shares_mb.keys()
    ]
    return visibility.machine(actor, machine_document(vm)) | {
        "state": machine_state(vm),
        "total_gpus": len(documents),
        "available_gpus": sum(not gpu["held_by"] for gpu in usable_gpus)
        if machine_state(vm) == "ok"
        else 0,
        "gpus": documents,
        "cpu_slots_held_by": slots,
        **_engine_slots(vm, len(slots)),
        "fingerprint": fingerprint(vm.host_key),
        "seen_fingerprint": fingerprint(vm.seen_host_key),
    }


def _engine_slots(vm: VM, in_use: int) -> Document:
    """Slots of the machine's engine; None values if it has no engine."""
    engine = elastic.elastic_of(vm.engine)
    if engine is None:
        return {"total_slots": None, "available_slots": None}
    total = engine.body.slots
    free_slots = max(total - in_use, 0) if machine_state(vm) == "ok" and not engine.problem else 0
    return {"total_slots": total, "available_slots": free_slots}


def fingerprint(key: str | None) -> str | None:
    """The fingerprint of a host key, as ssh shows it."""
    if key is None:
        return None
    from groupwise.jobs.hosts import (
        keys,  # asyncssh takes a moment to load, and most answers need none
    )

    try:
        return keys.parse_host_key(key).fingerprint
    except UsageError:  # a row that was written by hand must not hide the others
        return "unreadable"


# New work


def drain(session: Session, actor: Actor, vm_id: str, reason: str | None = None) -> Document:
    """Place nothing new there; running jobs continue. Safe to repeat; a given `reason` replaces the earlier one."""
    actor.require_all_projects("drain a machine")
    vm = find.active_machine(session, vm_id, lock=True)
    after = {"draining": True, "reason": reason or vm.drain_reason}
    return _set_draining(session, actor, vm, after, events.VM_DRAINING)


def undrain(session: Session, actor: Actor, vm_id: str) -> Document:
    """Place work there again, whether an operator or failed launches had stopped that; the failed launches are forgotten."""
    actor.require_all_projects("undrain a machine")
    vm = find.active_machine(session, vm_id, lock=True)
    return _set_draining(
        session, actor, vm, {"draining": False, "reason": None}, events.VM_UNDRAINED
    )


def _set_draining(session: Session, actor: Actor, vm: VM, after: Document, event: str) -> Document:
    """Drain the machine or not, with a reason, as `after` says; nothing is recorded if nothing changes."""
    before = {"draining": vm.draining, "reason": vm.drain_reason}
    if before != after:
        vm.draining, vm.drain_reason = after["draining"], after["reason"]
        if not vm.draining:
            vm.launch_failures = 0
        _append_event(session, actor, event, vm, before=before, after=after)
        requeue_pending.wake(session, vm_ids=[vm.vm_id], actor=actor.name)
    return _with_gpus(session, actor, vm)


# Giving up a machine


def lost(session: Session, actor: Actor, vm_id: str) -> Document:
    """Declare that a machine will not come back. Its attempts end without being charged; returns them under `attempts`."""
    actor.require_all_projects("declare a machine lost")
    vm = find.active_machine(session, vm_id, lock=True)
    if vm.transport == LOCAL and vm.engine is None:
        raise Refusal(
            "vm_state", f"{vm_id} is the machine that the fleet itself runs on; it is not lost."
        )
    attempts = _open_attempts(session, vm_id)
    if vm.lost_at is None:
        vm.lost_at = database_time(session)
        detail = {"attempts": [attempt.epoch for attempt in attempts]}
        _append_event(
            session, actor, events.VM_LOST, vm, after={"lost_at": vm.lost_at}, detail=detail
        )
    ending_attempts = [
        {"job_id": open_attempt.job_id, "epoch": open_attempt.epoch, "state": open_attempt.state}
        for open_attempt in attempts
    ]
    return _with_gpus(session, actor, vm) | {"attempts": ending_attempts}


def remove(session: Session, actor: Actor, vm_id: str) -> Document:
    """Take a machine out of the fleet. Raises `vm_in_use` while anything runs there or the machine holds anything of an attempt."""
    actor.require_all_projects("remove a machine")
    vm = find.machine(session, vm_id, lock=True)
    if not vm.active:
        return machine_document(vm)
    _require_unused(session, vm)
    vm.active = False
    _append_event(
        session, actor, events.VM_REMOVED, vm, before={"active": True}, after={"active": False}
    )
    names_it = Job.resources["vm"].as_string() == vm_id
    waiting = select(Job.job_id).where(WAITING, names_it).order_by(Job.created_at)
    return machine_document(vm) | {"waiting_jobs": list(session.scalars(waiting.limit(MAX_NAMED)))}


def _require_unused(session: Session, vm: VM, consequence: str = "", next_step: str = "") -> None:
    """Raise `vm_in_use` if attempts use the machine. `consequence` is added to the message; `next_step`: the step after draining it."""
    attempts = _open_attempts(session, vm.vm_id)
    if not attempts:
        return
    users: list[str] = []
    for attempt in attempts[:5]:
        has_ended = attempt.state == AttemptState.ENDED
        condition = f"cleanup {attempt.cleanup}" if has_ended else attempt.state
        users.append(f"{attempt.job_id} (attempt {attempt.epoch}, {condition})")
    rest_note = f" and {len(attempts) - 5} more" if len(attempts) > 5 else ""
    finish = (
        "It is drained already, so wait until they have finished"
        if vm.draining
        else f"`groupwise fleet vm drain {vm.vm_id}` lets them finish"
    )
    remedy = (
        "It was declared lost: a dispatcher gives them up within seconds, if one is running."
        if vm.lost_at is not None
        else f"{finish}{next_step and f', {next_step}'}; if the machine never comes back, "
        f"`groupwise fleet vm mark-lost {vm.vm_id}`."
    )
    raise Refusal(
        "vm_in_use",
        f"{vm.vm_id} is still used by {', '.join(users)}{rest_note}{consequence}. {remedy}",
    )


def _open_attempts(session: Session, vm_id: str) -> list[Attempt]:
    """Attempts that are live on the machine, or may have left something there."""
    query = (
        select(Attempt)
        .join(Member, Member.epoch == Attempt.epoch)
        .where(
            Member.vm_id == vm_id,
            (Attempt.state != AttemptState.ENDED) | (Attempt.cleanup != Cleanup.CLEAN),
        )
        .order_by(Attempt.epoch)
    )
    return list(session.scalars(query).all())


# Trust


def trust(session: Session, actor: Actor, vm_id: str, shown: str | None = None) -> Document:
    """Pin the host key that the machine showed last. `shown`: the fingerprint that this key must have.

    If `shown` is None, the caller has seen the fingerprint and agreed. Raises `host_key_mismatch`.
    """
    actor.require_all_projects("trust a machine")
    vm = find.active_machine(session, vm_id, lock=True)
    if vm.seen_host_key is None:
        if vm.host_key is not None and shown in (None, fingerprint(vm.host_key)):
            return _with_gpus(session, actor, vm)
        if vm.transport == LOCAL:
            reason = f"{vm_id} is this machine: it is not reached by SSH and has no host key."
        elif vm.host_key is not None:
            pinned_fingerprint = fingerprint(vm.host_key)
            reason = f"{vm_id} is trusted by the host key {pinned_fingerprint} and has shown no other one."
        else:
            problem = vm.problem or "Wait for the next round, or look at `groupwise fleet doctor`."
            reason = f"{vm_id} has not shown its host key yet: no poller has reached it. {problem}"
        raise Refusal("host_key_mismatch", reason)
    shown_fingerprint = fingerprint(vm.seen_host_key)
    if shown is not None and shown != shown_fingerprint:
        raise Refusal(
            "host_key_mismatch",
            f"{vm_id} shows the host key {shown_fingerprint}, not {shown}. The machine's operator can tell which is right: "
            "`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there.",
        )
    before = fingerprint(vm.host_key)
    vm.host_key, vm.seen_host_key = vm.seen_host_key, None
    if vm.contact == Contact.UNTRUSTED:
        vm.contact, vm.problem = Contact.NEW, None
    _append_event(
        session,
        actor,
        events.VM_TRUSTED,
        vm,
        before={"fingerprint": before},
        after={"fingerprint": shown_fingerprint},
    )
    return _with_gpus(session, actor, vm)


def change(
    session: Session,
    actor: Actor,
    vm_id: str,
    *,
    ip_address: str | None = None,
    port: int | None = None,
    user: str | None = None,
    ssh_key_path: str | None = None,
    jump: Mapping[str, Any] | None = None,
    workdir: str | None = None,
    python: str | None = None,
    cpu_slots: int | None = None,
    projects: Sequence[str] | None = None,
    labels: Mapping[str, str | None] | None = None,
    deadman: float | None = None,
    probe: Sequence[str] | None = None,
    idle_memory_mb: int | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Document:
    """Change a machine's row. A setting that is left out, or None, is unchanged.

    Its address: ip_address, port, user, ssh_key_path, jump ({}: none). The folder of its runner: workdir. The interpreter of its jobs:
    python. The number of jobs without GPUs at once: cpu_slots. The projects that may use it: projects ([]: any). Labels by which jobs
    select it: labels (only those given change; None removes one). Seconds of silence after which jobs that start from now on are ended:
    deadman (0: never). Reading its GPUs: probe, idle_memory_mb. Options of its engine: engine (only the fields given change; None restores
    a default).

    Running attempts keep their interpreter and their deadman. While something runs, changes that move the runner's root are refused:
    `vm_in_use`.
    """
    actor.require_all_projects("change a machine")
    changes: dict[str, Any] = {
        "ip_address": ip_address,
        "port": port,
        "user": user,
        "ssh_key_path": ssh_key_path,
        "jump": jump,
        "workdir": workdir,
        "python": python,
        "cpu_slots": cpu_slots,
        "projects": projects,
        "labels": labels,
        "deadman": deadman,
        "probe": probe,
        "idle_memory_mb": idle_memory_mb,
        "engine": engine or None,
    }
    after = {name: value for name, value in changes.items() if value is not None}
    if not after:
        raise Refusal("invalid_request", f"nothing to change: give {', '.join(changes)}.")
    vm = find.active_machine(session, vm_id, lock=True)
    if engine:
        after["engine"] = _merge_engine(vm, engine)
    _require_valid(after, vm.engine)
    if vm.transport == LOCAL and (location_names := [name for name in WAY if name in after]):
        raise Refusal(
            "vm_state",
            f"{vm_id} is the machine that the fleet itself runs on; there is no login, so it has no {' or '.join(location_names)}.",
        )
    before, after = {name: getattr(vm, name) for name in after}, _as_columns(vm, after)
    if before == after:
        return _with_gpus(session, actor, vm)
    if moved_columns := [name for name in PLACE if before.get(name) != after.get(name)]:
        _require_movable(session, vm, moved_columns)
    for name, value in after.items():
        setattr(vm, name, value)
    if any(before.get(name) != after.get(name) for name in (*WAY, *PLACE)):
        _require_own_folder(session, vm)
        # An observation that started before saw the old place.
        vm.observed_round = database_time(session)
        vm.contact, vm.misses, vm.problem, vm.unreachable_since = Contact.NEW, 0, None, None
    _append_event(session, actor, events.VM_CHANGED, vm, before=before, after=after)
    requeue_pending.wake(session, vm_ids=[vm_id], actor=actor.name)
    return _with_gpus(session, actor, vm)


def _require_movable(session: Session, vm: VM, columns: Sequence[str]) -> None:
    """Raise `vm_in_use` if something may still run on the machine: dispatchers would look for it where the columns lead afterwards."""
    consequence = f"its {' and '.join(columns)} cannot be changed"
    _require_unused(
        session,
        vm,
        f", so {consequence} now",
        next_step=f"then `groupwise fleet vm set {vm.vm_id}` again",
    )
    if _may_still_run_there(session, vm.vm_id):
        raise Refusal(
            "vm_in_use",
            f"processes of an attempt that was given up may still run on {vm.vm_id}, so {consequence}: a dispatcher ends them as soon as "
            "the machine answers.",
        )


def _merge_engine(vm: VM, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The machine's engine document with the changes applied."""
    if vm.engine is None:
        raise Refusal(
            "vm_state",
            f"{vm.vm_id} begins jobs itself: only a machine that is added with an engine has one.",
        )
    if engine.get("name", vm.engine.get("name")) != vm.engine.get("name"):
        raise Refusal(
            "vm_state",
            f"what begins jobs on {vm.vm_id} does not change: add another row, and `groupwise fleet vm remove {vm.vm_id}`.",
        )
    merged = {**vm.engine, **engine}
    return {name: value for name, value in merged.items() if value is not None}


def _require_valid(after: Mapping[str, Any], engine: Mapping[str, Any] | None) -> None:
    """Check the changes by the rules for a new machine. `engine`: the engine in the row. Raises `invalid_request`."""
    problems = [f"{name} is empty" for name, value in after.items() if value == ""]
    as_new: dict[str, Any] = {"vm_id": "vm", "user": "-", "engine": engine, **after}
    if after.get("deadman") == 0:
        del as_new["deadman"]
    if after.get("jump") == {}:
        del as_new["jump"]
    problems += NewMachine(**as_new).problems()
    if problems:
        raise Refusal("invalid_request", "; ".join(problems) + ".")


def _as_columns(vm: VM, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the changes into the values of columns."""
    columns = dict(changes)
    if "labels" in changes:
        labels = {**(vm.labels or {}), **changes["labels"]}
        columns["labels"] = {name: value for name, value in labels.items() if value is not None}
    if "projects" in changes:
        columns["projects"] = sorted(set(changes["projects"])) or None
    if "probe" in changes:
        columns["probe"] = list(changes["probe"])
    if changes.get("deadman") == 0:
        columns["deadman"] = None
    if "jump" in changes:
        columns["jump"] = dict(changes["jump"]) or None
    if "engine" in changes:
        columns["engine"] = _without_defaults(changes["engine"])
    return columns


def clear_quarantine(session: Session, actor: Actor, vm_id: str, gpu: str) -> Document:
    """Clear the quarantine of a GPU, or the report that it is broken: jobs may use it again. `gpu`: index or UUID. Raises `unknown_gpu`."""
    actor.require_all_projects("clear the quarantine of a GPU")
    row = find.gpu(session, vm_id, gpu, lock=True)
    vm = find.machine(session, vm_id)
    before = {"quarantine_reason": row.quarantine_reason, "fault_report": row.fault_report}
    if any(before.values()):
        row.quarantine_reason = row.fault_report = None
        _append_event(
            session,
            actor,
            events.GPU_CLEARED,
            vm,
            before=before,
            after=dict.fromkeys(before),
            detail={"index": row.index, "uuid": row.uuid},
        )
        requeue_pending.wake(session, vm_ids=[vm_id], actor=actor.name)
    return _with_gpus(session, actor, vm)


def _append_event(
    session: Session,
    actor: Actor,
    kind: str,
    vm: VM,
    *,
    before: Document | None = None,
    after: Document | None = None,
    detail: Document | None = None,
) -> None:
    events.append(
        session,
        actor=actor.name,
        kind=kind,
        vm_id=vm.vm_id,
        before=before,
        after=after,
        detail=detail,
    )
