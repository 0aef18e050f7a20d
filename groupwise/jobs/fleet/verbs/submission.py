"""Submits jobs: requests become jobs, all of them or none; or plans one, without making it.

If one of several requests is wrong, the refusal names its position, and no job is made. An actor submits only for projects that it may see.
`notes` list the values that admission chose, and the job's requirements that the fleet does not meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy.orm import Session

from groupwise.api.schemas.idempotency import key_problem
from groupwise.api.schemas.problems import FieldError, Refusal
from groupwise.core.errors import UsageError
from groupwise.core.settings.field_errors import LONGEST_MESSAGE
from groupwise.jobs.fleet.queue import admission
from groupwise.jobs.fleet.queue import pending_reasons as waits
from groupwise.jobs.fleet.queue.placement import Placement
from groupwise.jobs.fleet.queue.request import COMMAND, JobRequest
from groupwise.jobs.fleet.secrets import DEFAULT_SECRETS, AllowedSecrets
from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.fleet.store.tables import Job
from groupwise.jobs.fleet.verbs import schedulability, status, visibility
from groupwise.jobs.fleet.verbs.actor import Actor
from groupwise.jobs.fleet.verbs.documents import Document, job_document

DEFAULT_PROJECT = "default"


def submit_all(
    session: Session,
    actor: Actor,
    requests: Sequence[JobRequest],
    *,
    project: str | None = None,
    key: str | None = None,
    allowed: AllowedSecrets = DEFAULT_SECRETS,
) -> list[Document]:
    """Make a job for each request, in one transaction. `key`: submitting again with the same key returns the same jobs.

    Raises `idempotency_key_reused` if the key came with a different submission before, even with one job more or less, and
    `invalid_request` if a job could never run; of several, its `errors` start with the field `jobs.N`, counted from 0. (A row that is
    written by hand cannot be refused: it fails, with its reason.)
    """
    name = project_for(actor, project)
    if any(request.resources.oversubscribe for request in requests):
        actor.require_operator_to_oversubscribe()
    if key is not None and (problem := key_problem(key)) is not None:
        raise Refusal("invalid_request", f"The idempotency key {problem}.")
    unsent = _missing_blobs(session, actor, requests)
    common_arguments: dict[str, Any] = {"actor": actor.name, "project": name, "allowed": allowed}
    if len(requests) == 1:
        jobs = [admission.submit(session, requests[0], idempotency_key=key, **common_arguments)]
    else:
        jobs = admission.submit_array(session, requests, idempotency_key=key, **common_arguments)
    accepted: list[Document] = []
    try:
        for request, job in zip(requests, jobs, strict=True):
            _refuse_invalid(request, job, unsent)
            document = job_document(job) | {"notes": _submission_notes(request, job)}
            accepted.append(visibility.job(session, actor, document))
    except (UsageError, Refusal) as error:
        code = error.code if isinstance(error, Refusal) else "invalid_request"
        if len(requests) == 1 or code == "idempotency_key_reused":  # concerns all of them
            raise
        index = len(accepted)
        problem = FieldError(field=f"jobs.{index}", message=error.message[:LONGEST_MESSAGE])
        message = f"job {index + 1} of {len(requests)}: {error.message}"
        raise Refusal(code, message, errors=[problem]) from error
    # Requirements that no machine meets may be mistyped, and the operator may have forgotten to start a dispatcher.
    unmet = schedulability.unmet_requirements(session, [request.resources for request in requests])
    idle = "dispatcher" in status.missing_roles(session)
    for accepted_job, notes in zip(accepted, unmet, strict=True):
        accepted_job["notes"] += [*notes, *([status.NO_DISPATCHER] if idle else [])]
    return accepted


def plan(
    session: Session,
    actor: Actor,
    request: JobRequest,
    *,
    project: str | None = None,
    allowed: AllowedSecrets = DEFAULT_SECRETS,
) -> Document:
    """Describe the job, and where it could start now or why it would wait; nothing is stored. Raises like `submit_all`."""
    name = project_for(actor, project)
    unsent = _missing_blobs(session, actor, [request])
    trial = session.begin_nested()
    try:
        job = admission.submit(session, request, actor=actor.name, project=name, allowed=allowed)
        _refuse_invalid(request, job, unsent)
        document = job_document(job) | {
            "job_id": None,
            "files": sorted(request.files),
            "notes": _submission_notes(request, job),
            **_placement_outlook(session, job),
        }
        return visibility.job(session, actor, document)
    finally:
        trial.rollback()


def project_for(actor: Actor, project: str | None) -> str:
    """The given project, else the only one that the actor may see, else the default. Raises `forbidden`."""
    if project is None and actor.projects is not None and len(actor.projects) == 1:
        return next(iter(actor.projects))
    name = DEFAULT_PROJECT if project is None else project
    if not actor.may_see(name):
        theirs = ", ".join(sorted(actor.projects or ()))
        raise Refusal("forbidden", f"{actor.name} may submit for {theirs}, not for {name}.")
    return name


def _missing_blobs(
    session: Session, actor: Actor, requests: Iterable[JobRequest]
) -> frozenset[str]:
    """Blobs that the requests name and no project of the actor has. Read before the jobs are made, since a job gives its project rights."""
    hashes = {sha256 for request in requests for sha256, _, _ in request.files.values()}
    return rights.lacking(session, actor.projects, hashes)


def _refuse_invalid(request: JobRequest, job: Job, unsent: frozenset[str]) -> None:
    """Refuse a request that admission rejected, or that names files which only other projects have sent."""
    if job.status == JobStatus.FAILED and job.generation == 0 and job.start_time is None:
        raise Refusal("invalid_request", job.failure_reason)
    for path, (sha256, _, _) in request.files.items() if unsent else ():
        if sha256 in unsent:
            raise Refusal(
                "invalid_request",
                f"file {path!r}: {sha256} was not sent for a project of yours. Send it first: by `upload` of our client, or PUT /blobs.",
            )


def _submission_notes(request: JobRequest, job: Job) -> list[str]:
    """Notes on values that admission chose because the request gave none."""
    requested, settled = request.resources, job.resources
    if (
        requested.gpus is not None
        or requested.settled(0) == requested.settled(1)
        or settled is None
    ):
        return []
    if settled.get("gpus"):
        return ["--gpus was not given: the job gets 1 GPU; --gpus 0 runs it without one"]
    if job.job_type == COMMAND:
        return ["--gpus was not given: the job gets no GPU; --gpus 1 asks for one"]
    return ["--gpus was not given: the job gets no GPU, as no machine that it may run on has one"]


def _placement_outlook(session: Session, job: Job) -> Document:
    """The places where the job could start now, or the reasons why it would wait."""
    placement = None if job.admitted_at is None else waits.outlook(session, job)
    if not isinstance(placement, Placement):
        return {"where": [], "waits": waits.explain(session, job)}
    seats = [
        seat.vm_id + (f" GPU {','.join(str(gpu.index) for gpu in seat.gpus)}" if seat.gpus else "")
        for seat in placement.seats
    ]
    return {"where": seats, "waits": []}
