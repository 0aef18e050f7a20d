"""Finds requirements of a job that no machine of the fleet meets: a machine's name, a label, a GPU, a model of GPU.

Such a job is accepted, since the machine may be added later, and waits silently until then; so the response has a note. The fleet is read
once for all jobs of a submission, and only if one of them has such a requirement. An index of what its machines have is built once as well:
thousands of jobs may each have other requirements, and other writers wait for the submission meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.queue.elastic import Elastic, elastic_of
from groupwise.jobs.fleet.queue.resources import Resources, fits_model
from groupwise.jobs.fleet.store.tables import GPU, VM
from groupwise.jobs.fleet.verbs.find import which_there_are
from groupwise.jobs.hosts.answers import vendor_of

MOST_COMPARED = 20
"""Maximum of different requirements in one submission for which similar names are searched, since that is slow."""

Requirements = tuple[
    str | None, tuple[tuple[str, str], ...], str | None, tuple[int | str, ...], bool
]
"""What a job requires: machine, labels, GPU model, GPUs by index or UUID, any GPU."""
_Unmet = tuple[str, str, Sequence[str], str]
"""The unmet requirement in words; a name (if any), the existing names, and the verb that adds more."""


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
                compare = len(notes) <= MOST_COMPARED  # with similar names that exist
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
