"""The fleet as a whole: what somebody should look at, and all machines with their GPUs, as they are reserved and as they were seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.errors import RunNotFoundError
from groupwise.fleet.states import Observed
from groupwise.web.fleet.watched import Document, FleetLike, WatchedFleet
from groupwise.web.pages import Do, Page, Visit, done, shown
from groupwise.wire.keys import Role

LIVE = "/live?fleet"


@dataclass(frozen=True, slots=True)
class Action:
    """What can be done with a job or a machine."""

    word: str
    """Of its button."""
    verb: Callable[[FleetLike, str], Document]
    statuses: tuple[str, ...] = ()
    """In which it is offered; none: in each."""


ACTIONS: Mapping[str, Action] = {
    "drain": Action("place nothing new there", lambda fleet, vm: fleet.drain(vm)),
    "undrain": Action("place work there again", lambda fleet, vm: fleet.undrain(vm)),
}


def of(visit: Visit) -> WatchedFleet:
    """The fleet of this dashboard. Raises RunNotFoundError where there is none."""
    if visit.place.fleet is None:
        raise RunNotFoundError(
            "This dashboard shows no fleet. Whoever runs it may begin it with --fleet FOLDER, or --fleet with the address of an API."
        )
    return visit.place.fleet


def fleet(visit: Visit) -> Page:
    """The first page of a fleet."""
    found = of(visit)
    machines = [described(each) for each in found.machines()]
    data: dict[str, Any] = {"status": found.status(), "machines": machines, "jobs": found.newest()}
    return Page("fleet.html", data, live=LIVE)


def machine(visit: Visit) -> Page:
    """One machine."""
    document = of(visit).ask(lambda fleet: fleet.machine(visit.named("machine")))
    jobs = of(visit).ask(lambda fleet: fleet.jobs(vm=visit.named("machine"), limit=20))
    data = {"machine": described(document), "jobs": jobs, "actions": words_of(ACTIONS)}
    return Page("machine.html", data, live=LIVE)


def changes(kind: str, actions: Mapping[str, Action]) -> Do:
    """What a form does with one of the fleet's things, which the address names as `kind`: one of these actions."""

    def change(visit: Visit, form: Mapping[str, str]) -> str:
        name, action = visit.named(kind), form.get("action", "")
        if action not in actions:
            raise RunNotFoundError(
                f"{action[:40]!r} is nothing that can be done with a {kind} here. There are: {', '.join(actions)}."
            )
        of(visit).change(visit.visitor.caller.id, lambda fleet: actions[action].verb(fleet, name))
        return visit.request.url.path

    return change


def words_of(actions: Mapping[str, Action], status: str | None = None) -> dict[str, str]:
    """The buttons that are offered for what has this status."""
    return {
        name: action.word
        for name, action in actions.items()
        if not action.statuses or status in action.statuses
    }


def described(machine: Document) -> Document:
    """A machine with, for each GPU, the word for what matters most of it."""
    gpus = [{**gpu, "shown": _of_gpu(gpu)} for gpu in machine.get("gpus", [])]
    return {**machine, "gpus": gpus}


def _of_gpu(gpu: Document) -> str:
    """held, free, quarantined, or what was seen of it that nobody here has asked for."""
    if gpu["quarantined"]:
        return "quarantined"
    if gpu["held_by"]:
        return "held"
    return "free" if gpu["observed"] == Observed.OK else gpu["observed"].replace("_", " ")


ROUTES = (
    shown("/fleet", fleet),
    shown("/fleet/machines/{machine}", machine),
    done("/fleet/machines/{machine}", changes("machine", ACTIONS), Role.ADMIN),
)
