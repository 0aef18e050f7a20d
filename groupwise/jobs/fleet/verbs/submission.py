"""Submitting: requests become jobs, all of them or none; and what would become of one, without making it.

Of several, the first that is wrong is told by its place among them, and keeps all others from being made.
Whoever submits may only do so for projects that it may see. What admission settled without being told stands in `notes`, and
what the job waits for that the fleet does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy.orm import Session

from groupwise.api.schemas.idempotency import key_problem
from groupwise.api.schemas.problems import LONGEST_MESSAGE, FieldError, Refusal
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.queue import admission
from groupwise.jobs.fleet.queue import pending_reasons as waits
from groupwise.jobs.fleet.queue.placement import Placement
from groupwise.jobs.fleet.queue.request import JobRequest
from groupwise.jobs.fleet.secrets import UNLESS_TOLD, AllowedSecrets
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
    allowed: AllowedSecrets = UNLESS_TOLD,
) -> list[Document]:
    """Make a job for each request, in one transaction. `key`: submitted again with it, they are the same jobs.

    Raises `idempotency_key_reused` where the key came with anything else before, be it with a job more or one fewer, and `invalid_request`
    where one could never run; of several, its `errors` begin with the field `jobs.N`, counted from 0. A row that somebody writes by hand
    cannot be refused: it fails, with its reason.
    """
    name = project_for(actor, project)
    if key is not None and (wrong := key_problem(key)) is not None:
        raise Refusal("invalid_request", f"The idempotency key {wrong}.")
    unsent = _unsent(session, actor, requests)
    if len(requests) == 1:
        made = [_submitted(session, actor, requests[0], name, key, allowed, unsent)]
        return _noted(session, requests, made)
    jobs = admission.submit_array(
        session,
        requests,
        actor=actor.name,
        project=name,
        idempotency_key=key,
        allowed=allowed,
    )
    accepted: list[Document] = []
    try:
        for request, job in zip(requests, jobs, strict=True):
            accepted.append(visibility.job(session, actor, _accepted(request, job, unsent)))
    except (UsageError, Refusal) as error:
        raise _of_several(error, len(accepted), len(requests)) from error
    return _noted(session, requests, accepted)


def plan(
    session: Session,
    actor: Actor,
    request: JobRequest,
    *,
    project: str | None = None,
    allowed: AllowedSecrets = UNLESS_TOLD,
) -> Document:
    """Describe the job, and where it could begin now or why it would wait; nothing is stored. Raises as `submit_all`."""
    name = project_for(actor, project)
    unsent = _unsent(session, actor, [request])
    trial = session.begin_nested()
    try:
        job = admission.submit(session, request, actor=actor.name, project=name, allowed=allowed)
        _refuse_wrong(request, job, unsent)
        found = job_document(job) | {
            "job_id": None,
            "files": sorted(request.files),
            "notes": _notes(request, job),
            **_prospects(session, job),
        }
        return visibility.job(session, actor, found)
    finally:
        trial.rollback()


def project_for(actor: Actor, project: str | None) -> str:
    """The project that is named; else the only one that the actor may see, else the default. Raises `forbidden`."""
    if project is None and actor.projects is not None and len(actor.projects) == 1:
        return next(iter(actor.projects))
    name = DEFAULT_PROJECT if project is None else project
    if not actor.may_see(name):
        theirs = ", ".join(sorted(actor.projects or ()))
        raise Refusal("forbidden", f"{actor.name} may submit for {theirs}, not for {name}.")
    return name


def _submitted(
    session: Session,
    actor: Actor,
    request: JobRequest,
    project: str,
    key: str | None,
    allowed: AllowedSecrets,
    unsent: frozenset[str],
) -> Document:
    job = admission.submit(
        session,
        request,
        actor=actor.name,
        project=project,
        idempotency_key=key,
        allowed=allowed,
    )
    return visibility.job(session, actor, _accepted(request, job, unsent))


def _unsent(session: Session, actor: Actor, requests: Iterable[JobRequest]) -> frozenset[str]:
    """Blobs that these name and no project of the actor has; asked before the jobs are made, as a job gives its project its files."""
    named = {sha256 for request in requests for sha256, _, _ in request.files.values()}
    return rights.lacking(session, actor.projects, named)


def _accepted(request: JobRequest, job: Job, unsent: frozenset[str]) -> Document:
    _refuse_wrong(request, job, unsent)
    return job_document(job) | {"notes": _notes(request, job)}


def _noted(
    session: Session, requests: Sequence[JobRequest], accepted: list[Document]
) -> list[Document]:
    """That they wait for a machine that the fleet does not have is told to whoever has mistyped it; that nobody runs them, to whoever has
    mistyped the fleet, or forgotten to begin it."""
    waits = schedulability.nowhere(session, [request.resources for request in requests])
    for each, notes in zip(accepted, waits, strict=True):
        each["notes"].extend(notes)
    if "dispatcher" in status.missing_roles(session):
        for each in accepted:
            each["notes"].append(status.NO_DISPATCHER)
    return accepted


def _of_several(error: UsageError | Refusal, place: int, number: int) -> Refusal:
    """Name the job that was refused, unless the key was reused, which concerns all of them."""
    code = error.code if isinstance(error, Refusal) else "invalid_request"
    if isinstance(error, Refusal) and code == "idempotency_key_reused":
        return error
    told = FieldError(field=f"jobs.{place}", message=error.message[:LONGEST_MESSAGE])
    return Refusal(code, f"job {place + 1} of {number}: {error.message}", errors=[told])


def _refuse_wrong(request: JobRequest, job: Job, unsent: frozenset[str]) -> None:
    """A request that admission found wrong, or that names what only others have sent, is told at once; nothing is kept of it."""
    if job.status == JobStatus.FAILED and job.generation == 0 and job.start_time is None:
        raise Refusal("invalid_request", job.failure_reason)
    for path, (sha256, _, _) in request.files.items() if unsent else ():
        if sha256 in unsent:
            raise Refusal(
                "invalid_request",
                f"file {path!r}: nobody has sent {sha256} for a project of yours. Send it first: by `upload` of our client, or PUT /blobs.",
            )


def _notes(request: JobRequest, job: Job) -> list[str]:
    """Notes on values that admission chose because the request gave none."""
    asked, settled = request.resources, job.resources
    if asked.gpus is not None or asked.settled(0) == asked.settled(1) or settled is None:
        return []
    if settled.get("gpus"):
        return ["--gpus was not given: the job gets 1 GPU"]
    return ["--gpus was not given: the job gets no GPU, as the fleet has none"]


def _prospects(session: Session, job: Job) -> Document:
    if job.admitted_at is None:
        return {"where": [], "waits": waits.explain(session, job)}
    found = waits.outlook(session, job)
    if not isinstance(found, Placement):
        return {"where": [], "waits": waits.explain(session, job)}
    where = [
        seat.vm_id + (f" GPU {','.join(str(gpu.index) for gpu in seat.gpus)}" if seat.gpus else "")
        for seat in found.seats
    ]
    return {"where": where, "waits": []}
