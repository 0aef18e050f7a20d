"""The state of a fleet in one document: jobs by status, machines and GPUs, the control plane, and alarms.

An alarm is a problem that the fleet cannot repair by itself, or that would go unnoticed: each states the problem and the remedy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupwise.core.terminal.quantities import byte_size, counted, duration
from groupwise.jobs.fleet.attempts.decide import DEADMAN_MARGIN, ObservedState
from groupwise.jobs.fleet.attempts.ending import FAULT_REPORT_SECONDS
from groupwise.jobs.fleet.operations import find, machines
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import Document, process_document
from groupwise.jobs.fleet.processes import (
    FOLDER,
    NATS_CURSOR,
    PUBLISHING,
    RELEASE,
    UNOBSERVED,
    is_gone,
)
from groupwise.jobs.fleet.queue import untracked_processes
from groupwise.jobs.fleet.states import AttemptState, Cleanup, Contact, JobStatus
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import (
    GPU,
    VM,
    Attempt,
    Checkpoint,
    ControlProcess,
    Job,
    Member,
)
from groupwise.jobs.hosts.files import LARGEST_BLOB

SILENT_SECONDS = 30.0
"""Seconds without a report after which a process of the control plane counts as dead; each reports every ten."""
NEEDED_ROLES = ("dispatcher", "poller", "requeue", "tracker")
FORGOTTEN_SECONDS = 24 * 3600.0
"""Seconds after which a dead process is not listed any more."""
LARGE_LOG = 10_000_000_000
"""Bytes from which a running log is reported: logs are kept completely, on the machine and here, and fill both disks."""
DAMAGE_SECONDS = 24 * 3600.0
"""Seconds for which a damaged checkpoint is reported."""
MAX_PUBLISHING_DELAY = 300.0
"""Seconds that the announcement of a job's end to NATS may be late before there is an alarm."""

MIN_FREE = 1_000_000_000
"""Bytes on a disk of the control machine below which it counts as full: early enough for the operator to act."""


def overview(session: Session, actor: Actor, folders: Sequence[Path] = ()) -> Document:
    """The whole document. Only jobs that the actor may see are counted. `folders`: those of the control machine, whose disks fill up."""
    now = database_time(session)
    machine_list = machines.listing(session, actor)
    counts = find.visible(select(Job.status, func.count()).group_by(Job.status), actor)
    by_status = dict(session.execute(counts).all())
    oldest = select(func.min(Job.waiting_since)).where(
        Job.status.in_((JobStatus.QUEUED, JobStatus.PENDING))  # they could start if there were room
    )
    waiting_since = session.scalar(find.visible(oldest, actor))
    return {
        "jobs": {status.value: by_status.get(status, 0) for status in JobStatus},
        "oldest_waiting_seconds": None if waiting_since is None else max(0.0, now - waiting_since),
        "machines": {
            "total": len(machine_list),
            "ready": sum(machine["state"] == "ok" for machine in machine_list),
            "outdated_seconds": _outdated_seconds(session, machine_list, now),
            "gpus": sum(machine["total_gpus"] for machine in machine_list),
            "gpus_available": sum(machine["available_gpus"] for machine in machine_list),
        },
        "processes": processes(session),
        "alarms": list(alarms(session, actor, folders)),
        "time": now,
    }


def _outdated_seconds(
    session: Session, machine_list: Sequence[Document], now: float
) -> float | None:
    """Seconds since any machine was last looked at, if no poller is running; None: one is, or none was ever looked at."""
    looked_at = [machine["last_polled"] for machine in machine_list if machine["last_polled"]]
    if not looked_at or "poller" not in missing_roles(session):
        return None
    return max(0.0, now - datetime.fromisoformat(max(looked_at)).timestamp())


def processes(session: Session) -> list[Document]:
    """The processes of the control plane, those that are alive first; long dead ones are left out."""
    now = database_time(session)
    rows = session.scalars(
        select(ControlProcess)
        .where(ControlProcess.seen_at > now - FORGOTTEN_SECONDS)
        .order_by(ControlProcess.role, ControlProcess.started_at)
    ).all()
    documents = [process_document(row, now) for row in rows]
    for document in documents:
        is_silent = document["silent_seconds"] > SILENT_SECONDS
        document["alive"] = not is_silent and not is_gone(document["pid"], document["facts"])
    return sorted(documents, key=lambda document: not document["alive"])


NO_DISPATCHER = "no dispatcher is running; `groupwise fleet up` starts one"


def missing_roles(session: Session) -> list[str]:
    """The roles that no living process has."""
    played_roles = {process["role"] for process in processes(session) if process["alive"]}
    return [role for role in NEEDED_ROLES if role not in played_roles]


def why_nothing_starts(session: Session) -> str | None:
    """The reason why no dispatcher starts jobs, or not yet; None: one does, according to their reports."""
    dispatchers = [
        row for row in processes(session) if row["role"] == "dispatcher" and row["alive"]
    ]
    if not dispatchers:
        return NO_DISPATCHER
    unobserved_machines: list[list[str]] = [
        row["facts"].get(UNOBSERVED) or [] for row in dispatchers
    ]
    machine, *other_machines = min(unobserved_machines, key=len) or [None]
    if machine is None:
        return None
    rest_note = f" and {len(other_machines)} more" if other_machines else ""
    return f"after a standstill nothing begins before the poller has asked all machines what they run, and {machine}{rest_note} not yet"


def alarms(session: Session, actor: Actor, folders: Sequence[Path] = ()) -> Iterator[Document]:
    """Alarms, the worst first. A full disk may be the reason why a role is missing."""
    if actor.projects is None:
        yield from _disk_alarms(session, folders)
    yield from _role_alarms(session)
    if actor.projects is None:
        yield from _mixed_process_alarms(session)
        yield from _publishing_alarms(session)
        yield from _machine_alarms(session)
        yield from _stray_alarms(session)
        yield from _gpu_alarms(session)
    yield from _attempt_alarms(session, actor)
    yield from _not_mirrored_alarms(session, actor)
    yield from _damaged_checkpoint_alarms(session, actor)


def _alarm(kind: str, message: str, remedy: str, **about: object) -> Document:
    return {"kind": kind, "message": message, "remedy": remedy, **about}


def _role_alarms(session: Session) -> Iterator[Document]:
    missing = missing_roles(session)
    if missing:
        is_none_running = len(missing) == len(NEEDED_ROLES)
        deadman = shortest_deadman(session) if is_none_running else None
        yield _alarm(
            "role_missing",
            "no part of the control plane is running"
            if is_none_running
            else f"no process has the role of {' and '.join(missing)}",
            "`groupwise fleet up` starts all of them, "
            f"`groupwise fleet run {missing[0]}` {'the first' if is_none_running else 'it'} alone"
            + (f"; meanwhile a deadman ({duration(deadman)}) may end jobs" if deadman else ""),
            roles=missing,
        )


def shortest_deadman(session: Session) -> float | None:
    """Seconds after which the first machine ends a job by itself if the control plane is away; None: each job runs on."""
    deadman = Member.handle["deadman"].as_float()
    query = select(func.min(deadman)).join(Attempt, Attempt.epoch == Member.epoch)
    return session.scalar(query.where(Attempt.state != AttemptState.ENDED))


def _mixed_process_alarms(session: Session) -> Iterator[Document]:
    """Alarms of processes of one fleet that see different folders, or are of different releases."""
    living = [process for process in processes(session) if process["alive"]]
    folders = _processes_by(living, FOLDER)
    if len(folders) > 1:
        yield _alarm(
            "folder_not_shared",
            f"these have not the same folder, though they are one fleet: {'; '.join(folders.values())}",
            "what one of them puts there another does not find, so that jobs fail and files seem lost: mount the shared folder where it is "
            "missing, and restart the processes there",
        )
    releases = _processes_by(living, RELEASE)
    if len(releases) > 1:
        release_texts = "; ".join(
            f"{release}: {process_names}" for release, process_names in releases.items()
        )
        yield _alarm(
            "releases_differ",
            f"processes of several releases are one fleet: {release_texts}",
            "none knows what a later one writes: end those of the older release and start them again, as after each upgrade",
        )


def _processes_by(alive: Sequence[Document], fact: str) -> dict[str, str]:
    """Each value of a fact, with a description of the processes that report it."""
    names_by_value: dict[str, list[str]] = {}
    for document in alive:
        if (value := document["facts"].get(fact)) is not None:
            description = f"{document['role']} on {document['host']} (process {document['pid']})"
            names_by_value.setdefault(value, []).append(description)
    return {value: ", ".join(sorted(names)) for value, names in sorted(names_by_value.items())}


def _publishing_alarms(session: Session) -> Iterator[Document]:
    """An alarm if the ends of jobs are announced to NATS too late."""
    nats_links = [
        process["facts"].get(PUBLISHING) for process in processes(session) if process["alive"]
    ]
    troubles: list[str | None] = [link["trouble"] for link in nats_links if link]
    since = events.first_end_after(session, NATS_CURSOR) if troubles else None
    if since is not None and (delay := database_time(session) - since) >= MAX_PUBLISHING_DELAY:
        trouble = next(filter(None, troubles), "the log of the tracker says why")
        yield _alarm(
            "ends_not_published",
            f"the ends of jobs have not been published to NATS for {duration(delay)}: {trouble}",
            "nothing is lost, and subscribers get them as soon as it works: start NATS, or let its user publish on jobs.completed and "
            "jobs.errored; nats_url: off if there are no subscribers",
        )


def _disk_alarms(session: Session, folders: Sequence[Path]) -> Iterator[Document]:
    """Alarms of full disks. They are measured directly, since a full disk would prevent recording that in the database."""
    seen_disks = set[int]()
    url = session.connection().engine.url
    database_files = (
        [] if url.get_backend_name() != "sqlite" or not url.database else [Path(url.database)]
    )
    for folder in (*(path.absolute().parent for path in database_files), *folders):
        existing_folder = next(
            (path for path in (folder, *folder.parents) if path.exists()), folder.parent
        )
        disk = existing_folder.stat().st_dev
        free_bytes = shutil.disk_usage(existing_folder).free
        if free_bytes < MIN_FREE and disk not in seen_disks:
            yield _alarm(
                "disk_full",
                f"the control machine has {byte_size(free_bytes)} left on the disk of {existing_folder}",
                "make room there; `groupwise fleet remove` does as long as some is left. Once it is full nothing is written down, no job "
                "begins, and none can end; all continues by itself when there is room",
                folder=str(existing_folder),
                free=free_bytes,
            )
        seen_disks.add(disk)


def _machine_alarms(session: Session) -> Iterator[Document]:
    now = database_time(session)
    for vm in session.scalars(select(VM).where(VM.active).order_by(VM.vm_id)):
        vm_field = {"vm_id": vm.vm_id}
        if vm.lost_at is not None:
            names_it = (Job.resources["vm"].as_string() == vm.vm_id) & Job.status.in_(
                (JobStatus.QUEUED, JobStatus.PENDING)
            )
            if waiting := session.scalar(select(func.count()).select_from(Job).where(names_it)):
                yield _alarm(
                    "lost",
                    f"{vm.vm_id} was marked as lost, and {counted(waiting, 'job')} can run only there",
                    "they start when the machine is back, which the fleet sees by itself; if it never comes back, "
                    "`groupwise fleet stop` ends them",
                    **vm_field,
                )
            continue
        if vm.contact == Contact.UNTRUSTED:
            shown = machines.fingerprint(vm.seen_host_key)
            key = "a host key" if shown is None else f"the host key {shown}"
            problem = "which is ANOTHER than before" if vm.host_key else "which is not trusted yet"
            yield _alarm(
                "untrusted",
                f"{vm.vm_id} shows {key}, {problem}",
                f"compare it with the machine's own, then `groupwise fleet vm trust {vm.vm_id} FINGERPRINT`",
                **vm_field,
            )
        elif vm.contact == Contact.UNREACHABLE:
            silence = (
                "does not answer"
                if vm.unreachable_since is None
                else f"has not answered for {duration(now - vm.unreachable_since)}"
            )
            yield _alarm(
                "unreachable",
                f"{vm.vm_id} {silence}: {vm.problem or 'no connection'}",
                "its jobs are left as they are"
                + (f", unless its deadman ({duration(vm.deadman)}) ends them" if vm.deadman else "")
                + f"; `groupwise fleet vm mark-lost {vm.vm_id}` if it never comes back",
                **vm_field,
            )
        some_gpus_lost = vm.contact == Contact.OK and not vm.misses and vm.problem
        if vm.degraded or some_gpus_lost:
            use = "nothing new is placed on it" if vm.degraded else "only its other GPUs get jobs"
            yield _alarm(
                "degraded",
                f"{vm.vm_id}: {vm.problem or 'its GPUs cannot be read'}",
                f"run nvidia-smi there, or amd-smi; {use} until that can be read",
                **vm_field,
            )
        if vm.drain_reason is not None:
            yield _alarm(
                "draining",
                f"{vm.vm_id} takes no new jobs: {vm.drain_reason}",
                f"`groupwise fleet vm undrain {vm.vm_id}` "
                + ("gives it jobs again" if vm.draining else "once it is mended"),
                **vm_field,
            )


def _stray_alarms(session: Session) -> Iterator[Document]:
    now = database_time(session)
    for vm_id, attempt in untracked_processes.on_machines(session):
        yield _alarm(
            "attempt_untracked",
            f"{vm_id} runs {attempt['detail']}, which the database does not know, for {duration(now - attempt['since'])} or longer",
            f"nothing is done to it, and its job does not begin meanwhile: end its processes on {vm_id} if it is not wanted any more; it "
            "belongs to an earlier database, or to another fleet",
            vm_id=vm_id,
            job_id=attempt["job_id"],
            epoch=attempt["epoch"],
            since=attempt["since"],
        )


def _gpu_alarms(session: Session) -> Iterator[Document]:
    """Alarms of GPUs in quarantine, and of those that one job's log has recently called broken."""
    now = database_time(session)
    rows = session.scalars(
        select(GPU)
        .join(VM, VM.vm_id == GPU.vm_id)
        .where(VM.active, GPU.quarantine_reason.is_not(None) | GPU.fault_report.is_not(None))
        .order_by(GPU.vm_id, GPU.index)
    )
    for gpu in rows:
        name, report = f"GPU {gpu.index} of {gpu.vm_id}", gpu.fault_report or {}
        clear = f"`groupwise fleet vm clear-quarantine {gpu.vm_id} {gpu.index}`"
        facts: Document = {"vm_id": gpu.vm_id, "gpu": gpu.index}
        if gpu.quarantine_reason is not None:
            message, remedy = (
                f"{name} is in quarantine: {gpu.quarantine_reason}",
                f"{clear} once it is sound",
            )
        elif (age := now - report["at"]) < FAULT_REPORT_SECONDS:
            message = (
                f"{name} may be broken: {report['message']} (attempt {report['job_id']}.{report['epoch']}, {duration(age)} ago); "
                "jobs still get it"
            )
            remedy = f"look at it; it is put in quarantine when another job says so too. {clear} if it is sound"
            facts["job_id"] = report["job_id"]
        else:
            continue
        yield _alarm("gpu_faulty", message, remedy, **facts)


def _attempt_alarms(session: Session, actor: Actor) -> Iterator[Document]:
    now = database_time(session)
    is_open = (Attempt.state != AttemptState.ENDED) | (Attempt.cleanup != Cleanup.CLEAN)
    query = (
        select(Attempt, Member.vm_id, Member.handle, Member.log_offset, Member.state)
        .join(Member, Member.epoch == Attempt.epoch)
        .join(Job, Job.job_id == Attempt.job_id)
        .where(
            (Attempt.cleanup == Cleanup.LEAKING)
            | ((Attempt.contact == Contact.UNREACHABLE) & (Attempt.state != AttemptState.ENDED))
            | (is_open & Member.handle["stuck"].as_string().is_not(None))
            | (is_open & (Member.log_offset >= LARGE_LOG))
        )
        .order_by(Attempt.epoch)
    )
    query = find.visible(query, actor)
    for attempt, vm_id, handle, logged, state in session.execute(query):
        about = {"job_id": attempt.job_id, "epoch": attempt.epoch, "vm_id": vm_id}
        if attempt.cleanup == Cleanup.LEAKING:
            yield _alarm(
                "leaking",
                f"{attempt.job_id} has ended, but something of its attempt {attempt.epoch} still holds what it had on {vm_id}",
                f"`groupwise fleet show {attempt.job_id}` says what; end it there, the fleet looks again by itself",
                **about,
            )
        elif handle.get("stuck"):
            yield _alarm(
                "attempt_stuck",
                f"{attempt.job_id} makes no progress: {handle['stuck']}",
                "nothing is lost: fix the cause, and it continues by itself; or "
                f"`groupwise fleet stop {attempt.job_id}` ends it without what could not be fetched",
                **about,
            )
        elif handle.get("elsewhere"):
            yield _alarm(
                "attempt_elsewhere",
                f"{attempt.job_id} may be running on {vm_id}, whose row now leads to another machine, user or working folder than the one "
                "where it was begun",
                f"set the row as it was (`groupwise fleet vm set {vm_id}`); or declare {vm_id} lost once you have ended the job there",
                **about,
            )
        elif attempt.contact == Contact.UNREACHABLE and attempt.state != AttemptState.ENDED:
            wait = "it is left as it is until the machine answers"
            if {"deadman", "silent_since"} <= handle.keys() and state != ObservedState.LOST:
                rest = handle["silent_since"] + handle["deadman"] + DEADMAN_MARGIN - now
                when = f"in about {duration(rest)}" if rest > 0 else "soon"
                wait = f"if it stays silent, the job's deadman ends it there, and {when} it counts as `host_lost`, which is retried"
            yield _alarm(
                "attempt_unreachable",
                f"{attempt.job_id} may be running on {vm_id}, which does not answer",
                f"{wait}. If the machine never comes back: `groupwise fleet vm mark-lost {vm_id}`; "
                f"if its address, user or key has changed: `groupwise fleet vm set {vm_id} --host … --port …`",
                **about,
            )
        else:
            yield _alarm(
                "log_large",
                f"{attempt.job_id} has logged {byte_size(logged)}, which is kept whole, on {vm_id} and here",
                f"`groupwise fleet logs {attempt.job_id} --tail 20` shows what it writes; "
                f"`groupwise fleet stop {attempt.job_id}` before it fills the disks, `groupwise fleet remove` when it is no longer needed",
                **about,
            )


def _not_mirrored_alarms(session: Session, actor: Actor) -> Iterator[Document]:
    """Alarms of attempts whose last steps exist only on their machine: they could not resume elsewhere."""
    reason_column = Member.handle["not_mirrored"].as_string()
    query = (
        select(Attempt.job_id, Attempt.epoch, Member.vm_id, reason_column)
        .join(Member, Member.epoch == Attempt.epoch)
        .join(Job, Job.job_id == Attempt.job_id)
        .where(Attempt.state != AttemptState.ENDED, reason_column.is_not(None))
        .order_by(Attempt.epoch)
    )
    query = find.visible(query, actor)
    for job_id, epoch, vm_id, reason in session.execute(query):
        yield _alarm(
            "checkpoint_not_mirrored",
            f"{job_id}: {reason}",
            f"if {vm_id} is lost, the job resumes from an older one or starts again (`groupwise fleet show {job_id}` says which there is); "
            "this alarm goes when one has come. Let its trainer save more rarely or keep more (training kinds: `run.save_steps`, "
            f"`run.save_total_limit`), in files of at most {LARGEST_BLOB >> 30} GiB, each with its right hash",
            job_id=job_id,
            epoch=epoch,
            vm_id=vm_id,
        )


def _damaged_checkpoint_alarms(session: Session, actor: Actor) -> Iterator[Document]:
    """Alarms of recent damage: the job has continued without the checkpoint, but the same disk holds all other checkpoints."""
    now = database_time(session)
    query = (
        select(Checkpoint.job_id, Checkpoint.step, now - Checkpoint.damaged_at)
        .join(Job, Job.job_id == Checkpoint.job_id)
        .where(Checkpoint.damaged_at > now - DAMAGE_SECONDS)
        .order_by(Checkpoint.damaged_at)
    )
    query = find.visible(query, actor)
    for job_id, step, ago in session.execute(query):
        yield _alarm(
            "checkpoint_damaged",
            f"the checkpoint of step {step} of {job_id} was found damaged, or files of it gone, {duration(ago)} ago",
            f"its job was begun again from an older one (`groupwise fleet show {job_id}` says which); look at the disk of the fleet's "
            "store of files, and at who else removes things there",
            job_id=job_id,
            step=step,
        )
