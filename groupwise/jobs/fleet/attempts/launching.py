"""The launch request of an attempt: the job's spec, and the values that belong to this attempt alone.

These are its number and the previous failure, the checkpoint from which it resumes, the values of its secrets (read now from the control
machine, stored nowhere), and, in a gang, the address of rank 0. The rendezvous of a gang is named after the attempt, and its port is
derived from that name, so the members never connect to processes left over from an earlier attempt.
"""

from __future__ import annotations

from dataclasses import replace

from groupwise.core.rendezvous import rendezvous_variables
from groupwise.jobs.fleet.attempts.records import MemberRow, Snapshot
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.secrets import Secrets
from groupwise.jobs.hosts.driver import Launch, Resume, Runner
from groupwise.jobs.hosts.spec import FileEntry, Manifest, from_json


def launch_of(row: Snapshot, member: MemberRow, secrets: Secrets) -> Launch:
    """The launch request for this member's machine. Raises SecretMissing if a secret cannot be read."""
    environment = {"ATTEMPT": str(row.number), "PREVIOUS_FAILURE": row.previous_failure or ""}
    if len(row.members) > 1:
        environment |= rendezvous_variables(
            member.rank, len(row.members), row.members[0].machine.ip_address, row.key
        )
    spec, engine = from_json(row.spec), None
    if member.machine.engine is not None:
        resources = Resources.model_validate(row.resources)
        engine = member.machine.engine.engine(resources, spec.limits)
    return Launch(
        job=row.job_id,
        epoch=row.epoch,
        spec=spec,
        rank=member.rank,
        members=len(row.members),
        gpus=member.gpus,
        share_mb=member.share_mb,
        slot=member.slot if engine is None else None,
        environment=environment,
        secrets=secrets(row.secrets),
        resume=resume_of(row),
        deadman=deadman_of(member),
        engine=engine,
    )


async def with_machine_time(launch: Launch, runner: Runner) -> Launch:
    """Add the machine's present time, from which the deadman counts: a request that arrives after the timeout starts nothing."""
    if launch.deadman is None:
        return launch
    return replace(launch, clock=(await runner.status(launch.job, launch.epoch)).clock)


def deadman_of(member: MemberRow) -> float | None:
    """The deadman timeout in seconds, as recorded before the first launch request."""
    return member.handle.get("deadman")


def files_of(row: Snapshot) -> Manifest:
    """All files that a machine must have before the attempt can start there."""
    resume = resume_of(row)
    return {**from_json(row.spec).files, **(resume.manifest if resume else {})}


def resume_of(row: Snapshot) -> Resume | None:
    """The checkpoint from which the attempt resumes."""
    if row.resume_from is None:
        return None
    manifest = {path: FileEntry(*entry) for path, entry in row.resume_from["manifest"].items()}
    return Resume(manifest, row.resume_from["step"], row.resume_from["path"])
