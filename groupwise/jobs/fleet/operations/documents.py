"""Turns rows into the documents that `--json` prints, that the API returns, and that tables are made of.

Columns that users know keep their names. A timestamp is ISO 8601 in UTC; seconds of the database's clock stay numbers. The request of a job
is shown unchanged: it names secrets and never holds one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store.tables import (
    GPU,
    VM,
    ApiKey,
    Attempt,
    Checkpoint,
    ControlProcess,
    Event,
    Job,
    Member,
    Project,
    Reservation,
)
from groupwise.jobs.hosts.answers import CHANGEABLE

Document = dict[str, Any]

JOB_FIELDS = tuple(
    "job_id name job_type project status priority model dataset reward_function preprocessing_pipeline hyperparams use_unsloth "
    "output_dir max_steps learning_rate batch_size num_generations retry_count generation failure_reason blocked_reasons "
    "assigned_vm gpu_index exit_code log_path submitted_by request resources spent spec_hash idempotency_key "
    "not_before waiting_since cancel_requested_at".split()
)
LISTED_FIELDS = tuple(
    "job_id name job_type project status priority model retry_count generation failure_reason blocked_reasons assigned_vm "
    "gpu_index exit_code submitted_by not_before cancel_requested_at".split()
)
"""Fields of each job in a list."""
EVENT_FIELDS = tuple("event_id at actor kind job_id epoch vm_id before after detail".split())
MACHINE_FIELDS = tuple(
    "vm_id ip_address port user ssh_key_path transport jump host_key seen_host_key workdir python labels cpu_slots projects deadman "
    "probe idle_memory_mb engine active draining drain_reason lost_at contact unreachable_since problem degraded boot_id facts "
    "launch_failures".split()
)
GPU_FIELDS = tuple(
    "index uuid model memory_mb observed detail memory_used_mb utilisation temperature quarantine_reason fault_report observed_at".split()
)
KEY_FIELDS = tuple("key_id role projects note created_at expires_at revoked_at".split())
PROJECT_FIELDS = tuple("name weight max_gpus max_waiting".split())


def iso(moment: datetime | None) -> str | None:
    """A timestamp of the database in UTC; SQLite returns timestamps without a zone, and they are UTC."""
    if moment is None:
        return None
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return aware.isoformat(timespec="seconds")


def job_summary(job: Job) -> Document:
    """The short document of a job in a list."""
    return {name: getattr(job, name) for name in LISTED_FIELDS} | _job_times(job)


def job_document(job: Job) -> Document:
    """All columns of its row except the spec, which is long and follows from the request."""
    arguments = None if job.spec is None else job.spec.get("arguments")
    return (
        {name: getattr(job, name) for name in JOB_FIELDS}
        | _job_times(job)
        | {"arguments": arguments}
    )


def _job_times(job: Job) -> Document:
    """`start_time`: None while it waits, also between two attempts."""
    waits = job.status in (JobStatus.QUEUED, JobStatus.PENDING, JobStatus.HELD)
    return {
        "created_at": iso(job.created_at),
        "start_time": None if waits else iso(job.start_time),
        "end_time": iso(job.end_time),
    }


def attempt_document(
    attempt: Attempt, members: list[Member], reservations: list[tuple[Reservation, GPU | None]]
) -> Document:
    """One attempt, with its members and the GPUs of each.

    A member that was last reported as running, and of which its machine holds nothing any more, has ended.
    """
    return {
        "epoch": attempt.epoch,
        "generation": attempt.generation,
        "number": attempt.number,
        "state": attempt.state,
        "outcome": attempt.outcome,
        "failure_class": attempt.failure_class,
        "charged": attempt.charged,
        "evidence": attempt.evidence,
        "contact": attempt.contact,
        "unreachable_since": attempt.unreachable_since,
        "cleanup": attempt.cleanup,
        "owner": attempt.owner,
        "resumed_from_step": None
        if attempt.resume_from is None
        else attempt.resume_from.get("step"),
        "created_at": attempt.created_at,
        "running_at": attempt.running_at,
        "ended_at": attempt.command_ended_at,
        "members": [
            {
                "rank": member.rank,
                "vm_id": member.vm_id,
                "state": "ended"
                if member.released and member.state in CHANGEABLE
                else member.state,
                "handle": member.handle,
                "log_offset": member.log_offset,
                "released": member.released,
                "gpus": [
                    {"index": gpu.index, "uuid": gpu.uuid, "share_mb": reservation.share_mb}
                    for reservation, gpu in reservations
                    if reservation.rank == member.rank and gpu is not None
                ],
            }
            for member in members
        ],
    }


def checkpoint_document(checkpoint: Checkpoint) -> Document:
    """A mirrored checkpoint; its files by their paths in the working folder, as sha256, mode and bytes."""
    return {
        "generation": checkpoint.generation,
        "epoch": checkpoint.epoch,
        "path": checkpoint.path,
        "step": checkpoint.step,
        "mirrored_at": checkpoint.mirrored_at,
        "damaged_at": checkpoint.damaged_at,
        "files": checkpoint.manifest,
    }


def event_document(event: Event) -> Document:
    """An event as a document."""
    return {name: getattr(event, name) for name in EVENT_FIELDS}


def machine_document(vm: VM) -> Document:
    """A machine's row as a document; its state is added by the caller, which knows the counts."""
    times = {"created_at": iso(vm.created_at), "last_polled": iso(vm.last_polled)}
    return {name: getattr(vm, name) for name in MACHINE_FIELDS} | times


def machine_state(vm: VM) -> str:
    """The most important condition of a machine, in one word."""
    if not vm.active:
        return "removed"
    if vm.lost_at is not None:
        return "lost"
    if vm.contact != "ok":
        return vm.contact
    if vm.draining or vm.drain_reason is not None:
        return "draining"
    return "degraded" if vm.degraded else "ok"


def gpu_document(gpu: GPU, open_reservations: list[Document]) -> Document:
    """A GPU as last observed, with its holders."""
    return {name: getattr(gpu, name) for name in GPU_FIELDS} | {"held_by": open_reservations}


def process_document(process: ControlProcess, now: float) -> Document:
    """A process of the control plane, and the seconds since its last heartbeat."""
    return {
        "owner": process.owner,
        "role": process.role,
        "host": process.host,
        "pid": process.pid,
        "started_at": process.started_at,
        "seen_at": process.seen_at,
        "silent_seconds": max(0.0, now - process.seen_at),
        "facts": process.facts,
    }


def project_document(project: Project) -> Document:
    """A project without its counts."""
    return {name: getattr(project, name) for name in PROJECT_FIELDS}


def key_document(key: ApiKey) -> Document:
    """A key as a document, without its secret text."""
    return {name: getattr(key, name) for name in KEY_FIELDS}
