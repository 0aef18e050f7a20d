"""What a machine is told when an attempt begins there: the job's spec, with what only this attempt has.

That is its number and why the one before failed, the checkpoint that it goes on from, the values of its secrets (read now, from where the
references point on the control machine; kept nowhere), and, in a gang, who leads and how the others find it. The meeting point of a gang is
named after the attempt and its port follows from that, so that what is left of an earlier attempt is never met.
"""

from __future__ import annotations

from dataclasses import replace

from groupwise.core.rendezvous import meeting_of
from groupwise.jobs.fleet.attempts.records import MemberRow, Snapshot
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.secrets import Secrets
from groupwise.jobs.hosts.driver import Engine, Launch, Resume, Runner
from groupwise.jobs.hosts.spec import FileEntry, Manifest, from_json


def launch_of(row: Snapshot, member: MemberRow, secrets: Secrets) -> Launch:
    """What the machine of this member is told. SecretMissing where a secret cannot be read."""
    return Launch(
        job=row.job_id,
        epoch=row.epoch,
        spec=from_json(row.spec),
        rank=member.rank,
        members=len(row.members),
        gpus=member.gpus,
        share_mb=member.share_mb,
        slot=member.slot if member.machine.engine is None else None,
        environment=_environment(row, member),
        secrets=secrets(row.secrets),
        resume=resume_of(row),
        deadman=deadman_of(member),
        engine=_engine_of(row, member),
    )


def _engine_of(row: Snapshot, member: MemberRow) -> Engine | None:
    """What is to begin it, with what that is asked for. The place that it has in the fleet's tables is none of the machine's."""
    if member.machine.engine is None:
        return None
    wanted = Resources.model_validate(row.resources)
    return member.machine.engine.engine(wanted, from_json(row.spec).limits)


async def timed(launch: Launch, runner: Runner) -> Launch:
    """With the clock of its machine, from which its deadman counts: where it arrives later than that, nothing begins there any more."""
    if launch.deadman is None:
        return launch
    return replace(launch, clock=(await runner.status(launch.job, launch.epoch)).clock)


def deadman_of(member: MemberRow) -> float | None:
    """The one that was on record before its machine was told anything."""
    return member.handle.get("deadman")


def files_of(row: Snapshot) -> Manifest:
    """Everything whose content a machine must have before it can begin."""
    resume = resume_of(row)
    return {**from_json(row.spec).files, **(resume.manifest if resume else {})}


def _environment(row: Snapshot, member: MemberRow) -> dict[str, str]:
    found = {"ATTEMPT": str(row.number), "PREVIOUS_FAILURE": row.previous_failure or ""}
    if len(row.members) > 1:
        found |= meeting_of(
            member.rank, len(row.members), row.members[0].machine.ip_address, row.key
        )
    return found


def resume_of(row: Snapshot) -> Resume | None:
    """The checkpoint that it goes on from."""
    if row.resume_from is None:
        return None
    manifest = {path: FileEntry(*entry) for path, entry in row.resume_from["manifest"].items()}
    return Resume(manifest, row.resume_from["step"], row.resume_from["path"])
