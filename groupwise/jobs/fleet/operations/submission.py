"""Submits jobs: requests become jobs, all of them or none; or plans one, without making it.

If one of several requests is wrong, the refusal names its position, and no job is made. An actor submits only for projects that it may see.
`notes` list the values that admission chose, and the job's requirements that the fleet does not meet:
a machine's name, a label, a GPU, a model of GPU. Such a job is accepted, since the machine may be added later, and waits silently until
then. The fleet is read once for all jobs of a submission, and only if one of them has such a requirement. An index of what its machines
have is built once as well: thousands of jobs may each have other requirements, and other writers wait for the submission meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupwise.api.schemas.idempotency import key_problem
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.core.settings.field_errors import LONGEST_MESSAGE
from groupwise.jobs.fleet.operations import status, visibility
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import Document, job_document
from groupwise.jobs.fleet.operations.find import which_there_are
from groupwise.jobs.fleet.queue import admission
from groupwise.jobs.fleet.queue import pending_reasons as waits
from groupwise.jobs.fleet.queue.elastic import Elastic, elastic_of
from groupwise.jobs.fleet.queue.placement import Placement
from groupwise.jobs.fleet.queue.request import COMMAND, JobRequest
from groupwise.jobs.fleet.queue.resources import Resources, fits_model
from groupwise.jobs.fleet.secrets import DEFAULT_SECRETS, AllowedSecrets
from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store import rights
from groupwise.jobs.fleet.store.tables import GPU, VM, Job
from groupwise.jobs.hosts.answers import vendor_of

DEFAULT_PROJECT = "default"
MAX_COMPARED = 20
"""Maximum of different requirements in one submission for which similar names are searched, since that is slow."""

Requirements = tuple[
    str | None, tuple[tuple[str, str], ...], str | None, tuple[int | str, ...], bool
]
"""What a job requires: machine, labels, GPU model, GPUs by index or UUID, any GPU."""
_Unmet = tuple[str, str, Sequence[str], str]
"""The unmet requirement in words; a name (if any), the existing names, and the command that adds more."""


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
    made: list[Job] = []
    try:
        for request, job in zip(requests, jobs, strict=True):
            _refuse_invalid(request, job, unsent)
            made.append(job)
            accepted.append(visibility.job(session, actor, job_document(job) | {"notes": []}))
    except (UsageError, Refusal) as error:
        code = error.code if isinstance(error, Refusal) else "invalid_request"
        if len(requests) == 1 or code == "idempotency_key_reused":  # concerns all of them
            raise
        index = len(accepted)
        problem, place = error.message[:LONGEST_MESSAGE], f"jobs.{index}"
        message = f"job {index + 1} of {len(requests)}: {error.message}"
        raise Refusal(code, message, field=place, problem=problem) from error
    # Requirements that no machine meets may be mistyped, and the operator may have forgotten to start a dispatcher.
    unmet = unmet_requirements(session, [request.resources for request in requests])
    chosen = _notes_on_gpus(session, requests, made)
    idle = "dispatcher" in status.missing_roles(session)
    for accepted_job, notes, more in zip(accepted, chosen, unmet, strict=True):
        accepted_job["notes"] += [*notes, *more, *([status.NO_DISPATCHER] if idle else [])]
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
        placement = None if job.admitted_at is None else waits.outlook(session, job)
        can_start = isinstance(placement, Placement)
        document = job_document(job) | {
            "job_id": None,
            "files": sorted(request.files),
            "notes": _notes_on_gpus(session, [request], [job])[0],
            "where": [
                seat.vm_id
                + (f" GPU {','.join(str(g.index) for g in seat.gpus)}" if seat.gpus else "")
                for seat in (placement.seats if can_start else ())
            ],
            "waits": [] if can_start else waits.explain(session, job),
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


def _notes_on_gpus(
    session: Session, requests: Sequence[JobRequest], jobs: Sequence[Job]
) -> list[list[str]]:
    """For each job whose request does not give a number of GPUs: what admission chose, and what the machines have."""
    chosen = [
        request.resources.gpus is None
        and request.resources.settled(0) != request.resources.settled(1)
        and job.resources is not None
        for request, job in zip(requests, jobs, strict=True)
    ]
    gpus = _gpus_of_fleet(session) if any(chosen) else ""
    return [
        [note] if is_chosen and (note := _note_on_gpus(job, gpus)) else []
        for job, is_chosen in zip(jobs, chosen, strict=True)
    ]


def _note_on_gpus(job: Job, gpus: str) -> str:
    if (job.resources or {}).get("gpus"):
        return "--gpus was not given, so the job gets 1 GPU; --gpus 0 runs it without one"
    if job.job_type != COMMAND:
        if not gpus:
            return "the fleet has no GPU, so the job runs without one; --gpus 1 waits for one"
        return (
            f"no machine that the job may run on has a GPU (the fleet has {gpus}, on other machines), so it runs without one; --gpus 1 "
            "waits for a GPU"
        )
    if not gpus:
        return ""
    return f"--gpus was not given, so the job gets no GPU; the machines have {gpus}: --gpus 1 asks for one"


def _gpus_of_fleet(session: Session) -> str:
    """The GPUs of all machines, such as `8 × NVIDIA H100 80GB HBM3`; empty: there are none."""
    by_model = (
        select(GPU.model, func.count())
        .join(VM, VM.vm_id == GPU.vm_id)
        .where(VM.active)
        .group_by(GPU.model)
        .order_by(GPU.model)
    )
    found = [f"{count} × {model or 'GPU'}" for model, count in session.execute(by_model)]
    engines = session.execute(select(VM.vm_id, VM.engine).where(VM.active, VM.engine.is_not(None)))
    found += [
        f"up to {engine.body.gpus} for each job on {vm_id}"
        for vm_id, document in engines
        if (engine := elastic_of(document)) and engine.body.gpus
    ]
    return ", ".join(found)


@dataclass(frozen=True, slots=True)
class _Machine:
    """A machine of the fleet: its properties that a job can require."""

    labels: Mapping[str, str]
    gpus: Sequence[tuple[int, str, str, int | None]]
    """Index, UUID, model, memory in MB."""
    engine: Elastic | None = None
    """An engine, which has its own GPUs."""

    @property
    def models(self) -> Iterator[tuple[str, int | None]]:
        """Model and memory of all GPUs that it has or that its engine gives to jobs."""
        yield from (gpu[2:] for gpu in self.gpus if gpu[2])
        if self.engine is not None and self.engine.body.gpu_model is not None:
            yield self.engine.body.gpu_model, self.engine.body.gpu_memory_mb


class _Existing:
    """Index of the properties of some machines, for frequent look-ups."""

    def __init__(self, machines: Sequence[_Machine]) -> None:
        self.machines_by_label: dict[tuple[str, str], set[int]] = {}
        """Machines with each label, counted from 0."""
        for number, machine in enumerate(machines):
            for label in machine.labels.items():
                self.machines_by_label.setdefault(label, set()).add(number)
        self.labels = sorted(f"{name}={value}" for name, value in self.machines_by_label)
        self.models = {model for machine in machines for model in machine.models}
        self.gpus = {name for machine in machines for gpu in machine.gpus for name in gpu[:2]}
        self.has_gpus = bool(self.gpus) or any(
            machine.engine and machine.engine.body.gpus for machine in machines
        )


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The machines of a fleet by name, and an index of their properties."""

    machines: Mapping[str, _Machine]
    existing: _Existing
    names: Sequence[str]


def unmet_requirements(session: Session, jobs: Sequence[Resources]) -> list[list[str]]:
    """Notes on the requirements of each job that the fleet cannot meet at present."""
    requirements: list[Requirements] = [
        (
            resources.vm,
            tuple(sorted(resources.labels.items())),
            resources.gpu_model,
            resources.named,
            bool(resources.gpus),
        )
        for resources in jobs
    ]
    notes: dict[Requirements, list[str]] = {_NONE: []}
    if any(required != _NONE for required in requirements):
        machines = _machines_by_name(session)
        fleet = _Fleet(machines, _Existing([*machines.values()]), [*machines])
        for required in requirements:
            if required not in notes:
                compare = len(notes) <= MAX_COMPARED  # with similar names that exist
                notes[required] = []
                for problem, name, names, otherwise in _unmet_requirements(fleet, required):
                    similar = compare and name
                    suggestion = f"; {which_there_are(name, names, otherwise)}" if similar else ""
                    notes[required].append(
                        f"{problem}, so the job waits until that changes{suggestion}"
                    )
    return [notes[required] for required in requirements]


_NONE: Requirements = (None, (), None, (), False)


def _machines_by_name(session: Session) -> dict[str, _Machine]:
    gpus: dict[str, list[tuple[int, str, str, int | None]]] = {}
    of_gpus = (GPU.vm_id, GPU.index, GPU.uuid, GPU.model, GPU.memory_mb)
    rows = session.execute(select(*of_gpus).order_by(*of_gpus[:2]))
    for vm_id, index, uuid, model, memory_mb in rows:
        gpus.setdefault(vm_id, []).append((index, uuid, model or "", memory_mb))
    columns = (VM.vm_id, VM.labels, VM.engine)
    machines = session.execute(select(*columns).where(VM.active).order_by(VM.vm_id))
    return {
        vm_id: _Machine(
            {k: str(v) for k, v in (labels or {}).items()}, gpus.get(vm_id, ()), elastic_of(engine)
        )
        for vm_id, labels, engine in machines
    }


def _unmet_requirements(fleet: _Fleet, required: Requirements) -> Iterator[_Unmet]:
    vm, labels, model, named_gpus, wants_gpus = required
    if vm is not None and vm not in fleet.machines:
        gpu_note = (
            f" (the job asks for its GPU {', '.join(map(str, named_gpus))})" if named_gpus else ""
        )
        yield f"no machine is called {vm!r}{gpu_note}", vm, fleet.names, "vm add"
        return
    existing = fleet.existing if vm is None else _Existing([fleet.machines[vm]])
    subject = "no machine has" if vm is None else f"machine {vm} does not have"
    missing_labels = [label for label in labels if label not in existing.machines_by_label]
    for name, value in missing_labels:
        label_text = f"{name}={value}"
        yield f"{subject} the label {label_text}", label_text, existing.labels, "vm set"
    machine_sets = [
        existing.machines_by_label[label] for label in labels if label in existing.machines_by_label
    ]
    if machine_sets and not missing_labels and not set[int].intersection(*machine_sets):
        label_texts = " and ".join(f"{name}={value}" for name, value in labels)
        yield f"{subject} {label_texts} together", "", (), ""
    owner = "the fleet" if vm is None else f"machine {vm}"
    if model is not None and not any(fits_model(model, *seen) for seen in existing.models):
        names = sorted({name for name, _ in existing.models})
        yield f"{owner} has no GPU {model}", model, names, "vm add"
    elif wants_gpus and not existing.has_gpus:
        yield f"{owner} has no GPU", "", (), ""
    for name in named_gpus:
        if name not in existing.gpus:
            yield f"{subject} a GPU {name} that was seen", "", (), ""
    if vm is not None:
        _refuse_ambiguous_index(vm, fleet.machines[vm], named_gpus)


def _refuse_ambiguous_index(vm: str, machine: _Machine, named: Sequence[int | str]) -> None:
    """Raise `invalid_request` for an index that a GPU of NVIDIA and one of AMD have: the tools of both vendors count from 0."""
    for name in named:
        cards = [(uuid, model) for index, uuid, model, _ in machine.gpus if index == name]
        if len({vendor_of(uuid) for uuid, _ in cards}) > 1:
            choices = ", ".join(f"--gpus {vm}:{uuid} ({model})" for uuid, model in cards)
            raise Refusal(
                "invalid_request",
                f"machine {vm} has a GPU {name} of NVIDIA and one of AMD; name the one that you mean: {choices}.",
            )
