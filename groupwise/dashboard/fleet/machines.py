"""The fleet as a whole: problems that need attention, and all machines with their GPUs, both reserved and observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupwise.api.schemas.keys import Role
from groupwise.core.errors import RunNotFoundError
from groupwise.dashboard.pages import HandleForm, Page, Visit, form_route, page_route
from groupwise.dashboard.sources.fleet import Document, WatchedFleet
from groupwise.jobs.fleet.states import JobStatus, Observed

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient

LIVE = "/live?fleet"


@dataclass(frozen=True, slots=True)
class Action:
    """An action on a job or a machine."""

    label: str
    """Label of the button."""
    perform: Callable[[FleetClient, str, Mapping[str, str]], Document]
    """Performs the action on the named job or machine, with the fields of the form."""
    statuses: tuple[str, ...]
    """Statuses in which the action is offered."""


TAKING, DRAINING = "taking work", "draining"
ACTIONS: Mapping[str, Action] = {
    "drain": Action("start no new jobs there", lambda fleet, vm, _: fleet.drain(vm), (TAKING,)),
    "undrain": Action("let jobs start there again", lambda fleet, vm, _: fleet.undrain(vm), (DRAINING,)),
}  # fmt: skip
"""Actions on a machine."""
NOT_RUNNING = tuple(status.value for status in JobStatus if status != JobStatus.RUNNING)
MAX_RUNNING, MAX_OTHERS = 50, 20
"""Most jobs of a machine that its page shows: running ones, and others."""


def fleet_of(visit: Visit) -> WatchedFleet:
    """The fleet of this dashboard. Raises RunNotFoundError if there is none."""
    if visit.context.fleet is None:
        raise RunNotFoundError(
            "This dashboard shows no fleet. Its operator may start it with --fleet FOLDER, or --fleet with the address of an API."
        )
    return visit.context.fleet


def fleet(visit: Visit) -> Page:
    """The first page of a fleet."""
    watched = fleet_of(visit)
    machines = [describe_machine(machine) for machine in watched.machines()]
    data: dict[str, Any] = {
        "status": watched.status(),
        "machines": machines,
        "slots": sum(len(machine["slots_held"]) + machine["slots_free"] for machine in machines),
        "slots_free": sum(
            machine["slots_free"] for machine in machines if machine["state"] == "ok"
        ),
        "jobs": watched.newest(),
    }
    return Page("fleet.html", data, live=LIVE)


def machine(visit: Visit) -> Page:
    """One machine."""
    name = visit.path_part("machine")
    document = fleet_of(visit).ask(lambda fleet: fleet.machine(name))
    running = fleet_of(visit).ask(
        lambda fleet: fleet.jobs(vm=name, status=[JobStatus.RUNNING.value], limit=MAX_RUNNING)
    )
    other_jobs = fleet_of(visit).ask(
        lambda fleet: fleet.jobs(vm=name, status=list(NOT_RUNNING), limit=MAX_OTHERS)
    )
    data = {
        "machine": describe_machine(document),
        "running": running,
        "others": other_jobs,
        "actions": offered_buttons(
            ACTIONS, DRAINING if document["state"] == "draining" else TAKING
        ),
    }
    return Page("machine.html", data, live=LIVE)


def action_handler(kind: str, actions: Mapping[str, Action]) -> HandleForm:
    """The handler for forms with these actions on a job or machine, whose name is the address's part `kind`."""

    def change(visit: Visit, form: Mapping[str, str]) -> str:
        name, action = visit.path_part(kind), form.get("action", "")
        if action not in actions:
            raise RunNotFoundError(
                f"{action[:40]!r} is nothing that can be done with a {kind} here. There are: {', '.join(actions)}."
            )
        fleet_of(visit).change(
            visit.visitor.caller.key_id, lambda fleet: actions[action].perform(fleet, name, form)
        )
        return visit.request.url.path

    return change


def offered_buttons(actions: Mapping[str, Action], status: str) -> dict[str, str]:
    """The buttons that are offered in this status."""
    return {name: action.label for name, action in actions.items() if status in action.statuses}


def describe_machine(machine: Document) -> Document:
    """A machine with its slots, and for each GPU the word for its state: held, free, quarantined, or its use by others.

    Slots are places for jobs without GPUs: those of its scheduler (`engine`) if it has one, else the configured number, by default one.
    """
    gpus: list[Document] = []
    for gpu in machine.get("gpus", []):
        if gpu["quarantine_reason"]:
            state = "quarantined"
        elif gpu["held_by"]:
            state = "held"
        else:
            free = gpu["observed"] == Observed.OK
            state = "free" if free else gpu["observed"].replace("_", " ")
        gpus.append({**gpu, "shown": state})
    slots = machine.get("total_slots")
    if slots is None:
        slots = machine.get("cpu_slots")
    if slots is None:
        slots = 1
    slots_held = machine.get("cpu_slots_held_by", [])
    return {
        **machine,
        "gpus": gpus,
        "slots_held": slots_held,
        "slots_free": max(0, slots - len(slots_held)),
    }


ROUTES = (
    page_route("/fleet", fleet),
    page_route("/fleet/machines/{machine}", machine),
    form_route("/fleet/machines/{machine}", action_handler("machine", ACTIONS), Role.ADMIN),
)
