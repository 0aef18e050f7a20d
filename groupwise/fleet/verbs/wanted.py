"""What a job wants of machines and no machine of the fleet is or has: a name, a label, a model of GPU.

Such a job is accepted, since the machine may be added tomorrow, and waits until then without a word; so whoever submits is told at once.
The fleet is read once for all jobs of a submission, and only if one of them wants such a thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.fleet.queue.resources import Resources
from groupwise.fleet.store.tables import GPU, VM
from groupwise.fleet.verbs.find import which_there_are

MOST_COMPARED = 20
"""Wishes of one submission for which names that are near are looked up: that takes a moment for each."""

Wish = tuple[str | None, tuple[tuple[str, str], ...], str | None, tuple[int | str, ...]]
"""Machine, labels, model of GPU, GPUs by name."""
_Wrong = tuple[str, str, Sequence[str], str]
"""What is wrong; and a name (if any), those that there are, and the verb that makes more."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """One of the fleet, as far as it can be named or described."""

    labels: Mapping[str, str]
    gpus: Sequence[tuple[int, str, str]]
    """Index, UUID, model."""


def nowhere(session: Session, jobs: Sequence[Resources]) -> list[list[str]]:
    """For each of the jobs what of it is not to be had in the fleet as it is."""
    wishes = [_wish(resources) for resources in jobs]
    told: dict[Wish, list[str]] = {_NONE: []}
    if any(wish != _NONE for wish in wishes):
        fleet = _fleet(session)
        for wish in wishes:
            if wish not in told:
                told[wish] = _missing(fleet, wish, compare=len(told) <= MOST_COMPARED)
    return [told[wish] for wish in wishes]


_NONE: Wish = (None, (), None, ())


def _wish(resources: Resources) -> Wish:
    labels = tuple(sorted(resources.labels.items()))
    return resources.vm, labels, resources.gpu_model, resources.named


def _fleet(session: Session) -> dict[str, _Machine]:
    gpus: dict[str, list[tuple[int, str, str]]] = {}
    columns = (GPU.vm_id, GPU.index, GPU.uuid, GPU.model)
    for vm_id, index, uuid, model in session.execute(select(*columns).order_by(*columns[:2])):
        gpus.setdefault(vm_id, []).append((index, uuid, model or ""))
    machines = session.execute(select(VM.vm_id, VM.labels).where(VM.active).order_by(VM.vm_id))
    return {
        vm_id: _Machine({k: str(v) for k, v in (labels or {}).items()}, gpus.get(vm_id, ()))
        for vm_id, labels in machines
    }


def _missing(fleet: Mapping[str, _Machine], wish: Wish, *, compare: bool) -> list[str]:
    return [
        f"{wrong}, so the job waits until that changes{there}"
        for wrong, name, names, otherwise in _wrong(fleet, wish)
        for there in (f"; {which_there_are(name, names, otherwise)}" if compare and name else "",)
    ]


def _wrong(fleet: Mapping[str, _Machine], wish: Wish) -> Iterator[_Wrong]:
    vm, labels, model, named = wish
    if vm is not None and vm not in fleet:
        which = f" (GPU {', '.join(map(str, named))} of it is asked for)" if named else ""
        yield f"no machine is called {vm!r}{which}", vm, [*fleet], "vm add"
        return
    machines = [*fleet.values()] if vm is None else [fleet[vm]]
    whose = "no machine has" if vm is None else f"machine {vm} does not have"
    yield from _wrong_labels(machines, labels, whose)
    models = sorted({seen for each in machines for _, _, seen in each.gpus if seen})
    if model is not None and all(model.casefold() not in seen.casefold() for seen in models):
        of = "" if vm is None else f" of machine {vm}"
        yield f"no GPU{of} that was seen is a {model}", model, models, "vm add"
    there = {name for each in machines for index, uuid, _ in each.gpus for name in (index, uuid)}
    for name in named:
        if name not in there:
            yield f"{whose} a GPU {name} that was seen", "", (), ""


def _wrong_labels(
    machines: Sequence[_Machine], labels: Sequence[tuple[str, str]], whose: str
) -> Iterator[_Wrong]:
    if any(set(labels) <= set(each.labels.items()) for each in machines):
        return
    there = sorted({f"{name}={value}" for each in machines for name, value in each.labels.items()})
    asked = [f"{name}={value}" for name, value in labels]
    lacking = [word for word in asked if word not in there]
    for word in lacking:
        yield f"{whose} the label {word}", word, there, "vm set"
    if asked and not lacking:
        yield f"{whose} {' and '.join(asked)} together", "", (), ""
